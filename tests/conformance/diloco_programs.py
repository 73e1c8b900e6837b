"""Programs of ranks that train a small model by themselves, and agree on it with DiLoCo."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import allfold
from allfold.diloco import DiLoCo
from tests.support.processes import rank_worker

# Two fragments, whose rounds overlap with steps.
OPTIONS: dict[str, Any] = {"every": 6, "fragments": 2, "delay": 2, "wire": "int4"}
_TRUTH = torch.linspace(-1.0, 1.0, 8).reshape(8, 1)


def _model() -> nn.Sequential:
    torch.set_num_threads(1)  # more would only wait for each other
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def _loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    samples = torch.randn(32, 8, generator=generator)
    return nn.functional.mse_loss(model(samples), samples @ _TRUTH)


def _held_out(model: nn.Module, diloco: DiLoCo) -> float:
    with diloco.synchronized(), torch.no_grad():
        return _loss(model, torch.Generator().manual_seed(99)).item()


def _digest(diloco: DiLoCo) -> str:
    parts = diloco.state_dict()
    tensors = [*parts["synchronized"], *parts["momentum"]]
    return hashlib.blake2b(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()


class Training:
    """One rank's training, and what it has seen of the rounds."""

    def __init__(self, seed: int, group: allfold.Group | None = None, **more: Any) -> None:
        self.model = _model()
        self.diloco = DiLoCo(self.model, group, **OPTIONS | more)
        self.errors: list[list[Any]] = []
        self.rounds: list[list[Any]] = []
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 0.03)
        self._generator = torch.Generator().manual_seed(seed)

    def step(self) -> int:
        """Do a step; return how many rounds were applied."""
        self._optimizer.zero_grad()
        _loss(self.model, self._generator).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        try:
            found = self.diloco.step()
        except allfold.PeerLost as error:
            self.errors.append([self.diloco.steps, type(error).__name__])
            return 0
        for result in found:
            # Where no other round is in flight, what all have is compared, bit by bit.
            seen = "" if self.diloco.in_flight else _digest(self.diloco)
            self.rounds.append([self.diloco.steps, list(result.participants), seen])
        return len(found)

    def outcome(self) -> dict[str, Any]:
        """Return all that the test compares."""
        self.diloco.flush()
        return {
            "errors": self.errors,
            "rounds": self.rounds,
            "end": _digest(self.diloco),
            "loss": _held_out(self.model, self.diloco),
        }


def train(group: allfold.Group, steps: int, dies: list[int] | None = None) -> dict[str, Any]:
    """Train; a rank may die after the begin of a round.

    Args:
        dies: the rank, and the step after which it does.
    """
    training = Training(group.rank, group)
    before = _held_out(training.model, training.diloco)
    me = group.rank
    for step in range(1, steps + 1):
        training.step()
        if dies == [me, step]:
            os.kill(os.getpid(), signal.SIGKILL)
    return training.outcome() | {"before": before}


def _pull_later(seconds: float) -> Any:
    """Have a newcomer's pull take as long as if the others were far away, in this context."""
    pull = allfold.State.pull

    def later(*args: Any, **options: Any) -> None:
        time.sleep(seconds)
        pull(*args, **options)

    return patch.object(allfold.State, "pull", later)


TRAININGS: dict[str, Training] = {}  # by group, of this rank


def train_until(group: allfold.Group, steps: int, **options: Any) -> dict[str, Any]:
    """Train until so many steps were counted, and return what was new; a later call goes on."""
    if group.name not in TRAININGS:
        TRAININGS[group.name] = Training(group.rank, group, **options)
    training = TRAININGS[group.name]
    began, told = training.diloco.steps, len(training.rounds)
    done = 0
    while training.diloco.steps < steps:
        training.step()
        done += 1
    new = training.outcome()
    return new | {"began": began, "done": done, "rounds": training.rounds[told:]}


def train_elastic(
    name: str,
    agent: str,
    steps: int,
    awaits: int,
    outer: dict[str, Any] | None = None,
    far: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Train until the group has so many ranks, and then some steps more.

    Args:
        steps: from there on.
        awaits: the number of ranks.
        outer: options of the DiLoCo.
        far: seconds until this rank begins to pull the state, where it joins.
    """
    training = Training(seed=os.getpid(), **outer or {})
    diloco = training.diloco
    state = allfold.State(diloco=diloco)
    with _pull_later(far):
        group = allfold.init(group=name, agent=agent, max_world=4, state=state, **options)
    rank_worker.GROUPS[name] = group
    began, complete = diloco.steps, -1
    while complete < 0 or diloco.steps < complete + steps:
        if complete < 0 and group.world_size == awaits:
            complete = diloco.steps
        if training.step() and not diloco.in_flight:
            state.commit(group)
    return training.outcome() | {"began": began, "complete": complete}
