"""The work of this node for ops of the short lane that are alike, in a group on several nodes.

Nodes exchange *chunks*, ranges of an op's index space (:mod:`allfold_core.schedules.parts`), in
frames that say where each begins. A chunk is folded while the processor's caches still have it, and
while the next one is on its way.

A node has one *row* for what it gets: of an all-to-all, the blocks that it gets from each node, one
after the other; of any other op the index space. What it brings may have to be put together in a
row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.compilation.op_spec import OpSpec, sizes
from allfold_agent.edges.outgoing import FilePlace
from allfold_agent.groups.lane.op_memory import (
    NOTHING,
    Elements,
    OpMemory,
    Outgoing,
    SharedBytes,
    private,
)
from allfold_agent.groups.lane.page import AgentPage
from allfold_agent.groups.lane.payloads import LONGEST_PAYLOAD, Payload
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.lane import sends_everything
from allfold_core.schedules.parts import NodeParts, Part, even_exchange, layout, received
from allfold_core.schedules.schedule import Slice, balanced_slices
from allfold_core.short_lane.choice import longest_end
from allfold_core.short_lane.page import PageLayout
from allfold_core.survival.reports import is_replicated

Chunk = tuple[int, int, int]
"""The other node, and the start and stop of a range of the index space."""


class _Source(NamedTuple):
    """The place of a chunk that this node brings.

    Attributes:
        row: the input in which it lies as it is; -1 if it has to be put together.
        start: there, or in the row ``own``.
    """

    row: int
    start: int


class LaneProgram:
    """The exchange of one kind of op.

    Args:
        page: the layout of that of the local ranks.
        me: the index of this node.

    Attributes:
        is_in_slots: the tensors are in the slots of the page; else in arenas, and in a place of it.
        is_in_parts: a node gets a part of the result that is of no use to others, so each has to
            know that the others hold theirs before it hands out its own.
        input_bytes: what each local rank brings.
        result_bytes: of the row that local ranks take.
        kept_bytes: of a kept result that is not the result itself; 0 where it is.
        own_bytes: of a row of what this node brings; 0 without one.
        gets_nothing: this node holds its part of such a result from the beginning.
        words: the other nodes that have to say that they hold theirs; for the others, their frames
            do.
        others: the other nodes.
        expected: where the chunks that come from others stop, by node and start.
    """

    def __init__(self, spec: OpSpec, plan: Plan, page: PageLayout, me: int) -> None:
        fingerprint = spec.fingerprint
        self.spec = spec
        self.arithmetic = arithmetic = Arithmetic(fingerprint, plan.world_size)
        self._kind = kind = fingerprint.kind
        self._me = me
        self._placement = tuple(member.ranks for member in plan.members)
        self._nodes = range(len(self._placement))
        self.others = self._after(me)
        self._ranks = self._placement[me]
        self._parts = self._layout(fingerprint.root, plan.world_size)
        self._row = received(self._parts, len(self._nodes), me)
        self._numel = self._parts.numel
        self._root = plan.index_of_rank(fingerprint.root) if kind.has_root else -1
        longest = longest_end(fingerprint, plan.world_size)
        self._is_whole = is_replicated(kind) or sends_everything(kind, plan, longest)
        self.is_in_parts = not self._is_whole
        self.is_in_slots = longest <= page.slot_bytes
        self.input_bytes = [spec.input_bytes[rank] for rank in self._ranks]
        self._reduces = kind.reduces
        self._itemsize = arithmetic.kept_itemsize if kind.reduces else arithmetic.itemsize
        self._spreads = spec.strategy == "direct2" and kind is Kind.ALL_REDUCE
        self._all_fold = kind.reduces and self._is_whole and not self._spreads
        self._folds = self._what_each_folds()
        self._sends = tuple(self._chunks_from(me))
        self.expected = {
            (node, start): stop
            for node in self.others
            for to, start, stop in self._all_from(node)
            if to == me
        }
        takers = set(filter(self._gets_something, self._nodes)) if self.is_in_parts else set()
        self.gets_nothing = self.is_in_parts and me not in takers
        self.words = frozenset(takers - {me})
        self._in_slots: dict[int, OpMemory] = {}
        self._own: SharedBytes | None = None
        self._plan_memory()

    # What travels

    def _after(self, node: int) -> Sequence[int]:
        """Return the other nodes from the next one on, so that not all send to one node first."""
        return [*self._nodes[node + 1 :], *self._nodes[:node]]

    def _layout(self, root: int, world_size: int) -> NodeParts:
        fingerprint = self.spec.fingerprint
        if self._kind is Kind.ALL_TO_ALL:
            return even_exchange(fingerprint, self._placement, self._me)
        cut = sizes(fingerprint, world_size)
        return layout(self._kind, cut, root, self._placement, self._me)

    def _block(self, node: int) -> Slice:
        blocks = self._parts.blocks
        assert blocks is not None
        return blocks[node]

    def _what_each_folds(self) -> Sequence[Slice]:
        """By node, the range of the index space that it folds."""
        whole, nothing = Slice(0, self._numel), Slice(0, 0)
        if not self._reduces:
            return [nothing] * len(self._nodes)
        if self._all_fold:
            return [whole] * len(self._nodes)
        match self._kind:
            case Kind.REDUCE_SCATTER:
                return list(map(self._block, self._nodes))
            case Kind.REDUCE:
                return [whole if node == self._root else nothing for node in self._nodes]
        return balanced_slices(self._numel, len(self._nodes))

    def _to(self, node: int, other: int) -> Slice:
        """The range that a node sends another one at once."""
        if self._reduces:
            return self._folds[other]
        match self._kind:
            case Kind.ALL_GATHER:
                return self._block(node)
            case Kind.GATHER if other == self._root or self._is_whole:
                return self._block(node)
            case Kind.SCATTER | Kind.BROADCAST if node == self._root:
                return Slice(0, self._numel) if self._is_whole else self._block(other)
            case Kind.ALL_TO_ALL:
                return self._block(node * len(self._nodes) + other)
        return Slice(0, 0)

    def _gets_something(self, node: int) -> bool:
        """Return True if other nodes send a node anything that its ranks get."""
        if self._kind is Kind.ALL_TO_ALL:  # of the pairs of others nothing is known here
            return True
        return any(self._to(other, node) for other in self._after(node))

    def _chunks(self, part: Slice) -> Iterator[tuple[int, int]]:
        step = max(LONGEST_PAYLOAD // self._itemsize, 1)
        for start in range(part.start, part.stop, step):
            yield start, min(start + step, part.stop)

    def _chunks_from(self, node: int) -> Iterator[Chunk]:
        """Yield the chunks that a node sends at once: the first to everybody, then the second.

        Where there is nothing to send, an empty frame at the end of the index space says that the
        node has called, and that it has the result of the op before.
        """
        others = self._after(node)
        nothing = [(self._numel, self._numel)]
        parts = [list(self._chunks(self._to(node, other))) or nothing for other in others]
        for row in zip_longest(*parts):
            for other, chunk in zip(others, row, strict=True):
                if chunk is not None:
                    yield (other, *chunk)

    def _all_from(self, node: int) -> Iterator[Chunk]:
        yield from self._chunks_from(node)
        if self._spreads:
            for start, stop in self._chunks(self._folds[node]):
                yield from ((other, start, stop) for other in self._nodes if other != node)

    # The memory

    def _plan_memory(self) -> None:
        """Find out which rows there are, and from where the chunks that this node brings come."""
        arithmetic, kind = self.arithmetic, self._kind
        row = self._row.held
        self.result_bytes = row * arithmetic.itemsize
        self.kept_bytes = self.own_bytes = 0
        if self._reduces and (arithmetic.converts or arithmetic.divisor):
            self.kept_bytes = row * self._itemsize
        # Others may read what is to be handed out everywhere until long after it was published.
        self._reads_inputs = (self._reduces or self.is_in_parts) and (
            not self._reduces or arithmetic.takes_inputs_as_they_are
        )
        brought = [(start, stop) for _, start, stop in self._sends if start < stop]
        brought += self._chunks(self._folds[self._me])
        self._sources = {start: self._source(start, stop) for start, stop in brought}
        self._stops = dict(brought)
        is_apart = self._reduces or kind is Kind.ALL_TO_ALL
        if is_apart and any(source.row < 0 for source in self._sources.values()):
            self.own_bytes = self._parts.held * self._itemsize

    def _source(self, start: int, stop: int) -> _Source:
        pieces = list(self._parts.parts_in(start, stop))
        rows = {self._ranks.index(end.rank) for part, _, _ in pieces for end in part.sources}
        places = [
            part.sources[0].offset + low - part.slice.start - (low - start)
            for part, low, _ in pieces
            if part.sources
        ]
        one_each = all(len(part.sources) == 1 for part, _, _ in pieces)
        if self._reads_inputs and one_each and len(rows) == 1 and len(set(places)) == 1:
            return _Source(rows.pop(), places[0])
        return _Source(-1, self._parts.place(start))

    def in_slot(self, page: AgentPage, slot: int) -> OpMemory:
        """Return the memory of an op whose tensors are in the slots of a page."""
        found = self._in_slots.get(slot)
        if found is None:
            starts = [page.layout.input_offset(row, slot) for row in range(page.layout.agent + 1)]
            *inputs, result = (SharedBytes(page.view(each), page.file, each) for each in starts)
            self._own = self._own or private(self.own_bytes)
            kept = private(self.kept_bytes)
            found = self._in_slots[slot] = self.memory(inputs, result, kept, self._own)
        return found

    def memory(
        self,
        inputs: Sequence[SharedBytes],
        result: SharedBytes,
        kept: SharedBytes | None,
        own: SharedBytes | None,
    ) -> OpMemory:
        """Look at raw memory, which may be longer than it has to be, as elements of the op.

        Args:
            inputs: of the local ranks.
            kept: of ``kept_bytes``.
            own: of ``own_bytes``.
        """
        dtype = self.arithmetic.given
        # Where all fold all, others may have sent what this node needs before they have read it.
        given = [
            Elements(each.memory[:nbytes], dtype, None if self._all_fold else each.at)
            for each, nbytes in zip(inputs, self.input_bytes, strict=True)
        ]
        out = held = Elements(result.memory[: self.result_bytes], dtype, result.at)
        if kept is not None:
            held = self._kept(kept, self._row.held)
        mine = held if own is None else self._kept(own, self._parts.held)
        return OpMemory(given, mine, held, out)

    def _kept(self, row: SharedBytes, numel: int) -> Elements:
        arithmetic = self.arithmetic
        dtype = arithmetic.kept_type if self._reduces else arithmetic.given
        return Elements(row.memory[: numel * self._itemsize], dtype, row.at)

    # The steps of an op

    def begin(self, memory: OpMemory) -> Iterator[Outgoing]:
        """Yield what this node sends at once."""
        if not self._reduces:
            for part in self._parts.parts:
                if part.sources and (part.targets or not self.is_in_parts):
                    self._move(memory, part)
        made: set[int] = set()
        for node, start, stop in self._sends:
            if start == stop:
                yield Outgoing(node, start, NOTHING, None)
                continue
            yield Outgoing(node, start, *self._brought(memory, start, made))

    def _move(self, memory: OpMemory, part: Part) -> None:
        """Copy what stays on this node, or what others take from the row, to its row."""
        (source,), numel = part.sources, part.slice.stop - part.slice.start
        given = memory.inputs[self._ranks.index(source.rank)]
        memory.kept.copy(self._row.place(part.slice.start), numel, given, source.offset)

    def _brought(
        self, memory: OpMemory, start: int, made: set[int]
    ) -> tuple[memoryview, FilePlace | None]:
        source, numel = self._sources[start], self._stops[start] - start
        if source.row >= 0:
            return memory.inputs[source.row].chunk(source.start, numel)
        if start not in made:
            made.add(start)
            self._put_together(memory, start)
        return memory.own.chunk(source.start, numel)

    def _put_together(self, memory: OpMemory, start: int) -> None:
        """Write a chunk of what this node brings to its row, folded in the accumulation type."""
        if not self._reduces and not self.is_in_parts:
            return  # it is in the row already
        own = memory.own
        for part, low, high in self._parts.parts_in(start, self._stops[start]):
            place, numel, skipped = self._parts.place(low), high - low, low - part.slice.start
            inputs = [
                (memory.inputs[self._ranks.index(end.rank)], end.offset + skipped)
                for end in part.sources
            ]
            if not self._reduces:
                own.copy(place, numel, *inputs[0])
            else:
                brought = [each.array(at, numel) for each, at in inputs]
                self.arithmetic.fold_inputs(own.array(place, numel), brought)

    def is_folded(self, start: int) -> bool:
        """Return True if this node folds what comes at a place; else it takes it as it is."""
        part = self._folds[self._me]
        return part.start <= start < part.stop

    def fold(self, memory: OpMemory, start: int, received: Mapping[int, Payload]) -> list[Outgoing]:
        """Fold a chunk in the order of the nodes; returns what this node sends of it.

        Args:
            received: by node, the chunks of all others.
        """
        stop, source = self._stops[start], self._sources[start]
        row, numel = memory.own, stop - start
        if source.row >= 0:
            row = memory.inputs[source.row]
        elif not self._all_fold:  # else it was sent to others too
            self._put_together(memory, start)
        own = row.array(source.start, numel)
        operands = [
            own if node == self._me else np.frombuffer(received[node], own.dtype)
            for node in self._nodes
        ]
        self.arithmetic.fold(memory.kept.array(start, numel), operands)
        self.finish(memory, start, stop)
        if not self._spreads:
            return []
        payload, place = memory.kept.chunk(start, stop - start)
        return [Outgoing(other, start, payload, place) for other in self.others]

    def finish(self, memory: OpMemory, start: int, stop: int) -> None:
        """Write the result of a chunk whose sum is there."""
        if not self.kept_bytes:
            return
        kept, result, numel = memory.kept, memory.result, stop - start
        self.arithmetic.finish([result.array(start, numel)], kept.array(start, numel))

    def destination(self, memory: OpMemory, start: int, stop: int) -> memoryview:
        """The memory of a chunk that is taken as it comes."""
        payload, _ = memory.kept.chunk(self._row.place(start), stop - start)
        return payload

    def nbytes(self, start: int, stop: int) -> int:
        """The size of a chunk on its way."""
        return (stop - start) * self._itemsize

    def write_part(self, kept: Elements, parts: NodeParts, work: Array) -> None:
        """Write this node's part of a result to a work buffer of the long lane.

        Args:
            kept: as the op's memory has it.
            parts: the layout of the buffer.
            work: its elements.
        """
        for part in parts.parts:
            if part.targets:
                numel = part.slice.stop - part.slice.start
                place, start = parts.place(part.slice.start), self._row.place(part.slice.start)
                work[place : place + numel] = kept.array(start, numel)
