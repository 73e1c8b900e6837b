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

from dataclasses import replace
from math import log2

from allfold_core.operations import Kind
from allfold_core.pricing.sharing import shared_seconds
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.registry import strategy_of
from allfold_core.schedules.strategy import StrategySpec
from allfold_core.topology import LinkModel

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
