"""Steps of a training with DistributedDataParallel, through each backend and through none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import allfold.torch as allfold_torch
from benchmarks.devices import Operation
from benchmarks.workloads import NO_SYNC

_WIDTH, _LAYERS, _HEADS, _TOKENS = 512, 8, 8, 16
_TOLERANCE = 1e-4


class DdpWorkload:
    """A transformer of 25 M parameters. Gloo is the default group; Allfold another one.

    ``no_sync`` is the same step without communication, as when gradients are accumulated: what a
    step takes longer than that is the time of its communication.
    """

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(1)
        self._first = _model()
        self._input = torch.randn(1, _TOKENS, _WIDTH, generator=torch.Generator().manual_seed(rank))
        # Ranks that come late to a new group would count as slow in the first sample.
        group = dist.new_group(backend=allfold_torch.BACKEND)
        self._models = {
            "allfold": DistributedDataParallel(_copy(self._first), process_group=group),
            "gloo": DistributedDataParallel(_copy(self._first)),
        }
        self._models[NO_SYNC] = self._models["gloo"]
        self._optimizers = {
            name: torch.optim.SGD(model.parameters(), lr=0.01)
            for name, model in self._models.items()
        }
        self._expected = self._reference(world)
        self.contestants: Sequence[str] = list(self._models)

    def operation(self, contestant: str) -> Operation:
        model, optimizer = self._models[contestant], self._optimizers[contestant]

        def step() -> None:
            with model.no_sync() if contestant == NO_SYNC else nullcontext():
                _backward(model, self._input)
            optimizer.step()

        return step

    def write(self, contestant: str, _op: int, /) -> None:
        """Every step begins with the same parameters."""
        _set(self._models[contestant].module, self._first)

    def keep(self, _contestant: str, _op: int, /) -> None:
        """A turn has one step: its gradients stay where they are."""

    def count_wrong(self, contestant: str, _ops: int, /) -> int:
        """Of the gradients."""
        if contestant == NO_SYNC:
            return 0
        far = (_gradients(self._models[contestant].module) - self._expected).abs() > _TOLERANCE
        return int(far.sum())

    def _reference(self, world: int) -> torch.Tensor:
        """The mean of all ranks' gradients, in float64."""
        alone = _copy(self._first)
        _backward(alone, self._input)
        gradients = _gradients(alone).double()
        dist.all_reduce(gradients)
        return gradients / world


def parameters() -> int:
    """Return the number of the model's parameters."""
    return sum(each.numel() for each in _model().parameters())


def _model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)


def _backward(model: nn.Module, given: torch.Tensor) -> None:
    model.zero_grad()
    loss: torch.Tensor = model(given).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _copy(model: nn.Module) -> nn.Module:
    other = _model()
    _set(other, model)
    return other


def _set(model: nn.Module, to: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), to.parameters(), strict=True):
            ours.copy_(theirs)


def _gradients(model: nn.Module) -> torch.Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([grad.reshape(-1) for grad in found])
