"""A rank of an emulated training: steps are slept, and what is communicated is real.

python -m benchmarks.rounds.training_rank '{"rank": 0, ...}' '{"numel": 4096, ...}'

A step of the training computes on an accelerator, which leaves the processors alone; so it is a
sleep of the time that such a step takes. Deltas are written within that time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep

import numpy as np

import allfold
from benchmarks.rounds.seat import Seat

ALL_REDUCE = "all_reduce"
"""In place of a round: an all-reduce that is waited for at once."""

_DRAWN = 1 << 20
_TIMEOUT_SECONDS = 900.0
# Weights: all ranks see those of a round, and so at which one to end.
_GOES_ON, _IS_LAST = 1.0, 2.0


@dataclass(frozen=True)
class Orders:
    """The orders of a rank.

    Attributes:
        numel: of the parameters, float32.
        step: seconds of a step.
        every: steps from one round of a fragment to the next.
        delay: steps from the start of a round until it is waited for.
        fragments: parts of the parameters with rounds of their own, at even distances.
        wire: the codec, with feedback unless it is bfloat16; ``None`` for none.
        what: ``round``, or :data:`ALL_REDUCE`.
        seconds: from the first measured step to the last; 0 for one round of each fragment more.
    """

    numel: int
    step: float
    every: int
    delay: int
    fragments: int
    wire: str | None
    what: str
    seconds: float


@dataclass
class Report:
    """The measurements of a rank.

    Attributes:
        steps, elapsed: how many were computed, and the seconds that have passed meanwhile.
        took, hidden: seconds of each measured round, and those not spent in waiting for it.
        sent: bytes that its node has sent for each round of the run, as the results say.
        digest: of the mean that came last; the same on all ranks.
    """

    steps: int = 0
    elapsed: float = 0.0
    took: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    digest: str = ""


@dataclass
class _UnderWay:
    due: int
    fragment: int
    began: float
    tensor: np.ndarray
    handle: allfold.Round | allfold.Work


class Training:
    """Steps and rounds of one rank."""

    def __init__(self, group: allfold.Group, orders: Orders) -> None:
        self._group = group
        self._orders = orders
        self.report = Report()
        edges = np.linspace(0, orders.numel, orders.fragments + 1).astype(int)
        self._drawn = np.random.default_rng(group.rank).standard_normal(_DRAWN, np.float32)
        # One that is written while all others are under way.
        copies = max(1, -(-orders.delay // orders.every)) + 1
        self._free = [
            deque(self._written(group.empty(int(size), np.float32)) for _ in range(copies))
            for size in np.diff(edges)
        ]
        self._to_write: list[tuple[int, np.ndarray]] = []
        self._under_way: deque[_UnderWay] = deque()
        self._last = np.empty(0, np.float32)
        self._computed_from = monotonic()
        self._steps = 0
        self._began = 0.0
        self._until = float("inf")
        self._is_over = False

    def run(self) -> None:
        """Train until a rank says that it is time to end, or has had one measured round."""
        every, fragments = self._orders.every, self._orders.fragments
        starts = {number * every // fragments: number for number in range(fragments)}
        if self._orders.what == ALL_REDUCE:
            self._begin()
        for step in count():
            fragment = starts.get(step % every) if step >= every else None
            self._finish_due(step)
            if self._is_over:
                break
            if fragment is not None:
                self._compute()
                self._start(fragment, step)
                self._finish_due(step)
                if self._is_over:
                    break
            self._steps += 1
        self.report.elapsed = monotonic() - self._began
        for each in self._under_way:
            self._note(each)
        self.report.digest = hashlib.blake2b(self._last.data, digest_size=8).hexdigest()

    def _begin(self) -> None:
        """Let the measured time begin."""
        self.report.steps = 0
        self.report.took.clear()
        self.report.hidden.clear()
        self._began = monotonic()
        self._until = self._began + self._orders.seconds

    def _compute(self) -> None:
        """Compute the steps since the last time, if any; deltas are written meanwhile."""
        if not self._steps:
            return
        for fragment, tensor in self._to_write:
            self._free[fragment].append(self._written(tensor))
        self._to_write.clear()
        seconds = self._steps * self._orders.step
        sleep(max(0.0, self._computed_from + seconds - monotonic()))
        self.report.steps += self._steps
        self._steps = 0
        self._computed_from = monotonic()

    def _written(self, tensor: np.ndarray) -> np.ndarray:
        for start in range(0, len(tensor), _DRAWN):
            part = tensor[start : start + _DRAWN]
            part[:] = self._drawn[: len(part)]
        return tensor

    def _start(self, fragment: int, step: int) -> None:
        orders = self._orders
        tensor = self._free[fragment].popleft()
        ends = monotonic() > self._until
        handle: allfold.Round | allfold.Work
        if orders.what == ALL_REDUCE:
            tensor[0] = ends
            handle = self._group.all_reduce(tensor, "mean", wire=orders.wire, async_op=True)
        else:
            handle = self._group.start_round(
                tensor,
                weight=_IS_LAST if ends else _GOES_ON,
                wire=orders.wire,
                feedback=f"fragment {fragment}" if orders.wire else None,
            )
        self._under_way.append(
            _UnderWay(step + orders.delay, fragment, monotonic(), tensor, handle)
        )
        self._computed_from = monotonic()

    def _finish_due(self, step: int) -> None:
        while self._under_way and self._under_way[0].due <= step and not self._is_over:
            self._compute()
            each = self._under_way.popleft()
            self._is_over = self._note(each)
            self._to_write.append((each.fragment, each.tensor))
            self._computed_from = monotonic()
            is_warm = len(self.report.sent) >= self._orders.fragments
            if is_warm and self._began == 0.0:
                self._begin()

    def _note(self, each: _UnderWay) -> bool:
        """Wait for a round; return True if a rank says that it is the last one."""
        handle, report = each.handle, self.report
        if isinstance(handle, allfold.Round):
            result = handle.wait()
            took, hidden, sent = result.seconds, result.hidden_seconds, result.bytes
            is_last = _IS_LAST in result.weights
        else:
            handle.wait()
            took, hidden, sent = monotonic() - each.began, 0.0, 0
            is_last = bool(each.tensor[0])
        report.took.append(took)
        report.hidden.append(hidden)
        report.sent.append(sent)
        self._last = each.tensor
        return is_last


def main() -> None:
    """Train, and tell."""
    seat, given = Seat.given()
    orders = Orders(**given)
    group = allfold.init(
        rank=seat.rank, world_size=seat.world, group=seat.group, timeout=_TIMEOUT_SECONDS
    )
    training = Training(group, orders)
    group.barrier()
    training.run()
    seat.tell("", training.report)
    allfold.shutdown()


if __name__ == "__main__":
    main()
