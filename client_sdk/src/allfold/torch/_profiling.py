"""Events of Allfold in the profiles of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

Given = ParamSpec("Given")
Result = TypeVar("Result")


def profiled(
    kind: str, tensors: str | None = None
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Show the calls of a method as ``allfold:<kind>``, with the shapes of their tensors.

    A call, and not its op as in torch's own backends: an event that is open when the profile ends
    is written into memory that is freed by then (torch 2.13 and 2.15), and an op may be in flight.

    Args:
        kind: the name that Gloo gives it.
        tensors: the argument with a tensor, or lists of tensors.
    """

    def decorate(method: Callable[Given, Result]) -> Callable[Given, Result]:
        signature = inspect.signature(method)

        @wraps(method)
        def call(*args: Given.args, **named: Given.kwargs) -> Result:
            if not profiler._is_profiler_enabled:
                return method(*args, **named)
            given = signature.bind(*args, **named).arguments
            shown = flat([given[tensors]]) if tensors else []
            with _RecordFunctionFast(f"allfold:{kind}", shown):
                return method(*args, **named)

        return call

    return decorate


def flat(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists as one list."""
    if isinstance(tensors, list | tuple):
        return [each for item in tensors for each in flat(item)]
    return [tensors]
