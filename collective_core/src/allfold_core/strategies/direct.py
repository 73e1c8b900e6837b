"""The mesh: everybody sends to everybody what they need, in one latency.

An all-reduce sends everything to everybody: one latency, the fewest there can be, for (P-1) times
the bytes, so it is for short tensors. Blocks are sent to nobody who does not need them. Whoever
folds does it in node order, so all have the same bits although each computes them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allfold_core.operations import Kind
from allfold_core.schedule import Await, Fold, Receive, Send, Signal, Slice, Step


def others_after(nodes: int, me: int) -> Iterator[int]:
    """Everybody else, from the next node on: in step k no two nodes address the same one."""
    return ((me + distance) % nodes for distance in range(1, nodes))


def others_before(nodes: int, me: int) -> Iterator[int]:
    """Everybody else, in the order in which their messages to ``me`` come."""
    return ((me - distance) % nodes for distance in range(1, nodes))


def barrier(nodes: int, me: int) -> Iterator[Step]:
    """Tell everybody, hear from everybody."""
    yield from (Signal(other) for other in others_after(nodes, me))
    yield from (Await(other) for other in others_before(nodes, me))


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of node ``me``."""
    if kind is Kind.BARRIER:
        yield from barrier(nodes, me)
        return
    whole = Slice(0, numel)
    yield from (Send(whole, other) for other in others_after(nodes, me))
    yield Fold(whole, tuple(range(nodes)))


def block_program(kind: Kind, blocks: Sequence[Slice], me: int) -> Iterator[Step]:
    """Reduce-scatter: everybody their own block of mine. All-gather: everybody my block."""
    if kind is Kind.ALL_GATHER:
        yield from exchange([blocks[me]] * len(blocks), blocks, me)
        return
    others = list(others_after(len(blocks), me))
    yield from (Signal(other) for other in others if not blocks[other])
    yield from (Send(blocks[other], other) for other in others if blocks[other])
    if blocks[me]:
        yield Fold(blocks[me], tuple(range(len(blocks))))
    else:
        yield from (Await(other) for other in others_before(len(blocks), me))


def all_to_all(outgoing: Sequence[Slice], incoming: Sequence[Slice], me: int) -> Iterator[Step]:
    """Send ``outgoing[j]`` to every node j, receive ``incoming[j]`` from it, and wait for all.

    The nodes agree on sizes in pairs alone, so one for which all is well would not notice that two
    others disagree: nobody is done before everybody has received what it expects.
    """
    nodes = len(outgoing)
    after = list(others_after(nodes, me))
    yield from (Send(outgoing[other], other) for other in after if outgoing[other])
    yield from (
        Receive(incoming[other], other) for other in others_before(nodes, me) if incoming[other]
    )
    yield from barrier(nodes, me)


def exchange(outgoing: Sequence[Slice], incoming: Sequence[Slice], me: int) -> Iterator[Step]:
    """Send ``outgoing[j]`` to every node j and receive ``incoming[j]`` from it.

    Who has nothing for another node sends it a signal, first of all, because it has to wait for
    nothing then.
    """
    nodes = len(outgoing)
    yield from (Signal(other) for other in others_after(nodes, me) if not outgoing[other])
    after = list(others_after(nodes, me))
    yield from (Send(outgoing[other], other) for other in after if outgoing[other])
    before = list(others_before(nodes, me))
    yield from (Receive(incoming[other], other) for other in before if incoming[other])
    yield from (Await(other) for other in before if not incoming[other])
