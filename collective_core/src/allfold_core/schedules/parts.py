"""The meaning of every collective: which rank's input elements go where in which rank's output.

An op is a list of *parts*. A part is a range of elements; its *sources* are the ranks that bring
it, folded where there are several, and its *targets* the ranks that get it. The parts lie one after
the other in the op's index space, in which the nodes' schedules move slices: those of one node
next to each other, so that a node's block is one slice.

An all-to-all has an index space of its own kind. No node knows the sizes of all pairs, so the block
that node i sends to node j begins at (i * nodes + j) * :data:`PAIR_STRIDE`, and a node's work
buffer holds the blocks that concern it, one after the other.

A weighted mean has the weights of all ranks behind its elements. Each node brings those of its own
ranks, and zeros for the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint, Kind
from allfold_core.schedules.schedule import Slice

PAIR_STRIDE = 1 << 44
OWN = -1
"""Instead of a rank: what a node brings by itself."""
WEIGHT_ELEMENTS = 2
"""A weight is the sum of so many elements: float32 alone has too few digits to count tokens."""

Placement = tuple[tuple[int, ...], ...]
"""The ranks of each node."""


@dataclass(frozen=True, slots=True)
class End:
    """A place in a rank's input or output: the element ``offset``."""

    rank: int
    offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """A range of the index space, and its ends on one node."""

    slice: Slice
    sources: tuple[End, ...]
    targets: tuple[End, ...]


Piece = tuple[Part, int, int]
"""A part, and the (start, stop) of a range of it in the index space."""


@dataclass(frozen=True)
class NodeParts:
    """One op as one node sees it.

    Attributes:
        parts: those with an end on this node, in the order of their slices.
        blocks: what :func:`allfold_core.schedules.compiler.compile_program` takes.
        numel: the length of the index space, as schedules have it.
        held: elements of the node's work buffer.
        spans: for an all-to-all, where the node's blocks begin: in the index space and in the work
            buffer. Elsewhere the two are the same.
        weights: the elements of all ranks' weights in a weighted mean, which no wire rounds.
    """

    parts: tuple[Part, ...]
    blocks: tuple[Slice, ...] | None
    numel: int
    held: int
    spans: tuple[tuple[int, int], ...] = ()
    weights: Slice | None = None
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(part.slice.start for part in self.parts))

    @property
    def results(self) -> Iterator[Slice]:
        """Iterate over the slices that the work buffer must hold in the end."""
        return (part.slice for part in self.parts if part.targets)

    def place(self, start: int) -> int:
        """Return the offset in the work buffer of an element of the index space."""
        if not self.spans:
            return start
        index = bisect_right(self.spans, (start, PAIR_STRIDE)) - 1
        begin, offset = self.spans[index]
        return offset + start - begin

    def parts_in(self, start: int, stop: int) -> Iterator[Piece]:
        """The parts that overlap a range, each with the overlap's bounds."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self.parts) and self.parts[index].slice.start < stop:
            part = self.parts[index]
            low, high = max(start, part.slice.start), min(stop, part.slice.stop)
            if low < high:
                yield part, low, high
            index += 1


def input_numel(fingerprint: Fingerprint, rank: int, world_size: int) -> int:
    """The elements that a rank brings; 0 where it need not bring any."""
    kind = fingerprint.kind
    if kind in (Kind.BROADCAST, Kind.SCATTER) and rank != fingerprint.root:
        return 0
    if kind is Kind.ALL_TO_ALL:
        return sum(fingerprint.sent()) * fingerprint.numel
    if kind in (Kind.REDUCE_SCATTER, Kind.SCATTER):
        return sum(block_numels(fingerprint, world_size))
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        return block_numels(fingerprint, world_size)[rank]
    return fingerprint.numel


def output_numel(fingerprint: Fingerprint, rank: int, world_size: int) -> int:
    """The elements that a rank gets; 0 where it gets none."""
    kind = fingerprint.kind
    if kind in (Kind.REDUCE, Kind.GATHER) and rank != fingerprint.root:
        return 0
    if kind is Kind.ALL_TO_ALL:
        return sum(fingerprint.received()) * fingerprint.numel
    if kind in (Kind.REDUCE_SCATTER, Kind.SCATTER):
        return block_numels(fingerprint, world_size)[rank]
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        return sum(block_numels(fingerprint, world_size))
    return fingerprint.numel


def block_numels(fingerprint: Fingerprint, world_size: int) -> tuple[int, ...]:
    """The elements of each rank's block, for kinds that have one per rank."""
    row = fingerprint.numel
    if not fingerprint.counts:
        return (row,) * world_size
    return tuple(count * row for count in fingerprint.counts)


def check_counts(fingerprint: Fingerprint, world_size: int) -> None:
    """Refuse counts that do not fit the group; ``InvalidArgument``."""
    kind, given = fingerprint.kind, len(fingerprint.counts)
    needed = 2 * world_size if kind is Kind.ALL_TO_ALL else world_size
    if kind.has_blocks and (given == needed or (not given and kind is not Kind.ALL_TO_ALL)):
        return
    if kind.has_blocks or given:
        raise InvalidArgument(f"{kind.label} of {world_size} ranks with {given} counts")


