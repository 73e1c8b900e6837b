"""One-shot mesh: everybody sends everything to everybody and folds on its own.

One latency, the fewest there can be, for (P-1) times the bytes: for short tensors. Every node
folds in node order, so all have the same bits although each computes them itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Await, Fold, Send, Signal, Slice, Step


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
