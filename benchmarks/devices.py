"""Memory of a rank: NumPy arrays of the host, or tensors of torch on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import allfold
from allfold.cli._bench.data import Array
from benchmarks.data import count_wrong

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)

Operation = Callable[[], object]
Tensor = Any
"""An array of NumPy on the host, a tensor of torch on a GPU."""


class Device(Protocol):
    """The holder of a rank's tensors. All are of float32.

    Attributes:
        is_gpu: the tensors are on a GPU.
        path: how the agent reaches them.
    """

    is_gpu: bool
    path: str

    def open(self, group: allfold.Group, /) -> None:
        """Let the agent reach the memory, and note how it does."""

    def empty(self, count: int, /) -> Tensor:
        """Ordinary memory."""

    def in_arena(self, group: allfold.Group, count: int, /) -> Tensor:
        """Memory of ``allfold.empty``."""

    def write(self, tensor: Tensor, numbers: Tensor, /) -> None:
        """Copy the numbers of a tensor, or what :meth:`keep` returned, into a tensor."""

    def keep(self, numbers: Array, /) -> Tensor:
        """Numbers of the host, where the tensors are."""

    def count_wrong(self, result: Tensor, truth: Tensor, allowed: float, /) -> int:
        """See :func:`benchmarks.data.count_wrong`; ``truth`` is of :meth:`keep`."""

    def finished(self, operation: Operation, /) -> Operation:
        """The operation with the wait for its end, where calling it only starts it."""

    def clear(self) -> None:
        """Give back memory that no tensor uses."""


class Host:
    """The host's memory."""

    is_gpu = False
    path = CPU

    def open(self, group: allfold.Group, /) -> None:
        """Nothing is to be done before the first op."""

    def empty(self, count: int, /) -> Tensor:
        return np.empty(count, np.float32)

    def in_arena(self, group: allfold.Group, count: int, /) -> Tensor:
        return group.empty(count, "float32")

    def write(self, tensor: Tensor, numbers: Tensor, /) -> None:
        np.copyto(tensor, numbers)

    def keep(self, numbers: Array, /) -> Tensor:
        return numbers

    def count_wrong(self, result: Tensor, truth: Tensor, allowed: float, /) -> int:
        return count_wrong(result, truth, allowed)

    def finished(self, operation: Operation, /) -> Operation:
        return operation

    def clear(self) -> None:
        gc.collect()


class TorchDevice:
    """A device as torch names it: ``cuda:0``, or ``cpu`` to try this without a GPU."""

    def __init__(self, name: str) -> None:
        """Make it the current one."""
        import torch

        self.path = CPU
        self._torch = torch
        self._name = name
        self.is_gpu = name != CPU
        if self.is_gpu:
            torch.cuda.set_device(name)

    def open(self, group: allfold.Group, /) -> None:
        if self.is_gpu:
            gpu = group.membership.session.gpu(int(self._name.partition(":")[2]))
            self.path = f"{gpu.path.value}: {gpu.why}"

    def empty(self, count: int, /) -> Tensor:
        return self._torch.empty(count, dtype=self._torch.float32, device=self._name)

    def in_arena(self, group: allfold.Group, count: int, /) -> Tensor:
        return group.empty(count, self._torch.float32, device=self._name)

    def write(self, tensor: Tensor, numbers: Tensor, /) -> None:
        tensor.copy_(numbers)
        self._synchronize()

    def keep(self, numbers: Array, /) -> Tensor:
        return self._torch.from_numpy(numbers).to(self._name)

    def count_wrong(self, result: Tensor, truth: Tensor, allowed: float, /) -> int:
        distance = (result - truth).abs()  # NaN is no distance
        return int((~(distance <= allowed)).sum())

    def finished(self, operation: Operation, /) -> Operation:
        if not self.is_gpu:
            return operation
        synchronize = self._torch.cuda.current_stream().synchronize

        def finish() -> None:
            operation()
            synchronize()

        return finish

    def clear(self) -> None:
        gc.collect()
        if self.is_gpu:
            self._torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.is_gpu:
            self._torch.cuda.current_stream().synchronize()


def gpus() -> int:
    """Return the number of NVIDIA GPUs that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
