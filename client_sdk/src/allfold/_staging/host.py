"""The memory of a call's tensors: where they are, in the slot of the op, or copied to the arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from allfold._arena import Arena, ArenaBlock
from allfold._calls.call import RankCall
from allfold._lane.lane_op import LaneOp
from allfold._lane.lane_page import RankPage
from allfold._lane.short_lane import RankLane
from allfold._tensors import TensorView
from allfold_core.protocol.rank_messages import NO_FENCE, Region


class CallMemory(ABC):
    """The memory in which the agent, or another rank, finds the tensors of a call."""

    __slots__ = ("_call",)

    _call: RankCall

    @property
    def result(self) -> Any:
        """Return the caller's outputs."""
        return self._call.result

    @abstractmethod
    def copy_out(self) -> Callable[[], None]:
        """Copy the result to where the caller wants it.

        Returns what has to be called by everybody who wants to see it.
        """

    @abstractmethod
    def free(self) -> None:
        """Give the memory back."""


class LaneMemory(CallMemory):
    """The slot of an op that was posted, or its memory in the arena and a place of the page.

    Args:
        staged: the memory in the arena, if the tensors do not go through the slot.
    """

    __slots__ = ("_lane", "_op", "_staged")

    def __init__(self, lane: RankLane, call: RankCall, op: LaneOp, staged: Staged | None) -> None:
        self._lane = lane
        self._call = call
        self._op = op
        self._staged = staged

    def copy_out(self) -> Callable[[], None]:
        op, outputs = self._op, self._call.outputs
        if self._staged is not None and op.place < 0:  # the agent has taken it over
            return self._staged.copy_out()
        if outputs and op.in_use:
            nbytes, start = sum([view.nbytes for view in outputs]), 0
            block = self._result(nbytes)
            for view in outputs:
                view.copy_from(block, start)
                start += view.nbytes
        return nothing

    def _result(self, nbytes: int) -> ArenaBlock:
        page, op, recipe = self._lane.page, self._op, self._op.recipe
        if op.place < 0:
            return page.output_block(op.slot, nbytes)
        place = page.place_block(op.place, page.layout.place_bytes)
        assert place.memory is not None
        whole = recipe.output_of(place.memory)
        return ArenaBlock(place.region, nbytes, whole.ctypes.data, whole, page)

    def free(self) -> None:
        self._lane.release(self._op)
        if self._staged is not None:
            self._staged.free()
            self._staged = None


def give(page: RankPage, slot: int, call: RankCall) -> None:
    """Copy the inputs of a call to a slot."""
    if call.inputs:
        nbytes = sum([view.nbytes for view in call.inputs])
        block, start = page.input_block(slot, nbytes), 0
        for view in call.inputs:
            view.copy_to(block, start)
            start += view.nbytes


_NOWHERE = Region(0, 0)


def nothing() -> None:
    """Do nothing: a result in the host's memory can be seen at once."""


class Staged(CallMemory):
    """A call's memory in the arena.

    What lies there already (``allfold.empty``) is used as it is; the rest is copied, the tensors of
    one side next to each other.

    Args:
        apart: an input that is copied, and its result, do not share memory, even where they do so
            outside: results can come in piece by piece then, while it is open how the op ends.

    Attributes:
        source: where the agent finds the inputs.
        target: where it puts the result.
        fence: until when these are in use.

    Raises:
        ArenaExhausted: no memory is left.
    """

    __slots__ = ("_apart", "_arena", "_blocks", "_result", "fence", "source", "target")

    def __init__(self, arena: Arena, call: RankCall, *, apart: bool = False) -> None:
        self._arena = arena
        self._apart = apart
        self._call = call
        self._blocks: list[ArenaBlock] = []
        self._result: ArenaBlock | None = None
        self.fence = NO_FENCE
        try:
            self._place()
        except BaseException:
            self.free()
            raise

    def _place(self) -> None:
        call = self._call
        if call.in_place:
            views = call.inputs or call.outputs
            self.source, block = self._region(views)
            self.target, self._result = self.source, block
            if self._apart and block is not None and call.outputs:
                self.target, self._result = self._region(call.outputs, beside=call.outputs)
        else:
            self.source, block = self._region(call.inputs, beside=call.outputs)
            self.target, self._result = self._region(call.outputs)
        if block is not None and call.inputs:
            start = 0
            for view in call.inputs:
                self._copy_in(view, block, start)
                start += view.nbytes

    def _region(
        self, views: Sequence[TensorView], beside: Sequence[TensorView] = ()
    ) -> tuple[Region, ArenaBlock | None]:
        """Return the region of the tensors, and the block that was allocated for them, if any."""
        nbytes = sum([view.nbytes for view in views])
        if not nbytes:
            return _NOWHERE, None
        if len(views) == 1 and not _overlap(views[0], beside):
            region = self._locate(views[0])
            if region is not None:
                return region, None
        block = self._arena.allocate(nbytes)
        self._blocks.append(block)
        return block.region, block

    def copy_out(self) -> Callable[[], None]:
        if self._result is not None:
            start = 0
            for view in self._call.outputs:
                self._copy_view(view, self._result, start)
                start += view.nbytes
        return nothing

    def free(self) -> None:
        self._result = None
        while self._blocks:  # none may be given back twice, also if this is interrupted
            self._arena.free(self._blocks.pop())

    # Where a tensor is, and how it is copied: here, in the memory of the host

    def _locate(self, view: TensorView) -> Region | None:
        """Return the region of a tensor that the agent can reach; ``None`` for any other."""
        address = view.host_address
        return self._arena.locate(address, view.nbytes) if address else None

    def _copy_in(self, view: TensorView, block: ArenaBlock, start: int) -> None:
        view.copy_to(block, start)

    def _copy_view(self, view: TensorView, block: ArenaBlock, start: int) -> None:
        view.copy_from(block, start)


def _overlap(view: TensorView, others: Sequence[TensorView]) -> bool:
    """Return True if the memory may be written while it is still to be read."""
    return any(
        other.address
        and view.address < other.address + other.nbytes
        and other.address < view.address + view.nbytes
        for other in others
    )
