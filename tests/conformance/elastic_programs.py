"""Programs of ranks that join and leave groups that run."""

from __future__ import annotations

import os
import signal
import time
import zlib
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import PeerLost, WorldChanged
from tests.support.processes import rank_worker


def join(name: str, agent: str, **options: Any) -> list[int]:
    """``allfold.init`` of an elastic group, without a number; returns rank, world size, epoch."""
    group = allfold.init(group=name, agent=agent, **{"max_world": 8, **options})
    rank_worker.GROUPS[name] = group
    return numbers(group)


def numbers(group: allfold.Group) -> list[int]:
    """The numbers of a rank: its own, the world size, the epoch."""
    return [group.rank, group.world_size, group.epoch]


def leave(group: allfold.Group) -> None:
    """``shutdown`` of a group."""
    rank_worker.close_group(group.name)


def train(
    group: allfold.Group, folder: str, me: int, *, boundaries: bool = False
) -> dict[str, list[list[int]]]:
    """Do ops until a file says so; return each op with its outcome, and the sizes of the group.

    Args:
        me: what this rank brings: 1, ``me`` and the number of the op.
        boundaries: let others join and leave after each op, and only there.
    """
    outcomes: list[list[int]] = []
    sizes: list[list[int]] = []
    path = Path(folder)
    while True:
        seq = group._channel.next_op
        mark = 0 if (path / "stop").exists() else 1
        values = np.array([1, me, seq, mark], np.int64)
        work = group.all_reduce(values, async_op=True)
        work.wait()
        assert values[0] == work.participants, values
        assert values[2] == seq * values[0], "a rank did another op"
        outcomes.append([seq, zlib.crc32(values.tobytes()), work.participants or 0])
        if not sizes or sizes[-1][0] != group.world_size:
            sizes.append([group.world_size, seq])
            (path / f"{me}.{group.world_size}.{group.epoch}").touch()
        if values[3] < values[0]:
            return {"outcomes": outcomes, "sizes": sizes}
        if boundaries:
            group.boundary()
        else:
            time.sleep(0.001)


def exchange_in_a_circle(group: allfold.Group) -> list[float]:
    """Send to the next rank and receive from the one before; also from whoever comes."""
    rank, size = group.rank, group.world_size
    mine, got = np.array([float(rank)]), np.empty(1)
    sending = group.send(mine, (rank + 1) % size, async_op=True)
    group.recv(got, (rank - 1) % size)
    sending.wait()
    sending = group.send(mine, (rank + 1) % size, tag=1, async_op=True)
    anyone = np.empty(1)
    group.recv(anyone, tag=1)
    sending.wait()
    return [float(got[0]), float(anyone[0])]


def gather(group: allfold.Group) -> list[float]:
    """All-gather the rank numbers; where the group has changed, once more."""
    while True:
        out = np.empty((group.world_size, 1))
        try:
            group.all_gather(np.array([float(group.rank)]), out)
        except WorldChanged:
            continue
        return [float(each) for each in out[:, 0]]


def reduce_once(group: allfold.Group, timeout: float | None = None) -> list[float]:
    """One all-reduce of ones; returns its value and the size of the group afterwards."""
    value = np.ones(1)
    group.all_reduce(value, timeout=timeout)
    return [float(value[0]), group.world_size]


def leave_at_a_boundary(group: allfold.Group, folder: str, me: int) -> dict[str, Any]:
    """Do ops as others do, and wish to leave; returns how many were done until it was let go."""
    done = 0
    with suppress(allfold.Drained):
        while True:
            values = np.array([1, me, group._channel.next_op, 1], np.int64)
            group.all_reduce(values)
            done += 1
            if done == 3:
                group.drain()
            group.boundary()
    rank_worker.GROUPS.pop(group.name)
    (Path(folder) / f"{me}.left").touch()
    return {"done": done}


def join_with_state(name: str, agent: str, numel: int, **options: Any) -> list[int]:
    """``allfold.init`` with a state; returns rank, world size and the step that it begins with."""
    state = allfold.State(weights=np.zeros(numel), step=0)
    group = allfold.init(group=name, agent=agent, state=state, **{"max_world": 8, **options})
    rank_worker.GROUPS[name], STATES[name] = group, state
    return [group.rank, group.world_size, state.step]


STATES: dict[str, allfold.State] = {}


class Mortal:
    """A value of a state whose process is killed when the state is looked at."""

    def __init__(self, dies: bool) -> None:
        self._dies = dies

    def state_dict(self) -> dict[str, Any]:
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take nothing."""


def open_with_state(
    name: str, agent: str, number: int | None, dies: bool, **options: Any
) -> list[float]:
    """``allfold.init`` with a state, whose weight is at first the number that this rank asks for.

    Returns the number of ranks, their sum over them, and the weight of this rank.
    """
    state = allfold.State(
        weight=np.full(1, -1.0 if number is None else float(number)), mortal=Mortal(dies)
    )
    group = allfold.init(
        group=name, agent=agent, rank=number, state=state, max_world=8, timeout=20.0, **options
    )
    rank_worker.GROUPS[name] = group
    total = group.all_reduce(state.weight.copy())
    return [group.world_size, float(total[0]), float(state.weight[0])]


def train_with_state(group: allfold.Group, folder: str, me: int, steps: int) -> list[float]:
    """Add one to all weights in each step; return the step and the weights' extremes at the end.

    The last step is not done before a file says so. A step that fails is done again.
    """
    state = STATES[group.name]
    while state.step < steps:
        with suppress(PeerLost):
            _train_a_step(group, state, Path(folder), me, steps)
    return [state.step, float(state.weights.min()), float(state.weights.max())]


def _train_a_step(
    group: allfold.Group, state: allfold.State, path: Path, me: int, steps: int
) -> None:
    step, weights = state.step, state.weights
    assert (weights == step).all(), "the state is that of the step"
    mark = 1.0 if step + 1 < steps or (path / "stop").exists() else 0.0
    gradient = np.append(np.ones_like(weights), mark)
    group.all_reduce(gradient, "mean")
    if gradient[-1] == 1.0:
        weights += gradient[:-1]
        state.step += 1
    (path / f"{me}.{group.world_size}.{group.epoch}").touch()
    state.commit()


def wait_until_drained(group: allfold.Group) -> str:
    """Call ops with too few ranks; told to leave meanwhile, return the reason."""
    with suppress(allfold.BelowMinWorld):
        group.all_reduce(np.ones(1))
    timer = Timer(1.0, group.drain)
    timer.start()
    try:
        group.all_reduce(np.ones(1))
    except allfold.Drained as drained:
        rank_worker.GROUPS.pop(group.name)
        return drained.reason
    raise AssertionError("it went on")
