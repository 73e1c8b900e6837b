"""Steps of a training with DistributedDataParallel, through each backend and through none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import allfold.torch as allfold_torch
from benchmarks.devices import Operation
from benchmarks.plan import MODELS, Model
from benchmarks.workloads import NO_SYNC

_HEADS, _TOKENS = 4, 16
_TOLERANCE = 1e-4


class DdpWorkload:
    """A transformer of :data:`MODELS`. Gloo is the default group; Allfold another one.

    ``no_sync`` is the same step without communication, as when gradients are accumulated: what a
    step takes longer than that is the time of its communication.
    """

    def __init__(self, rank: int, world: int, size: int) -> None:
        """Args:
        size: bytes of the model's gradients.
        """
        torch.manual_seed(1)
        model = next(each for each in MODELS if each.size == size)
        self._first = built(model)
        dice = torch.Generator().manual_seed(rank)
        self._input = torch.randn(1, _TOKENS, model.width, generator=dice)
        self._wrong = 0
        # Ranks that come late to a new group would count as slow in the first sample.
        group = dist.new_group(backend=allfold_torch.BACKEND)
        self._models = {
            "allfold": DistributedDataParallel(deepcopy(self._first), process_group=group),
            "gloo": DistributedDataParallel(deepcopy(self._first)),
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

    def keep(self, contestant: str, _op: int, /) -> None:
        """Look at the gradients, which the next step takes away."""
        self._wrong += self._far(contestant)

    def count_wrong(self, contestant: str, _ops: int, /) -> int:
        """Of the gradients of all steps of the turn."""
        wrong, self._wrong = self._wrong + self._far(contestant), 0
        return wrong

    def _far(self, contestant: str) -> int:
        if contestant == NO_SYNC:
            return 0
        far = (_gradients(self._models[contestant].module) - self._expected).abs() > _TOLERANCE
        return int(far.sum())

    def _reference(self, world: int) -> torch.Tensor:
        """The mean of all ranks' gradients, in float64."""
        alone = deepcopy(self._first)
        _backward(alone, self._input)
        gradients = _gradients(alone).double()
        dist.all_reduce(gradients)
        return gradients / world


def built(model: Model) -> nn.Module:
    """Return the transformer of a model."""
    layer = nn.TransformerEncoderLayer(
        model.width, _HEADS, 4 * model.width, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, model.layers, enable_nested_tensor=False)


def _backward(model: nn.Module, given: torch.Tensor) -> None:
    model.zero_grad()
    loss: torch.Tensor = model(given).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _set(model: nn.Module, to: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), to.parameters(), strict=True):
            ours.copy_(theirs)


def _gradients(model: nn.Module) -> torch.Tensor:
    found = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([grad.reshape(-1) for grad in found])
