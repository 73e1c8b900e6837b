"""Which strategy runs an op: the plan's override, or the cheapest by the cost model.

A pure function of the plan, so every node of an epoch chooses alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, log2

from allfold_core.chunking import wire_chunk
from allfold_core.codecs import Wire
from allfold_core.compiler import AUTO, strategies_for, strategy_of
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.plan import LinkModel, Plan
from allfold_core.predict import predict
from allfold_core.sharing import shared_seconds

WIDER_TREES = ("tree(4)", "tree(8)")
"""What ``auto`` tries beside the plain names: wider trees cost fewer latencies."""

JOINING = frozenset({"halving_doubling"})
"""Strategies that send several results as one slice."""

INCAST = 0.05
"""How much longer it takes, with each doubling of those that send to one node at once: their
packets meet in one queue, and the formulas take them to share it without loss. Measured at
1 Gbit/s, 4 nodes: a mesh loses a tenth, the blocks of ``halving_doubling`` 5 to 20 %."""

LONG_LINK_SECONDS = 1e-3
LONG_LINK_BYTES = 1.5e6
"""A link is long whose latency is above the one, and its rate times its round trip above the other:
then a connection is limited by the kernels' usual buffers, each for itself, and not by the line."""

CONNECTIONS = 4
"""At most so many connections of one node add up on a long link; some line will be full in the
end."""

MAX_TABLE_BYTES = 1 << 34
_SAME_TIME = 1e-9


def choose(
    kind: Kind,
    plan: Plan,
    nbytes: int,
    *,
    asked: str = AUTO,
    wire: Wire = Wire.NATIVE,
    feedback: bool = False,
) -> str:
    """The canonical name of the strategy for one op of ``nbytes``.

    Between strategies that take the same time (at two nodes the ring is ``direct2``) the one that
    :func:`candidates` names first is taken.

    Args:
        kind: the collective.
        plan: whose override wins over the cost model.
        nbytes: what travels, of the tensor or of all blocks.
        asked: the call's own choice, which wins over the plan's.
        wire: the format in which it travels.
        feedback: whether every encoding adds what earlier ones have cost, so that a slice that is
            encoded again comes out different.

    Raises:
        InvalidArgument: for a choice that cannot run ``kind``, or not with ``wire``.
    """
    keeps_slices = wire.has_blocks or feedback
    chosen = asked if asked != AUTO else plan.strategies.get(kind.label, AUTO)
    if chosen == AUTO:
        return _cheapest(kind, len(plan.members), nbytes, plan.links, keeps_slices)
    strategy = strategy_of(kind, chosen)
    if keeps_slices and strategy.name in JOINING:
        what = f"wire={wire.label!r}" if wire.has_blocks else "feedback="
        raise InvalidArgument(
            f"{strategy} cannot run with {what}: it sends results in other slices than those in "
            "which they were made, so the ranks would round them differently"
        )
    return str(strategy)


@lru_cache(maxsize=4096)
def _cheapest(kind: Kind, nodes: int, nbytes: int, links: LinkModel, keeps_slices: bool) -> str:
    best, best_time = "", inf
    for strategy in candidates(kind):
        if keeps_slices and strategy in JOINING:
            continue
        time = _seconds(kind, strategy, nodes, nbytes, links)
        if not best or time < best_time * (1 - _SAME_TIME):
            best, best_time = strategy, time
    return best


def _seconds(kind: Kind, strategy: str, nodes: int, nbytes: int, links: LinkModel) -> float:
    """What a strategy takes by its formula, and by what the formula leaves out."""
    if links.shared:
        time = predict(kind, strategy, nodes, nbytes, links)
        return time + shared_seconds(kind, strategy, nodes, nbytes, links)
    if nodes > 2 and _is_long(links):
        return _over_long_links(kind, strategy, nodes, nbytes, links)
    time = predict(kind, strategy, nodes, nbytes, links)
    return time * (1 + INCAST * log2(1 + _senders(kind, strategy, nodes))) if nodes > 2 else time


def _is_long(links: LinkModel) -> bool:
    holds_much = 2 * links.latency > LONG_LINK_BYTES * links.seconds_per_byte
    return holds_much and links.latency > LONG_LINK_SECONDS


def _over_long_links(kind: Kind, strategy: str, nodes: int, nbytes: int, links: LinkModel) -> float:
    """Connections add up, and none is in another's way.

    That is reckoned only where short slices travel. Of whole tensors it was measured to be less
    than that: 1 MiB takes 67 ms in ``direct``, where 36 would be due.
    """
    if strategy != "direct2" and not (strategy == "direct" and kind.has_blocks):
        return predict(kind, strategy, nodes, nbytes, links)
    # Agents cut by the links of the plan.
    chunks = max(1, ceil(nbytes / nodes / wire_chunk(nbytes, nodes, links)))
    per_byte = links.seconds_per_byte / min(nodes - 1, CONNECTIONS)
    links = replace(links, seconds_per_byte=per_byte)
    return predict(kind, strategy, nodes, nbytes, links, chunks)


def _senders(kind: Kind, strategy: str, nodes: int) -> int:
    """How many nodes send to the same one at the same time; 0 where they take turns."""
    if strategy in ("direct", "direct2"):
        return nodes - 1
    # A block for the next partner does not wait until the one before is served.
    passes_blocks = strategy == "halving_doubling" and kind.has_blocks
    return nodes.bit_length() - 1 if passes_blocks else 0


def candidates(kind: Kind) -> tuple[str, ...]:
    """The canonical names among which ``auto`` chooses, the preferred ones first."""
    names = tuple(str(strategy_of(kind, name)) for name in strategies_for(kind))
    return names + WIDER_TREES if "tree" in strategies_for(kind) else names


def strategy_table(kind: Kind, plan: Plan) -> list[tuple[int, str]]:
    """From how many bytes on which strategy runs: the boundaries, at powers of two, for people."""
    table: list[tuple[int, str]] = []
    for nbytes in _table_sizes():
        strategy = choose(kind, plan, nbytes)
        if not table or table[-1][1] != strategy:
            table.append((nbytes, strategy))
    return table


def _table_sizes() -> Iterator[int]:
    yield 0
    nbytes = 1
    while nbytes <= MAX_TABLE_BYTES:
        yield nbytes
        nbytes *= 2
