"""The tensors of a call of the short lane: in the slot of the op instead of the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allfold._calls.call import Call
from allfold._lane.lane_op import LaneOp
from allfold._lane.lane_page import LanePage
from allfold._staging.host import nothing


class LaneMemory:
    """Takes the part of :class:`allfold._staging.host.Staged` for an op that was posted."""

    __slots__ = ("_call", "_op", "_page")

    def __init__(self, page: LanePage, call: Call, op: LaneOp) -> None:
        self._page = page
        self._call = call
        self._op = op

    @property
    def result(self) -> Any:
        """Return the caller's outputs."""
        return self._call.result

    def bring_home(self) -> Callable[[], None]:
        """Copy the result to where the caller wants it."""
        outputs = self._call.outputs
        if outputs and self._op.in_use:
            nbytes = sum([view.nbytes for view in outputs])
            block, start = self._page.output_block(self._op.slot, nbytes), 0
            for view in outputs:
                view.copy_from(block, start)
                start += view.nbytes
        return nothing

    def free(self) -> None:
        """Let the slot be used for another op."""
        self._op.in_use = False


def give(page: LanePage, slot: int, call: Call) -> None:
    """Copy the inputs of a call to a slot."""
    if call.inputs:
        nbytes = sum([view.nbytes for view in call.inputs])
        block, start = page.input_block(slot, nbytes), 0
        for view in call.inputs:
            view.copy_to(block, start)
            start += view.nbytes
