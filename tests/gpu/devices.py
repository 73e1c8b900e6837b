"""The devices of a rank's tensors, and GPUs that are busy with something else. Used inside workers.

Programs say ``device``: ``cuda``, ``cpu``, or ``mixed``, where every second rank has no GPU. On a
CPU there are no streams, and nothing is ever busy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import monotonic, sleep
from typing import Any

import torch

import allfold

# torch leaves much of it without types.
_cuda: Any = torch.cuda

# GPUs do not count much faster. One that counts slower is busy for longer.
_CYCLES_PER_SECOND = 2_000_000_000
_PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 0.001


def take(device: str, rank: int) -> torch.device:
    """The device of a rank, the current one from now on; ranks take turns where there are few."""
    if device == "cpu" or (device == "mixed" and rank % 2):
        return torch.device("cpu")
    taken = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(taken)
    return taken


def path_of(group: allfold.Group, device: torch.device) -> str:
    """The way that tensors take from there to the agent: ``none`` from the host itself."""
    return _gpu(group, device).path.value if device.type == "cuda" else "none"


def lies_in_arena(group: allfold.Group, tensor: torch.Tensor) -> bool:
    """Tell if the agent reads and writes a tensor in place."""
    arena = group.membership.session.arena
    if tensor.is_cuda:
        gpu = _gpu(group, tensor.device)
        if not gpu.shares_memory:
            return False
        arena = gpu.arrays
    return arena.locate(tensor.data_ptr(), tensor.nbytes) is not None


def new_stream(device: torch.device) -> Any:
    """A stream that waits for no other one; ``None`` on a CPU."""
    return _cuda.Stream(device) if device.type == "cuda" else None


def on(stream: Any) -> AbstractContextManager[Any]:
    """Make a stream the current one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait for everything that a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Moment:
    """The present point of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = _cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    @property
    def is_over(self) -> bool:
        """Tell, without waiting, if all work before it is done."""
        return self._event is None or bool(self._event.query())


def keep_busy(device: torch.device, seconds: float) -> Moment:
    """Let the current stream do nothing for about so long; the end of that."""
    if device.type == "cuda":
        _cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
    return Moment(device)


def delay_results(group: allfold.Group, device: torch.device, seconds: float) -> None:
    """Hold up what Allfold copies on the GPU from now on: the results of ops in flight."""
    if path_of(group, device) in ("ipc", "pinned"):
        with _gpu(group, device).turn() as ours:
            stream = _cuda.ExternalStream(int(ours.stream), device=device)
            with torch.cuda.stream(stream):
                keep_busy(device, seconds)


def hold_up(work: Any, group: allfold.Group, device: torch.device, seconds: float) -> None:
    """Let the agent do its part of an op, and then hold up what is left of it: the last copy."""
    deadline = monotonic() + _PATIENCE_SECONDS
    while not work.is_completed():
        assert monotonic() < deadline, "the agent does not come to an end"
        sleep(_PAUSE_SECONDS)
    delay_results(group, device, seconds)


def _gpu(group: allfold.Group, device: torch.device) -> Any:
    assert device.index is not None
    return group.membership.session.gpu(device.index)
