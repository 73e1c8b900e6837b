"""The work of this node for ops of the short lane that are alike, in a group on several nodes.

Nodes exchange *chunks*, ranges of an op's index space, in frames that say where each begins. A
chunk is folded while the processor's caches still have it, and while the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.compilation.op_spec import OpSpec, sizes
from allfold_agent.edges.lane_link import LONGEST_PAYLOAD, FilePlace, Payload
from allfold_agent.edges.outgoing import SharedMemory
from allfold_agent.groups.lane.page import AgentPage
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.schedules.parts import layout
from allfold_core.schedules.schedule import Slice, balanced_slices
from allfold_core.short_lane.choice import longest_end
from allfold_core.short_lane.page import PageLayout

Chunk = tuple[int, int, int]
"""The other node, and the start and stop of a range of the index space."""


class Outgoing(NamedTuple):
    """A chunk for another node.

    Attributes:
        node: its index.
        start: in the index space.
        place: where a node on this machine may read it; ``None`` for nowhere.
    """

    node: int
    start: int
    payload: memoryview
    place: FilePlace | None


class SharedBytes(NamedTuple):
    """Raw memory that agents of this machine may read.

    Attributes:
        file: that it is in.
        place: where it begins there.
    """

    memory: torch.Tensor
    file: SharedMemory
    place: int


class OpMemory(NamedTuple):
    """The memory of one op on this node, as elements.

    Attributes:
        inputs: of the local ranks, in the order of their numbers.
        own: what this node contributes, in the accumulation type; it may be an input.
        kept: what other nodes may fetch, before a mean is divided and half types are rounded.
        result: what local ranks take; it may be ``kept``.
        own_at: the file that ``own`` is in, and where it begins there; ``None`` if it is in none,
            or if others may not read it there until they have the result.
        kept_at: the same of ``kept``.
    """

    inputs: Sequence[torch.Tensor]
    own: torch.Tensor
    kept: torch.Tensor
    result: torch.Tensor
    own_at: FilePlace | None = None
    kept_at: FilePlace | None = None


class LaneProgram:
    """The exchange of one kind of op.

    Args:
        page: the layout of that of the local ranks.
        me: the index of this node.

    Attributes:
        is_in_slots: the tensors are in the slots of the page; else in arenas, and in a place of it.
        input_bytes: what each local rank brings.
        result_bytes: what local ranks take.
        kept_bytes: of a kept result that is not the result itself; 0 where it is.
        others: the other nodes.
        own_bytes: of a contribution that is not the input of a rank; 0 where it is.
        expected: where the chunks that come from others stop, by node and start.
    """

    def __init__(self, spec: OpSpec, plan: Plan, page: PageLayout, me: int) -> None:
        fingerprint = spec.fingerprint
        self.spec = spec
        self.arithmetic = arithmetic = Arithmetic(fingerprint, plan.world_size)
        self._kind = fingerprint.kind
        self._me = me
        placement = tuple(member.ranks for member in plan.members)
        self._nodes = range(len(placement))
        self.others = [*self._nodes[me + 1 :], *self._nodes[:me]]
        self._ranks = placement[me]
        cut = sizes(fingerprint, plan.world_size)
        placed = layout(self._kind, cut, fingerprint.root, placement, me)
        self._numel = placed.numel
        self._blocks = placed.blocks or ()
        self._root = plan.index_of_rank(fingerprint.root) if self._kind.has_root else -1
        self._root_row = self._ranks.index(fingerprint.root) if self._root == me else -1
        self.reduces = self._kind is Kind.ALL_REDUCE
        self._itemsize = arithmetic.kept_itemsize if self.reduces else arithmetic.itemsize
        # By node, the range of the sum that it folds.
        self._folds = [Slice(0, self._numel)] * len(placement)
        self._spreads = spec.strategy == "direct2"
        if self._spreads:
            self._folds = list(balanced_slices(self._numel, len(placement)))
        self.sends = tuple(self._chunks_from(me))
        self.expected = {
            (node, start): stop
            for node in self.others
            for to, start, stop in self._all_from(node)
            if to == me
        }
        self.is_in_slots = longest_end(fingerprint, plan.world_size) <= page.slot_bytes
        self.input_bytes = [spec.input_bytes[rank] for rank in self._ranks]
        self._in_slots: dict[int, OpMemory] = {}
        self._own: torch.Tensor | None = None
        self.result_bytes = self._numel * arithmetic.itemsize
        self._sends_inputs = len(self._ranks) == 1 and arithmetic.takes_inputs_as_they_are
        apart = self.reduces and bool(arithmetic.converts or arithmetic.divisor)
        self.kept_bytes = self._numel * self._itemsize if apart else 0
        self.own_bytes = 0
        if self.reduces and not self._sends_inputs:
            self.own_bytes = self._numel * self._itemsize

    # What travels

    def _chunks(self, part: Slice) -> Iterator[tuple[int, int]]:
        step = max(LONGEST_PAYLOAD // self._itemsize, 1)
        for start in range(part.start, part.stop, step):
            yield start, min(start + step, part.stop)

    def _to(self, node: int, other: int) -> Slice:
        """The range that a node sends another one at once."""
        match self._kind:
            case Kind.ALL_REDUCE:
                return self._folds[other]
            case Kind.ALL_GATHER:
                return self._blocks[node]
            case Kind.BROADCAST if node == self._root:
                return Slice(0, self._numel)
        return Slice(0, 0)

    def _chunks_from(self, node: int) -> Iterator[Chunk]:
        """What a node sends at once: the first chunk to everybody, then the second.

        Where there is nothing to send, an empty frame at the end of the index space says that the
        node has called, and that it has the result of the op before.
        """
        others = [*self._nodes[node + 1 :], *self._nodes[:node]]  # not all to the same one first
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

    def in_slot(self, page: AgentPage, slot: int) -> OpMemory:
        """Return the memory of an op whose tensors are in the slots of a page."""
        found = self._in_slots.get(slot)
        if found is None:
            starts = [page.layout.input_offset(row, slot) for row in range(page.layout.agent + 1)]
            *inputs, result = (page.bytes[start:] for start in starts)
            if self.own_bytes and self._own is None:
                self._own = torch.empty(self.own_bytes, dtype=torch.uint8)
            kept = torch.empty(self.kept_bytes, dtype=torch.uint8) if self.kept_bytes else None
            found = self._in_slots[slot] = self.memory(inputs, result, kept, self._own)
        return found

    def memory(
        self,
        inputs: Sequence[torch.Tensor],
        result: torch.Tensor,
        kept: torch.Tensor | None,
        own: torch.Tensor | None,
    ) -> OpMemory:
        """Look at raw memory, which may be longer than it has to be, as elements of the op.

        Args:
            inputs: of the local ranks.
            kept: of ``kept_bytes``.
            own: of ``own_bytes``.
        """
        arithmetic = self.arithmetic
        sized = zip(inputs, self.input_bytes, strict=True)
        given = [arithmetic.elements(each[:nbytes]) for each, nbytes in sized]
        out = arithmetic.elements(result[: self.result_bytes])
        held = out if kept is None else arithmetic.kept(kept, self._numel)
        if own is not None:
            mine = arithmetic.kept(own, self._numel)
        else:
            mine = given[0] if self.reduces else held
        return OpMemory(given, mine, held, out)

    def shared_memory(
        self,
        inputs: Sequence[SharedBytes],
        result: SharedBytes,
        kept: SharedBytes | None,
        own: SharedBytes | None,
    ) -> OpMemory:
        """Do as :meth:`memory`, where agents of this machine may read it as well."""
        raw = (None if each is None else each.memory for each in (kept, own))
        memory = self.memory([each.memory for each in inputs], result.memory, *raw)
        held = result if kept is None else kept
        mine = own or (inputs[0] if self.reduces else held)
        own_at: FilePlace | None = (mine.file, mine.place)
        if self.reduces and not self._spreads:
            # Others may have sent all that this node needs before they have read what it brings.
            own_at = None
        return memory._replace(own_at=own_at, kept_at=(held.file, held.place))

    # The steps of an op

    def begin(self, memory: OpMemory) -> Iterator[Outgoing]:
        """Yield what this node sends at once: the other node, the start, and the bytes."""
        made = -1
        if self._kind is Kind.ALL_GATHER:
            block = self._blocks[self._me]
            torch.cat(list(memory.inputs), out=memory.kept[block.start : block.stop])
        elif self._root_row >= 0:
            memory.kept.copy_(memory.inputs[self._root_row])
        elif self._spreads and self.own_bytes:
            self._contribute(memory, self._folds[self._me])
        for node, start, stop in self.sends:
            if self.own_bytes and start != stop and (self._spreads or start > made):
                self._contribute(memory, Slice(start, stop))
                made = start
            payload = _bytes_of(memory.own[start:stop])
            yield Outgoing(node, start, payload, self._at(memory.own_at, start))

    def _at(self, whole: FilePlace | None, start: int) -> FilePlace | None:
        return None if whole is None else (whole[0], whole[1] + start * self._itemsize)

    def _contribute(self, memory: OpMemory, part: Slice) -> None:
        """Fold the local inputs, in the accumulation type."""
        inputs = [each[part.start : part.stop] for each in memory.inputs]
        self.arithmetic.fold_inputs(memory.own[part.start : part.stop], inputs)

    def is_folded(self, start: int) -> bool:
        """Return True if this node folds what comes at a place; else it takes it as it is."""
        part = self._folds[self._me]
        return self.reduces and part.start <= start < part.stop

    def fold(self, memory: OpMemory, start: int, received: Mapping[int, Payload]) -> list[Outgoing]:
        """Fold a chunk in the order of the nodes; returns what this node sends of it.

        Args:
            received: by node, the chunks of all others.
        """
        stop = self.expected[next(iter(received)), start]
        arithmetic, kept = self.arithmetic, memory.kept[start:stop]
        own = memory.own[start:stop]
        operands = [
            own
            if node == self._me
            else torch.frombuffer(received[node], dtype=arithmetic.kept_dtype)
            for node in self._nodes
        ]
        arithmetic.fold(kept, operands)
        self.finish(memory, start, stop)
        if not self._spreads:
            return []
        payload = _bytes_of(kept)
        place = self._at(memory.kept_at, start)
        return [Outgoing(other, start, payload, place) for other in self.others]

    def finish(self, memory: OpMemory, start: int, stop: int) -> None:
        """Write the result of a chunk whose sum is there."""
        self.arithmetic.finish([memory.result[start:stop]], memory.kept[start:stop])

    def destination(self, memory: OpMemory, start: int, stop: int) -> memoryview:
        """The memory of a chunk that is taken as it comes."""
        return _bytes_of(memory.kept[start:stop])

    def nbytes(self, start: int, stop: int) -> int:
        """The size of a chunk on its way."""
        return (stop - start) * self._itemsize


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().data
