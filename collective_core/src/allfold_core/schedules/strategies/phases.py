"""Places in a heap, and the four waves of tree-shaped strategies, seen from one node.

An up wave ends at the root when it has heard from everybody; a down wave starts there. Each kind
is one up wave and one down wave, with data where the kind moves data and signals where it does
not. The wave of signals is what keeps outcomes common: no node may finish before it has heard,
directly or through others, from every node, or a failure could reach some nodes too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from allfold_core.operations import Kind
from allfold_core.schedules.schedule import Await, Fold, Receive, Send, Signal, Slice, Step


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A node's place in a tree: its parent, -1 for the root, and its children."""

    parent: int
    children: tuple[int, ...]


def place_in_heap(nodes: int, arity: int, me: int) -> TreePlace:
    """The place of position ``me`` in a heap of ``nodes`` positions."""
    first = me * arity + 1
    children = tuple(range(min(first, nodes), min(first + arity, nodes)))
    return TreePlace((me - 1) // arity if me else -1, children)


def fold_up(place: TreePlace, me: int, data: Slice) -> Iterator[Step]:
    """Fold the children's subtrees onto the own content, and pass the fold to the parent."""
    if place.children:
        yield Fold(data, (me, *place.children))
    if place.parent >= 0:
        yield Send(data, place.parent)


def copy_down(place: TreePlace, data: Slice) -> Iterator[Step]:
    """Take the content of the parent, and pass it to the children."""
    if place.parent >= 0:
        yield Receive(data, place.parent)
    for child in place.children:
        yield Send(data, child)


def signal_up(place: TreePlace) -> Iterator[Step]:
    """Tell the parent that the whole subtree has come."""
    for child in place.children:
        yield Await(child)
    if place.parent >= 0:
        yield Signal(place.parent)


def signal_down(place: TreePlace) -> Iterator[Step]:
    """Tell the children what the parent says: that everybody has come."""
    if place.parent >= 0:
        yield Await(place.parent)
    for child in place.children:
        yield Signal(child)


def two_waves(kind: Kind, place: TreePlace, me: int, data: Slice) -> Iterator[Step]:
    """One op of any kind over one tree whose root is the kind's root."""
    yield from fold_up(place, me, data) if kind.reduces else signal_up(place)
    if kind in (Kind.ALL_REDUCE, Kind.BROADCAST):
        yield from copy_down(place, data)
    else:
        yield from signal_down(place)
