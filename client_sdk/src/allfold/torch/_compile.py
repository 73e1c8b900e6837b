"""Keeps ``torch.compile`` out of the methods that torch calls."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Hidden = TypeVar("_Hidden")


def uncompiled(hidden: _Hidden) -> _Hidden:
    """Have Dynamo neither compile nor inline a function or the methods of a class.

    The same goes for whatever they call. Dynamo breaks the graph at such a call and runs it as it
    is, as with the C++ methods of torch's own process groups. ``torch.compiler.disable`` does that
    too, but imports Dynamo, which takes more than a second, and wraps each call.
    """
    skip = eval_frame._FrameAction.SKIP
    never = eval_frame._FrameExecStrategy(skip, skip)
    functions: Iterable[Any] = (
        [hidden] if isinstance(hidden, FunctionType) else vars(hidden).values()
    )
    for function in functions:
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, never)
            function.__dict__["_torchdynamo_disable"] = True
    return hidden
