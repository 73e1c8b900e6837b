"""A rank of a training that does what it is told: computes, all-reduces, and misbehaves on request.

python -m benchmarks.diagnosis.rank '{"group": "diagnosis", "rank": 0, ...}'

Orders come through a named pipe, one per line: ``late 4`` and the like. What it does is checked: a
wrong result ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Thread

import numpy as np

import allfold
from allfold_core.errors import MismatchError

_SHORT, _LONG = 1024, 256 * 1024
_TIMEOUT_SECONDS = 30.0
_SLOW_FACTOR = 12


@dataclass(frozen=True)
class Orders:
    """The arguments of a rank.

    Attributes:
        compute_seconds: the CPU time of a step between two rounds of all-reduces.
        pipe: the named pipe for what it is told.
    """

    group: str
    agent: str
    rank: int
    world: int
    compute_seconds: float
    pipe: str

    def pack(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Train until it is told to end, or to do something that ends it."""
    orders = Orders(**json.loads(sys.argv[1]))
    told: deque[list[str]] = deque()
    Thread(target=_read_orders, args=(orders.pipe, told), daemon=True).start()
    group = allfold.init(
        group=orders.group,
        agent=orders.agent,
        rank=orders.rank,
        world_size=orders.world,
        timeout=_TIMEOUT_SECONDS,
    )
    training = _Training(group, orders)
    print("ready", flush=True)
    while training.step():
        if told:
            training.obey(*told.popleft())


def _read_orders(pipe: str, told: deque[list[str]]) -> None:
    # Also for writing: else it would end whenever whoever writes closes it.
    with os.fdopen(os.open(pipe, os.O_RDWR)) as lines:
        for line in lines:
            told.append(line.split())


class _Training:
    """Steps of a training: some computation, two short all-reduces and a long one."""

    def __init__(self, group: allfold.Group, orders: Orders) -> None:
        self._group = group
        self._orders = orders
        random = np.random.default_rng(orders.rank)
        self._short = random.integers(0, 64, _SHORT).astype(np.float32)
        self._long = random.integers(0, 64, _LONG).astype(np.float32)
        self._sums = [
            sum(
                np.random.default_rng(rank).integers(0, 64, _SHORT).astype(np.float32)
                for rank in range(orders.world)
            )
        ]
        self._slow_until = 0.0
        self._ends = False

    def step(self) -> bool:
        """Return False when all ranks agree to end."""
        is_slow = time.monotonic() < self._slow_until
        compute(self._orders.compute_seconds * (_SLOW_FACTOR if is_slow else 1))
        try:
            total = self._group.all_reduce(self._short.copy())
            if not np.array_equal(total, self._sums[0]):
                raise AssertionError("a wrong sum")
            self._group.all_reduce(self._long.copy())
            wants = self._group.all_reduce(np.array([self._ends], np.float32))
        except MismatchError:
            return True  # the group is usable
        return not wants[0]

    def obey(self, what: str, *arguments: str) -> None:
        """Do what was ordered, between two steps."""
        actions: dict[str, Callable[..., None]] = {
            "late": lambda seconds: load_batch(float(seconds)),
            "lock": lambda seconds: hold_lock(float(seconds)),
            "slow": self._be_slow,
            "exit": lambda: os._exit(3),
            "raise": lambda: fail_to_parse(),
            "other_shape": lambda: self._misfit(np.zeros(_SHORT + 1, np.float32)),
            "other_type": lambda: self._misfit(np.zeros(_SHORT, np.float64)),
            "disk": lambda: save_checkpoint(),
            "memory": lambda: take_memory(),
            "end": self._end,
        }
        actions[what](*arguments)

    def _be_slow(self, seconds: str) -> None:
        self._slow_until = time.monotonic() + float(seconds)

    def _misfit(self, tensor: np.ndarray) -> None:
        compute(self._orders.compute_seconds)
        try:
            self._group.all_reduce(tensor)
        except MismatchError:
            return

    def _end(self) -> None:
        self._ends = True


def compute(seconds: float) -> None:
    """Use so much CPU time, as computation does: less of it per second where there is no CPU."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        np.linalg.norm(np.ones((64, 64)))


def load_batch(seconds: float) -> None:
    """Wait for data."""
    time.sleep(seconds)


def hold_lock(seconds: float) -> None:
    """Keep the interpreter lock while a function in C sleeps."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def fail_to_parse() -> None:
    """Fail as programs do."""
    int("nan-17")


def save_checkpoint() -> None:
    """Write to a disk that is full."""
    with open("/dev/full", "wb", buffering=0) as file:  # noqa: PTH123 - no path of a file
        file.write(bytes(1 << 20))


def take_memory() -> None:
    """Ask for more memory than there is."""
    np.ones(1 << 50, np.uint8)


if __name__ == "__main__":
    main()
