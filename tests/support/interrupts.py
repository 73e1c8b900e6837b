"""Exceptions that come up in the middle of a call, as a signal's handler raises them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

_OURS = ("/allfold/", "/allfold_core/")


class Interrupt(BaseException):
    """The exception that the handler raises."""


class Interruption:
    """Calls a function, and raises an exception as it begins one of the lines of Allfold's code.

    Args:
        at: the line, counted from 1 as they are executed.

    Attributes:
        lines: the number of lines that were begun.
        where: the file, line and function of the one at which it has raised; "" for none.
    """

    def __init__(self, at: int) -> None:
        self._at = at
        self.lines = 0
        self.where = ""

    def call(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._line if any(each in frame.f_code.co_filename for each in _OURS) else None

    def _line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            self.lines += 1
            if self.lines == self._at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                raise Interrupt
        return self._line


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Return where ``with`` statements end: signals' handlers run after calls, and not there."""
    found = set()
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if step.opname == "WITH_EXCEPT_START":
            found.add(steps[index - 1].offset)
        nones = steps[index : index + 3]
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in nones):
            found.add(step.offset)
            found.update(each.offset for each in steps[index - 1 : index] if each.opname == "SWAP")
    return frozenset(found)
