"""A rank of a training whose ranks come and go; its results are known beforehand.

python -m benchmarks.goodput.rank '{"group": "goodput", "seat": 0, ...}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

import numpy as np

import allfold
from benchmarks.goodput.accounts import Step

_SAMPLES, _BATCH = 4096, 256
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Orders:
    """The arguments of a rank.

    Attributes:
        seat: the number it would have in a group that does not change.
        world: the number of ranks with which the group opens, and its maximum.
        compute_seconds: from the beginning of a step to its all-reduce.
        nbytes: the size of the all-reduce.
        log: the file for the steps.
    """

    group: str
    agent: str
    seat: int
    world: int
    compute_seconds: float
    nbytes: int
    log: str

    def pack(self) -> str:
        return json.dumps(asdict(self))


class Data:
    """Random samples; the gradient of some is a pattern times the sum of their values.

    All are whole numbers that float32 adds up exactly, in any order: so each result is known bit
    for bit, however many ranks have made it, and one that lacks a sample is wrong.
    """

    def __init__(self, numel: int) -> None:
        random = np.random.default_rng(1)
        self.numel = numel
        self._pattern = random.integers(1, 64, numel).astype(np.float32)
        self._values = random.integers(1, 32, _SAMPLES)

    def total(self, samples: np.ndarray | slice) -> int:
        """Return the sum of the values of some samples."""
        return int(self._values[samples].sum())

    def gradient(self, total: int) -> np.ndarray:
        """Return the gradient of samples with this total."""
        return self._pattern * np.float32(total)

    def weights(self, total: int) -> np.ndarray:
        """Return the sum of the gradients of all steps, of samples with this total."""
        return np.multiply(self._pattern, total, dtype=np.float64)


def main() -> None:
    """Train until somebody ends this process."""
    orders = Orders(**json.loads(sys.argv[1]))
    data = Data(orders.nbytes // 4)
    state = allfold.State(
        sampler=allfold.ElasticSampler(_SAMPLES, _BATCH, shuffle=False),
        weights=np.zeros(data.numel),
        total=0,
        step=0,
    )
    group = allfold.init(
        group=orders.group,
        agent=orders.agent,
        rank=orders.seat,
        world_size=orders.world,
        max_world=orders.world,
        on_loss="shrink",
        timeout=_TIMEOUT_SECONDS,
        state=state,
    )
    with Path(orders.log).open("w", buffering=1) as log:

        def note(step: Step) -> None:
            log.write(step.pack() + "\n")

        while True:
            _train_epoch(group, state, data, orders.compute_seconds, note)


def _train_epoch(
    group: allfold.Group,
    state: allfold.State,
    data: Data,
    seconds: float,
    note: Callable[[Step], None],
) -> None:
    gradient = group.empty(data.numel, np.float32)
    for batch in state.sampler:
        began = monotonic()
        # In the time of the computation, which leaves the processors alone otherwise.
        wrong = int(not np.array_equal(state.weights, data.weights(state.total)))
        gradient[:] = data.gradient(data.total(batch.indices))
        sleep(max(0.0, began + seconds - monotonic()))
        group.all_reduce(gradient)
        number, counts = state.step, state.sampler.commit()
        if counts:
            total = data.total(slice(batch.start, batch.stop))
            wrong += not np.array_equal(gradient, data.gradient(total))
            state.weights += gradient
            state.total += total
            state.step += 1
        note(Step(number, began, monotonic(), counts, wrong, batch.split.world_size))
        state.commit()  # here ranks join


if __name__ == "__main__":
    main()
