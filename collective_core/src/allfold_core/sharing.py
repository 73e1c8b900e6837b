"""What a collective costs where all nodes share one machine: there, work does not overlap.

Between machines the busiest port decides, as :mod:`allfold_core.predict` has it. On one machine the
same few cores do what all nodes do, so that every message of any node delays all the others.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import lru_cache
from math import ceil

from allfold_core.chunking import wire_chunk
from allfold_core.compiler import compile_schedule
from allfold_core.operations import Kind
from allfold_core.plan import LinkModel
from allfold_core.schedule import Send, Signal

_CORES = 2
# Fine enough for the slices of any strategy to be told apart.
_GRAIN = 64


def shared_seconds(kind: Kind, strategy: str, nodes: int, nbytes: int, links: LinkModel) -> float:
    """Seconds for which the messages of all nodes keep the cores of their machine busy.

    A message costs α, which has no wire in it there, and β per byte. A machine is taken to have two
    cores, the least with which several agents make sense.

    Args:
        kind: the collective.
        strategy: a name as :func:`~allfold_core.compiler.parse_strategy` reads it.
        nodes: the number of nodes, all on the machine; a few.
        nbytes: the size of the tensor, or of all blocks.
        links: α and β.
    """
    messages, moved = 0, Fraction(0)
    chunk = wire_chunk(nbytes, nodes, links)
    for share, count in _traffic(kind, strategy, nodes):
        messages += count * max(1, ceil(share * nbytes / chunk))
        moved += count * share * nbytes
    return (messages * links.latency + float(moved) * links.seconds_per_byte) / _CORES


@lru_cache(maxsize=1024)
def _traffic(kind: Kind, strategy: str, nodes: int) -> tuple[tuple[Fraction, int], ...]:
    """All messages: which share of the tensor goes in how many of them.

    The shares are exact, so that a slice of some whole chunks is not rounded up to one more.
    """
    numel = nodes * nodes * _GRAIN
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
