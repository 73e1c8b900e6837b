"""Where a rank's tensors are: a GPU, or the host in its place. The only user of ``torch.cuda``."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.gpu.plan import CPU

_torch_cuda: Any = torch.cuda  # some of it has no types
_DRIVER = Path("/proc/driver/nvidia/version")
# A GPU runs at 1 to 2.5 GHz, so that this is 20 to 50 ms.
_LATE_CYCLES = 50_000_000
_WARM_UP = 3


class Device(Protocol):
    """What holds tensors.

    Attributes:
        name: as torch says it.
    """

    name: str

    def synchronize(self) -> None:
        """Wait for the current stream."""

    def be_late(self) -> None:
        """Keep the current stream busy for a while."""

    def pinned(self, count: int, /) -> torch.Tensor:
        """float32 of the host that copies are fast to."""

    def clear(self) -> None:
        """Give back memory that no tensor uses."""


class Gpu:
    """A CUDA device."""

    def __init__(self, ordinal: int) -> None:
        self.name = f"cuda:{ordinal}"
        torch.cuda.set_device(ordinal)

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def be_late(self) -> None:
        _torch_cuda._sleep(_LATE_CYCLES)  # of torch's own tests: there is nothing public

    def pinned(self, count: int, /) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float32, pin_memory=True)

    def clear(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class Host:
    """The host's memory."""

    name = CPU

    def synchronize(self) -> None:
        """Nothing is under way after a call."""

    def be_late(self) -> None:
        """There is no stream that could be late."""

    def pinned(self, count: int, /) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float32)

    def clear(self) -> None:
        gc.collect()


def look(ordinal: int) -> dict[str, Any]:
    """What torch says of a GPU; of one that is not there, ``why``."""
    version = {"torch": torch.__version__}
    if not torch.cuda.is_available():
        return version | {"why": f"torch {torch.__version__} finds none"}
    if ordinal >= torch.cuda.device_count():
        return version | {
            "why": f"there are {torch.cuda.device_count()}, and cuda:{ordinal} is none"
        }
    found = torch.cuda.get_device_properties(ordinal)
    return version | {
        "name": found.name,
        "memory": found.total_memory,
        "free": torch.cuda.mem_get_info(ordinal)[0],
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "driver": _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else None,
    }


class Stopwatch:
    """Times work of a stream by events in it: ``lap`` after each piece, and then ``seconds``."""

    def __init__(self, stream: Any = None) -> None:
        """Args:
        stream: the current one if ``None``.
        """
        self._stream = stream
        self._events: list[Any] = []

    def lap(self) -> None:
        """Mark the end of a piece, and the begin of the next."""
        event = _torch_cuda.Event(enable_timing=True)
        event.record(self._stream or torch.cuda.current_stream())
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Of each piece but for the first ones, during which work is not yet queued up."""
        self._events[-1].synchronize()
        laps = [one.elapsed_time(other) / 1e3 for one, other in pairwise(self._events)]
        return laps[_WARM_UP:]

    @staticmethod
    def pieces(rounds: int) -> int:
        """How many are to be done for so many that count."""
        return rounds + _WARM_UP


def stream_of(handle: Any, ordinal: int) -> Any:
    """Somebody else's stream, as torch knows it."""
    return _torch_cuda.ExternalStream(int(handle), device=ordinal)