def with_weights(parts: NodeParts, world_size: int) -> NodeParts:
    """The layout of a weighted mean between nodes: that of an all-reduce, and all weights."""
    start = parts.numel
    weights = Slice(start, start + WEIGHT_ELEMENTS * world_size)
    part = Part(weights, (End(OWN, 0),), ())
    end = weights.stop
    return replace(parts, parts=(*parts.parts, part), numel=end, held=end, weights=weights)


@lru_cache(maxsize=512)
def layout(
    kind: Kind,
    sizes: tuple[int, ...],
    root: int,
    placement: Placement,
    node: int,
    rounded: bool = False,
) -> NodeParts:
    """The layout of an op for one node.

    Args:
        kind: the collective.
        sizes: elements: of the tensor; for kinds with blocks, of each rank's block.
        root: the root rank, -1 for none.
        placement: the ranks of each node.
        node: the node whose view it is.
        rounded: the wire rounds what is broadcast, so the root needs what the others get.
    """
    ranks = placement[node]
    if not kind.has_blocks:
        sources = ranks if kind is not Kind.BROADCAST else _only(ranks, root)
        targets = ranks if kind is not Kind.REDUCE else _only(ranks, root)
        if kind is Kind.BROADCAST and not rounded:
            targets = tuple(rank for rank in ranks if rank != root)
        whole = Part(Slice(0, sizes[0]), _ends(sources), _ends(targets))
        return NodeParts((whole,) if sizes[0] else (), None, sizes[0], sizes[0])
    offsets = list(accumulate(sizes, initial=0))
    parts: list[Part] = []
    blocks: list[Slice] = []
    start = 0
    for members in placement:
        first = start
        for rank in members:
            span = Slice(start, start + sizes[rank])
            part = Part(span, *_block_ends(kind, rank, root, ranks, offsets[rank]))
            if span and (part.sources or part.targets):
                parts.append(part)
            start = span.stop
        blocks.append(Slice(first, start))
    return NodeParts(tuple(parts), tuple(blocks), start, start)


def _block_ends(
    kind: Kind, rank: int, root: int, local: Sequence[int], offset: int
) -> tuple[tuple[End, ...], tuple[End, ...]]:
    """The local sources and targets of the block of ``rank``, which lies at ``offset`` of all."""
    owner = _ends(_only(local, rank))
    match kind:
        case Kind.ALL_GATHER:
            return owner, _ends(local, offset)
        case Kind.GATHER:
            return owner, _ends(_only(local, root), offset)
        case Kind.REDUCE_SCATTER:
            return _ends(local, offset), owner
    return _ends(_only(local, root), offset), owner  # scatter


def _only(ranks: Iterable[int], rank: int) -> tuple[int, ...]:
    return (rank,) if rank in ranks else ()


def _ends(ranks: Iterable[int], offset: int = 0) -> tuple[End, ...]:
    return tuple(End(rank, offset) for rank in ranks)


def exchange_layout(
    sent: dict[int, Sequence[int]],
    received: dict[int, Sequence[int]],
    placement: Placement,
    node: int,
) -> NodeParts:
    """The layout of an all-to-all for one node.

    Args:
        sent: by local rank, the elements that it sends to each rank.
        received: by local rank, the elements that it gets from each rank.
        placement: the ranks of each node.
        node: the node whose view it is.
    """
    nodes, local = len(placement), placement[node]
    outputs = {rank: list(accumulate(received[rank], initial=0)) for rank in local}
    inputs = {rank: list(accumulate(sent[rank], initial=0)) for rank in local}
    blocks = [Slice(0, 0)] * (nodes * nodes)
    parts: list[Part] = []
    spans: list[tuple[int, int]] = []
    held = 0
    pairs = {(node, other) for other in range(nodes)} | {(other, node) for other in range(nodes)}
    for source, destination in sorted(pairs):
        number = source * nodes + destination
        start = first = number * PAIR_STRIDE
        for giver in placement[source]:
            for taker in placement[destination]:
                size = sent[giver][taker] if source == node else received[taker][giver]
                if size:
                    parts.append(
                        Part(
                            Slice(start, start + size),
                            (End(giver, inputs[giver][taker]),) if source == node else (),
                            (End(taker, outputs[taker][giver]),) if destination == node else (),
                        )
                    )
                    start += size
        if source != destination:
            blocks[number] = Slice(first, start)
        spans.append((first, held))
        held += start - first
    return NodeParts(tuple(parts), tuple(blocks), nodes * nodes * PAIR_STRIDE, held, tuple(spans))


def even_exchange(fingerprint: Fingerprint, placement: Placement, node: int) -> NodeParts:
    """The layout of an all-to-all whose blocks all have one size."""
    world_size = sum(map(len, placement))
    share = (fingerprint.counts[0] * fingerprint.numel,) * world_size
    shares: dict[int, Sequence[int]] = dict.fromkeys(placement[node], share)
    return exchange_layout(shares, shares, placement, node)


def received(parts: NodeParts, nodes: int, node: int) -> NodeParts:
    """The same with a work buffer of what the node gets alone.

    Args:
        parts: the layout for this node.
        nodes: how many there are.
    """
    if not parts.spans:
        return parts
    ends = [*(offset for _, offset in parts.spans[1:]), parts.held]
    spans, held = [], 0
    for (first, offset), end in zip(parts.spans, ends, strict=True):
        if first // PAIR_STRIDE % nodes == node:
            spans.append((first, held))
            held += end - offset
    return replace(parts, held=held, spans=tuple(spans))
