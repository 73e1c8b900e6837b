"""Where the tensors of a call lie while the agent works: where they are, or copied to the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allfold._arena import Arena, Block
from allfold._calls.call import Call
from allfold._tensors import TensorView
from allfold_core.local_wire import Region

_NOWHERE = Region(0, 0)


class Staged:
    """A call's memory in the arena.

    What lies there already (``allfold.empty``) is used as it is; the rest is copied, the tensors of
    one side next to each other.

    Raises:
        ArenaExhausted: no memory is left.
    """

    __slots__ = ("_arena", "_blocks", "_call", "_result", "source", "target")

    def __init__(self, arena: Arena, call: Call) -> None:
        self._arena = arena
        self._call = call
        self._blocks: list[Block] = []
        self._result: Block | None = None
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
        else:
            self.source, block = self._region(call.inputs, beside=call.outputs)
            self.target, self._result = self._region(call.outputs)
        if block is not None and call.inputs:
            _gather(call.inputs, block)

    def _region(
        self, views: Sequence[TensorView], beside: Sequence[TensorView] = ()
    ) -> tuple[Region, Block | None]:
        """Where the tensors are, and the block that was taken for them, if one was."""
        nbytes = sum([view.nbytes for view in views])
        if not nbytes:
            return _NOWHERE, None
        if len(views) == 1 and views[0].address and not _overlap(views[0], beside):
            region = self._arena.locate(views[0].address, nbytes)
            if region is not None:
                return region, None
        block = self._arena.allocate(nbytes)
        self._blocks.append(block)
        return block.region, block

    @property
    def result(self) -> Any:
        """What the caller gets in the end."""
        return self._call.result

    def bring_home(self) -> None:
        """Copy the result to where the caller wants it."""
        if self._result is not None:
            start = 0
            for view in self._call.outputs:
                view.copy_from(self._result, start)
                start += view.nbytes

    def free(self) -> None:
        """Give the memory back."""
        for block in self._blocks:
            self._arena.free(block)
        self._blocks.clear()
        self._result = None


def _gather(views: Sequence[TensorView], block: Block) -> None:
    """Copy the tensors to a block, one after the other."""
    start = 0
    for view in views:
        view.copy_to(block, start)
        start += view.nbytes


def _overlap(view: TensorView, others: Sequence[TensorView]) -> bool:
    """Whether the memory of one may be written while it is still to be read."""
    return any(
        other.address
        and view.address < other.address + other.nbytes
        and other.address < view.address + view.nbytes
        for other in others
    )
