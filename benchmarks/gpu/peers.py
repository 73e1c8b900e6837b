"""What Allfold is compared with: Gloo on CUDA tensors, and Gloo on copies in the host's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.gpu.devices import Device
from benchmarks.gpu.plan import GLOO, GLOO_HOST
from benchmarks.libraries.gloo import GlooLibrary

Reduce = Callable[[], object]


class Peers:
    """Gloo on one rank, joined when first asked for."""

    def __init__(self, rank: int, world: int, store: str, seconds: float, device: Device) -> None:
        self._library = GlooLibrary(rank, world, store, seconds)
        self._device = device

    def why_not(self, name: str) -> str | None:
        """What a peer says when it is tried; ``None`` if it works. Every rank asks together."""
        tensor = torch.ones(4, dtype=torch.float32, device=self._device.name)
        try:
            self.all_reduce(name, tensor)()
            self._device.synchronize()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    def all_reduce(self, name: str, tensor: torch.Tensor) -> Reduce:
        """What sums a tensor in place; returns when the current stream has been given all."""
        if name == GLOO:
            return lambda: dist.all_reduce(tensor)
        assert name == GLOO_HOST
        return _on_host(tensor, self._device)

    def close(self) -> None:
        """Leave."""
        self._library.close()


def _on_host(tensor: torch.Tensor, device: Device) -> Reduce:
    """Copy to page-locked memory, sum there, copy back; as a script without CUDA support does."""
    host = device.pinned(tensor.numel())

    def reduce() -> None:
        host.copy_(tensor, non_blocking=True)
        device.synchronize()
        dist.all_reduce(host)
        tensor.copy_(host, non_blocking=True)

    return reduce
