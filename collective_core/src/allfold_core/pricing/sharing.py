"""The cost of a collective whose nodes all share one machine: there, work does not overlap.

Between machines the busiest port decides, as the closed forms have it. On one machine the same
cores do what all nodes do, so that every message of any node delays all the others.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import lru_cache
from math import ceil

from allfold_core.operations import Kind
from allfold_core.schedules.chunking import wire_chunk
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.schedule import Send, Signal
from allfold_core.schedules.strategy import StrategySpec
from allfold_core.topology import LinkModel

# Fine enough for the slices of any strategy to be told apart.
_GRAIN = 64


def shared_seconds(
    kind: Kind, spec: StrategySpec, nodes: int, nbytes: int, links: LinkModel
) -> float:
    """Seconds for which the messages of all nodes keep the cores of their machine busy.

    A message costs α, which has no wire in it there, and β per byte; the cores share the work.

    Args:
        kind: the collective.
        spec: the strategy.
        nodes: the number of nodes, all on the machine; a few.
        nbytes: the size of the tensor, or of all blocks.
        links: α, β and the cores.
    """
    messages, moved = 0, Fraction(0)
    chunk = wire_chunk(nbytes, nodes, links)
    # Without elements, and with fewer than nodes, strategies run other schedules.
    few = nbytes < nodes and not (nbytes and kind.has_blocks)
    numel = nbytes if few else nodes * nodes * _GRAIN
    for share, count in _traffic(kind, str(spec), nodes, numel):
        messages += count * max(1, ceil(share * nbytes / chunk))
        moved += count * share * nbytes
    work = messages * links.latency + float(moved) * links.seconds_per_byte
    return work / links.shared_cores


@lru_cache(maxsize=1024)
def _traffic(kind: Kind, strategy: str, nodes: int, numel: int) -> tuple[tuple[Fraction, int], ...]:
    """Return the messages of a schedule by size: (share of the tensor, number of messages).

    The shares are exact, so that a slice of some whole chunks is not rounded up to one more.
    """
    root = 0 if kind.has_root else -1
    schedule = compile_schedule(kind, strategy, nodes=nodes, numel=numel, root=root)
    sizes: Counter[Fraction] = Counter()
    for program in schedule.programs:
        for step in program:
            if isinstance(step, Send):
                sizes[Fraction(len(step.slice), numel)] += 1
            elif isinstance(step, Signal):
                sizes[Fraction(0)] += 1
    return tuple(sizes.items())
