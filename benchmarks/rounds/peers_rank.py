"""A rank that trains on handwritten digits in several ways, one after the other.

python -m benchmarks.rounds.peers_rank '{"rank": 0, ...}' '{"steps": 192, ...}'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from train_digits import load_data

import allfold
from allfold.diloco import DiLoCo
from allfold.torch.hook import HookState
from allfold.torch.hook import hook as wire_hook
from benchmarks.rounds.peers import (
    ALONE,
    BFLOAT16,
    DDP,
    INT4,
    POWER_SGD,
    SEEDS,
    TOPK,
    WARM_UP,
    WAYS,
    Orders,
    part,
)
from benchmarks.rounds.seat import Seat

_TIMEOUT_SECONDS = 120.0
_WIDTH = 256
_BATCH = 16
_LEARNING_RATE = 0.05
# The first steps of a process import what later ones have.
_STEPS_TO_WARM_UP = 4


@dataclass(frozen=True)
class Report:
    """The result of a training.

    Attributes:
        elapsed: seconds of all steps.
        loss: of the test images, in the end.
        total: of the parameters, which tells other bits.
    """

    elapsed: float
    loss: float
    total: float


Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Training:
    """The part that all ways to train have in common."""

    group: allfold.Group
    model: nn.Module
    batches: Batches
    orders: Orders

    def run(self, model: nn.Module, after: Callable[[], object] = lambda: None) -> None:
        """Do all steps, and call ``after`` after each of them."""
        optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE, momentum=0.9)
        for images, labels in self.batches:
            sleep(self.orders.step)
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            after()


def _alone(training: Training) -> None:
    training.run(training.model)


def _ddp(training: Training, hook: Callable[..., Any] | None = None, state: object = None) -> None:
    # All ranks have the same seed.
    parallel = DistributedDataParallel(training.model, init_sync=False)
    if hook is not None:
        parallel.register_comm_hook(state, hook)
    training.run(parallel)


def _bfloat16(training: Training) -> None:
    _ddp(training, wire_hook, HookState(training.group, wire="bfloat16"))


def _power_sgd(training: Training) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    _ddp(training, powerSGD_hook.powerSGD_hook, state)


def _rounds(training: Training, wire: str) -> None:
    every = training.orders.every
    diloco = DiLoCo(
        training.model, training.group, every=every, delay=every // 2, wire=wire, name=wire
    )
    training.run(training.model, diloco.step)
    diloco.flush()


_TRAININGS: dict[str, Callable[[Training], None]] = {
    ALONE: _alone,
    DDP: _ddp,
    BFLOAT16: _bfloat16,
    POWER_SGD: _power_sgd,
    INT4: partial(_rounds, wire="int4"),
    TOPK: partial(_rounds, wire="topk"),
}


def main() -> None:
    """Train in every way, and tell of each."""
    seat, given = Seat.given()
    orders = Orders(**given)
    torch.set_num_threads(1)
    dist.init_process_group(
        "allfold",
        init_method=f"file://{seat.folder}/{seat.group}.store",
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )
    group = allfold.init(
        rank=seat.rank, world_size=seat.world, group=seat.group, timeout=_TIMEOUT_SECONDS
    )
    data = load_data()
    warm_up = [
        _trained(way, group, 0, replace(orders, steps=_STEPS_TO_WARM_UP), data) for way in WAYS
    ]
    seat.tell(WARM_UP, warm_up[0])
    for seed in SEEDS:
        for way in WAYS:
            seat.tell(part(way, seed), _trained(way, group, seed, orders, data))
    dist.destroy_process_group()
    allfold.shutdown()


def _trained(
    way: str, group: allfold.Group, seed: int, orders: Orders, data: Sequence[Tensor]
) -> Report:
    images, test_images, labels, test_labels = data
    torch.manual_seed(seed)
    training = Training(group, _model(), _batches(images, labels, group, seed, orders), orders)
    dist.barrier()
    began = monotonic()
    _TRAININGS[way](training)
    elapsed = monotonic() - began
    with torch.no_grad():
        loss = cross_entropy(training.model(test_images), test_labels).item()
        total = parameters_to_vector(training.model.parameters()).double().sum().item()
    return Report(elapsed, loss, total)


def _batches(
    images: Tensor, labels: Tensor, group: allfold.Group, seed: int, orders: Orders
) -> Batches:
    """Yield this rank's share of each batch; the same ones in every way of training."""
    generator = torch.Generator().manual_seed(1 + seed)
    for _ in range(orders.steps):
        shape = (group.world_size, _BATCH)
        batch = torch.randint(len(images), shape, generator=generator)[group.rank]
        yield images[batch], labels[batch]


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(),
        nn.Linear(_WIDTH, 10),
    )  # fmt: skip


if __name__ == "__main__":
    main()
