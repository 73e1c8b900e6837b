"""A rank of rounds whose ranks come and go; each mean is known beforehand, bit for bit.

python -m benchmarks.rounds.kills_rank '{"group": "kills", "seat": 0, ...}'
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

import numpy as np

import allfold
from benchmarks.goodput.accounts import Step

_TIMEOUT_SECONDS = 60.0
# A multiple of all sums of the weights 1 to 4: so each mean is a whole number, and exact.
_MULTIPLE = 2520


@dataclass(frozen=True)
class Orders:
    """The arguments of a rank.

    Attributes:
        seat: its weight is one more, so weights say which seats took part.
        compute_seconds: from the start of a round until it is waited for.
        log: the file for its rounds; that of :func:`outcomes_of` has what they brought.
    """

    group: str
    agent: str
    seat: int
    world: int
    compute_seconds: float
    numel: int
    log: str

    def pack(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Outcome:
    """The result of a round, which is the same on all ranks.

    Attributes:
        digest: of the mean.
    """

    number: int
    epoch: int
    weights: tuple[float, ...]
    digest: str


def outcomes_of(log: Path) -> Path:
    """Return the file for the outcomes of a rank with this log."""
    return log.with_suffix(".outcomes")


def read_outcomes(file: Path) -> list[Outcome]:
    """Return the outcomes of a rank; its last line may be cut off."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Outcome(number, epoch, tuple(w), digest) for number, epoch, w, digest in told]


def brought(pattern: np.ndarray, seat: int, number: int) -> np.ndarray:
    """Return the tensor of a seat in a round."""
    return pattern * np.float32(_MULTIPLE * (1 + (3 * seat + number) % 7))


def mean(pattern: np.ndarray, weights: Sequence[float], number: int) -> np.ndarray:
    """Return the mean of a round by its definition, in float64."""
    seats = [round(weight) - 1 for weight in weights if weight]
    parts = [(seat + 1) * brought(pattern, seat, number).astype(np.float64) for seat in seats]
    total = np.sum(parts, 0, np.float64)
    return np.divide(total, sum(seat + 1 for seat in seats))


def main() -> None:
    """Call rounds until somebody ends this process."""
    orders = Orders(**json.loads(sys.argv[1]))
    pattern = np.random.default_rng(1).integers(1, 5, orders.numel).astype(np.float32)
    state = allfold.State(number=0)
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
    log = Path(orders.log)
    tensor = group.empty(orders.numel, np.float32)
    with log.open("w", buffering=1) as steps, outcomes_of(log).open("w", buffering=1) as outcomes:
        while True:
            began, number = monotonic(), state.number
            tensor[:] = brought(pattern, orders.seat, number)
            under_way = group.start_round(tensor, weight=orders.seat + 1)
            sleep(orders.compute_seconds)
            result = under_way.wait()
            ended = monotonic()
            digest = hashlib.blake2b(tensor, digest_size=8).hexdigest()
            is_wrong = not np.array_equal(tensor, mean(pattern, result.weights, number))
            outcomes.write(json.dumps([number, result.epoch, result.weights, digest]) + "\n")
            world = len(result.participants)
            steps.write(Step(number, began, ended, True, int(is_wrong), world).pack() + "\n")
            state.number += 1
            state.commit()  # here ranks join


if __name__ == "__main__":
    main()
