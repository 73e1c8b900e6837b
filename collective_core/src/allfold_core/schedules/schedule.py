"""Schedules: what every node of a group sends, receives and folds in one op.

A strategy is a pure function that yields the *program* of one node: an ordered list of steps on
element ranges of that node's *work buffer*. The buffer starts as the node's own contribution (the
fold of its local ranks) and ends as the result, on the nodes that get one. The executor may
overlap steps as long as the outcome is that of running each program in order; it splits every
slice into chunks, so that receiving, folding and sending overlap.

Edges are first-in first-out: the k-th ``Send`` from a to b is met by the k-th ``Receive``, or
``Fold`` source, of a at b, and the slices are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from allfold_core.operations import Kind
from allfold_core.topology import LinkModel, Member


def ring_order(members: Sequence[Member]) -> tuple[Member, ...]:
    """The members by zone, device type and name, so that few edges of a ring leave a zone.

    The order does not depend on that of ``members``.
    """
    return tuple(sorted(members, key=lambda member: (*_place(member), member.node)))


def tree_order(members: Sequence[Member]) -> tuple[int, ...]:
    """Indices of ``members`` from the root of a tree on, for ``Plan.tree_order``.

    The nodes of one zone are next to each other, and in it those of one device type; the compiler
    lays trees of any arity out so that neighbours in this order share a subtree. A group of n
    nodes then hangs on the rest by few edges, instead of by up to n. The largest zone comes first,
    and in each zone the most frequent device type, so the root is among its like, and large groups
    fill whole subtrees; names break ties, so the order of ``members`` does not matter.
    """
    zones = Counter(member.zone for member in members)
    places = Counter(_place(member) for member in members)

    def rank(index: int) -> tuple[int, str, int, str, str]:
        zone, device_type = place = _place(members[index])
        return -zones[zone], zone, -places[place], device_type, members[index].node

    return tuple(sorted(range(len(members)), key=rank))


def _place(member: Member) -> tuple[str, str]:
    return member.zone, member.device_type


SMALLEST_CHUNK = 64 * 1024
LARGEST_CHUNK = 2 * 1024 * 1024
CHUNKS_PER_SLICE = 8

# What a chunk has at least where links are fast, if the tensor has as much.
_SMALL_CHUNK = 1024 * 1024
# How long a slow link should be busy with one chunk.
_SHORTEST_SECONDS = 0.5e-3
_LONGEST_SECONDS = 2e-3
# As good as no cost at all.
_LEAST_SECONDS_PER_BYTE = 1e-15


def wire_chunk(nbytes: int, nodes: int, links: LinkModel) -> int:
    """The bytes of a chunk of a tensor of ``nbytes``: a fraction of a node's slice.

    Each chunk costs some 100 us of Python at either end, so a chunk is not too small. Nothing
    overlaps with a slice's first chunk and last one, so it is not too large; on a slow link, which
    is busy for longer with the same bytes, it is smaller.
    """
    rate = 1 / max(links.seconds_per_byte, _LEAST_SECONDS_PER_BYTE)
    smallest = min(_SMALL_CHUNK, max(SMALLEST_CHUNK, int(_SHORTEST_SECONDS * rate)))
    largest = min(LARGEST_CHUNK, max(smallest, int(_LONGEST_SECONDS * rate)))
    return max(smallest, min(largest, nbytes // (nodes * CHUNKS_PER_SLICE)))


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """The element range [start, stop) of a flattened tensor."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range of elements: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Send:
    """Send the present content of ``slice`` to node ``to``."""

    slice: Slice
    to: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Overwrite ``slice`` with what node ``source`` sends."""

    slice: Slice
    source: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Replace ``slice`` by the left fold of ``operands``, in exactly this order.

    Each operand is a node: another one stands for what it sends, the node itself for the present
    content of the slice. ``Fold(s, (0, 1, 2))`` on node 1 is ``(received from 0 ∘ own) ∘ received
    from 2``: the order is explicit, so a sum has the same bits wherever it is computed.
    """

    slice: Slice
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """Tell node ``to``, without data, that all earlier steps of this program are done."""

    to: int


@dataclass(frozen=True, slots=True)
class Await:
    """Begin no later step of this program before the signal of ``source`` has come."""

    source: int


Step = Send | Receive | Fold | Signal | Await
Program = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The programs of all nodes of one op.

    Attributes:
        root: a node, -1 for kinds without one.
        blocks: for kinds that have them, the block of each node; for an all-to-all that of each
            pair of nodes, by source and then by destination.
    """

    kind: Kind
    strategy: str
    numel: int
    root: int
    programs: tuple[Program, ...]
    blocks: tuple[Slice, ...] = ()

    @property
    def nodes(self) -> int:
        return len(self.programs)

    def origin(self, block: int) -> int:
        """The node whose content of a block is the result; -1 where it is everybody's fold."""
        match self.kind:
            case Kind.BROADCAST | Kind.SCATTER:
                return self.root
            case Kind.ALL_GATHER | Kind.GATHER:
                return block
            case Kind.ALL_TO_ALL:
                return block // self.nodes
        return -1

    def has_result(self, node: int, block: int) -> bool:
        """Return True if a block of the work buffer of ``node`` ends as a result."""
        match self.kind:
            case Kind.REDUCE | Kind.GATHER:
                return node == self.root
            case Kind.REDUCE_SCATTER | Kind.SCATTER:
                return node == block
            case Kind.ALL_TO_ALL:
                return node == block % self.nodes
        return True


def balanced_slices(numel: int, parts: int) -> tuple[Slice, ...]:
    """Cut ``numel`` elements into ``parts`` contiguous slices whose sizes differ by at most one.

    The first ``numel % parts`` slices have the extra element; with fewer elements than parts the
    last slices are empty, and empty slices are never sent.
    """
    if parts < 1:
        raise ValueError(f"cannot cut into {parts} parts; at least 1 is needed")
    size, extra = divmod(numel, parts)
    bounds = [index * size + min(index, extra) for index in range(parts + 1)]
    return tuple(Slice(start, stop) for start, stop in pairwise(bounds))


def relabel(program: Sequence[Step], nodes: Sequence[int]) -> Program:
    """The same program with position ``i`` of a strategy played by node ``nodes[i]``."""
    return tuple(_relabel_step(step, nodes) for step in program)


def _relabel_step(step: Step, nodes: Sequence[int]) -> Step:
    match step:
        case Send(slice, to):
            return Send(slice, nodes[to])
        case Receive(slice, source):
            return Receive(slice, nodes[source])
        case Fold(slice, operands):
            return Fold(slice, tuple(nodes[operand] for operand in operands))
        case Signal(to):
            return Signal(nodes[to])
    return Await(nodes[step.source])
