"""Lets torch's tests for GPUs run on CPUs, unedited: their GPU words mean the CPU.

:func:`open_gates` comes before the tests are imported: what is skipped without GPUs is marked, and
skipped no more. :func:`mean_the_cpu` comes in the process of a rank that runs a marked test.
``torch.cuda.is_available()`` stays as it is, for torch itself asks it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed
from torch.utils._device import _device_constructors

GPUS = 8  # as many as any test asks for

_MARK = "_its_gpus_are_cpus"
_GATES_OF_NUMBERS = (
    "skip_if_lt_x_gpu",
    "nccl_skip_if_lt_x_gpu",
    "require_n_gpus_for_nccl_backend",
)
_MAKERS_OF_TENSORS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

AnyCall = Callable[..., Any]


def open_gates() -> None:
    """Mark the tests that need GPUs instead of skipping them."""
    gates = vars(common_distributed)
    gates["skip_if_no_gpu"] = marked
    for name in _GATES_OF_NUMBERS:
        gates[name] = lambda *arguments, **named: marked


def is_marked(test: AnyCall) -> bool:
    """Return whether a test needs GPUs by its own account."""
    return hasattr(test, _MARK)


def marked(test: AnyCall) -> AnyCall:
    setattr(test, _MARK, True)
    return test


def mean_the_cpu(gpus: int = GPUS) -> None:
    """Let the GPU words of this process mean the CPU until it ends."""
    for constructor in _device_constructors():
        _wrap(torch, constructor.__name__, _with_device_as_cpu)
    for name in _MAKERS_OF_TENSORS:
        _wrap(torch.Tensor, name, _with_device_as_cpu)
    for movable in (torch.Tensor, torch.nn.Module):
        _wrap(movable, "to", _moving_to_cpu)
        _wrap(movable, "cuda", _staying)
    _wrap(DistributedDataParallel, "__init__", _without_devices)
    _wrap(dist, "barrier", _without_devices)
    _wrap(dist, "new_group", _with_backend_of_cpus)
    _wrap(DeviceMesh, "__init__", _moving_to_cpu)
    for module in (device_mesh, torch.distributed.tensor):
        _wrap(module, "init_device_mesh", _with_first_as_cpu)
    _replace_streams()
    vars(torch.cuda).update(device_count=_always(gpus), current_device=_always(0))


def _wrap(owner: Any, name: str, wrapper: Callable[[AnyCall], AnyCall]) -> None:
    """Replace a function of a module or a class by what a wrapper makes of it."""
    original = getattr(owner, name, None)
    if original is not None:  # else a constructor of torch.fft or torch.nested
        setattr(owner, name, functools.wraps(original)(wrapper(original)))


def _as_cpu(device: Any) -> Any:
    """Return the CPU for a number, a name or an object of a GPU, and anything else as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or str(device).partition(":")[0] == "cuda":
        return "cpu"
    return device


def _with_device_as_cpu(original: AnyCall) -> AnyCall:
    def made(*arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = _as_cpu(named["device"])
        return original(*arguments, **named)

    return made


def _moving_to_cpu(original: AnyCall) -> AnyCall:
    def moved(self: Any, *arguments: Any, **named: Any) -> Any:
        if "device" in named:
            named["device"] = _as_cpu(named["device"])
        if arguments and isinstance(arguments[0], int | str | torch.device):
            arguments = (_as_cpu(arguments[0]), *arguments[1:])
        return original(self, *arguments, **named)

    return moved


def _with_first_as_cpu(original: AnyCall) -> AnyCall:
    return lambda device, *arguments, **named: original(_as_cpu(device), *arguments, **named)


def _staying(original: AnyCall) -> AnyCall:
    def stayed(self: Any, *arguments: Any, **named: Any) -> Any:
        return self

    return stayed


def _without_devices(original: AnyCall) -> AnyCall:
    def called(*arguments: Any, **named: Any) -> Any:
        for word in ("device_ids", "output_device"):
            named.pop(word, None)
        return original(*arguments, **named)

    return called


def _with_backend_of_cpus(original: AnyCall) -> AnyCall:
    def made(*arguments: Any, **named: Any) -> Any:
        if named.get("backend") == "nccl":
            named["backend"] = None  # the one of the default group
        return original(*arguments, **named)

    return made


class _NoStream(contextlib.nullcontext[None]):
    """A stream or an event: what it would order is in order on a CPU."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__()

    def _done(self, *arguments: Any, **named: Any) -> None:
        pass

    record = record_event = synchronize = wait = wait_event = wait_stream = _done


def _always(answer: Any) -> AnyCall:
    """Return a new function for each, as torch.compile has rules by function."""
    return lambda *arguments, **named: answer


def _replace_streams() -> None:
    for name in ("set_device", "synchronize", "manual_seed", "initial_seed"):
        setattr(torch.cuda, name, _always(None))
    for name in ("device", "stream", "current_stream"):
        setattr(torch.cuda, name, _always(_NoStream()))
    vars(torch.accelerator).update(current_stream=_always(_NoStream()))
    vars(torch.cuda).update(Stream=_NoStream, Event=_NoStream)
    vars(torch).update(Stream=_NoStream, Event=_NoStream)
