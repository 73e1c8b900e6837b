"""The cost of an op: the price by which ``auto`` decides.

Every strategy brings its closed form. With P nodes, m bytes, and of the
:class:`~allfold_core.plan.LinkModel` α (latency), o (overhead), β (seconds per byte) and γ (seconds
per folded byte), those of an all-reduce are in ``docs/strategies.md``. They are exact for slices of
one message where P suits them (any P that divides the tensor for direct2 and ring, a power of two
for halving_doubling, a full tree for tree(k)). Long slices are cut into chunks, so that receiving,
folding and sending overlap: behind the first chunk, only the slowest of the three counts.

:func:`predict` adds what closed forms leave out: incast, long links, and machines that several
nodes share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, log2

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import strategy_of
from allfold_core.schedules.schedule import Send, Signal, wire_chunk
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


INCAST = 0.05
"""The share of time added by each doubling of the nodes that send to one node at once: their
packets meet in one queue, and the closed forms take them to share it without loss. Measured at
1 Gbit/s, 4 nodes: a mesh loses a tenth, the blocks of ``halving_doubling`` 5 to 20 %."""

LONG_LINK_SECONDS = 1e-3
LONG_LINK_BYTES = 1.5e6
"""A link is long whose latency is above the one, and its rate times its round trip above the other:
then a connection is limited by the kernels' usual buffers, each for itself, and not by the line."""

CONNECTIONS = 4
"""At most so many connections of one node add up on a long link; some line will be full in the
end."""


def predict(kind: Kind, strategy: str, nodes: int, nbytes: int, links: LinkModel) -> float:
    """The seconds that one op is expected to take on a real network.

    Args:
        kind: the collective.
        strategy: a name as :func:`~allfold_core.schedules.registry.parse_strategy` reads it.
        nodes: the number of nodes.
        nbytes: the size of the tensor, or of all blocks together.
        links: what a link costs, and whether the nodes share a machine.

    Raises:
        InvalidArgument: for a strategy that does not exist or cannot run the kind.
    """
    spec = strategy_of(kind, strategy)
    if nodes == 1:
        return 0.0
    op = _priced(kind, spec, nodes, nbytes, links)
    form = spec.strategy.predict
    if links.shared_cores:
        return form(op) + shared_seconds(kind, spec, nodes, op.nbytes, links)
    if nodes == 2:
        return form(op)
    if _is_long(links):
        parallel = op.kind in spec.strategy.parallel_kinds
        return form(_over_parallel_connections(op) if parallel else op)
    return form(op) * (1 + INCAST * log2(1 + spec.strategy.senders(kind, nodes)))


def closed_form(
    kind: Kind,
    strategy: str,
    nodes: int,
    nbytes: int,
    links: LinkModel,
    chunks: int | None = None,
) -> float:
    """The seconds by the strategy's closed form alone, as the simulated clock confirms them.

    Args:
        kind, strategy, nodes, nbytes, links: as for :func:`predict`.
        chunks: into how many pieces each slice is cut; as agents do, if not given.
    """
    spec = strategy_of(kind, strategy)
    if nodes == 1:
        return 0.0
    return spec.strategy.predict(_priced(kind, spec, nodes, nbytes, links, chunks))


def _priced(
    kind: Kind,
    spec: StrategySpec,
    nodes: int,
    nbytes: int,
    links: LinkModel,
    chunks: int | None = None,
) -> PricedOp:
    if kind is Kind.BARRIER or not nbytes:
        kind, nbytes = Kind.BARRIER, 0
    return PricedOp(kind, nodes, nbytes, links, spec.parameter, chunks)


def _is_long(links: LinkModel) -> bool:
    holds_much = 2 * links.latency > LONG_LINK_BYTES * links.seconds_per_byte
    return holds_much and links.latency > LONG_LINK_SECONDS


def _over_parallel_connections(op: PricedOp) -> PricedOp:
    """Return the op priced for links whose parallel connections add up their bandwidths."""
    # Agents cut by the links of the plan, whatever several connections carry.
    chunks = op.pieces(op.nbytes / op.nodes)
    per_byte = op.beta / min(op.nodes - 1, CONNECTIONS)
    return replace(op, links=replace(op.links, seconds_per_byte=per_byte), chunks=chunks)
