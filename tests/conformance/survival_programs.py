"""Programs of ranks that go on after losses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import PeerLost, PeerMissing


def described(group: allfold.Group) -> list[int]:
    """The numbers of a rank: its own, the world size, the epoch, the nodes."""
    return [group.rank, group.world_size, group.epoch, group.nodes]


def train(group: allfold.Group, numel: int, folder: str) -> dict[str, Any]:
    """Do ops until a file says so, over all losses; return what each loss and the end was like."""
    losses: list[list[Any]] = []
    done = 0
    while True:
        mark = np.array([0.0 if (Path(folder) / "stop").exists() else 1.0])
        values = np.ones(numel, np.float32)
        reduced = False
        try:
            group.all_reduce(values)
            reduced = True
            assert (values == group.world_size).all()
            group.all_reduce(mark, "min")
        except PeerLost as error:
            assert reduced or (values == 1).all(), "a failed op has changed the tensor"
            losses.append([done, error.message, group.world_size])
            continue
        done += 1
        if done == 5:
            (Path(folder) / str(time.monotonic_ns())).touch()
        if not mark[0]:
            return {"done": done, "losses": losses, "numbers": described(group)}


def shrink(group: allfold.Group, numel: int, folder: str) -> dict[str, Any]:
    """Do ops until a file says so; return how many had how many participants, in their order."""
    counts: list[list[int]] = []
    done = 0
    while True:
        mark = np.array([0.0 if (Path(folder) / "stop").exists() else 1.0])
        values = np.ones(numel, np.float32)
        work = group.all_reduce(values, async_op=True)
        work.wait()
        assert (values == work.participants).all()
        if not counts or counts[-1][0] != work.participants:
            counts.append([work.participants, 0])
        counts[-1][1] += 1
        group.all_reduce(mark, "min")
        done += 1
        if done == 5:
            (Path(folder) / str(time.monotonic_ns())).touch()
        if not mark[0]:
            return {"counts": counts, "numbers": described(group)}


def gather(group: allfold.Group) -> list[int]:
    """All ranks' numbers, by rank."""
    found = group.all_gather(np.array([group.rank]))
    return [int(each) for each in np.asarray(found).reshape(-1)]


_open: dict[str, Any] = {}


def leave_open(group: allfold.Group, timeout: float, async_op: bool) -> list[Any]:
    """Do an op that nobody can decide; return what its error says."""
    tensor = np.full(3, 1.0 + group.rank)
    try:
        work = group.all_reduce(tensor, timeout=timeout, async_op=async_op)
        work.wait()
    except PeerMissing as error:
        _open[group.name] = error.work
        assert (tensor == 1.0 + group.rank).all(), "an open op has changed the tensor"
        return [error.decided, error.message]
    raise AssertionError("the op was decided")


def outcome_of_open(group: allfold.Group) -> list[float]:
    """Wait again for the op that was left open, until it is decided; return its result."""
    while True:
        try:
            return [float(each) for each in _open[group.name].wait()]
        except PeerMissing as error:
            if error.decided:
                raise
