"""A rank of rounds with a quorum, in which one rank computes longer than the others.

python -m benchmarks.rounds.slow_rank '{"rank": 0, ...}' '{"numel": 4096, ...}'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic, sleep

import numpy as np

import allfold
from benchmarks.rounds.seat import Seat

_TIMEOUT_SECONDS = 120.0
_GOES_ON, _IS_LAST, _ABSENT = 1.0, 2.0, 0.0
_WARM_UP = 2


@dataclass(frozen=True)
class Orders:
    """The orders of a rank.

    Attributes:
        period: seconds that this rank computes between two of its contributions.
        is_slow: it catches up with the others before it contributes.
        quorum, within: of the rounds.
        wire: their codec, with feedback.
        seconds: for which they go on.
    """

    numel: int
    period: float
    is_slow: bool
    quorum: int
    within: float
    wire: str
    seconds: float


@dataclass
class Report:
    """The observations of a rank.

    Attributes:
        ended: when each round was waited for, in seconds of the machine's monotonic clock.
        weights: of each round, by rank.
        took_part: in which of them it did.
    """

    ended: list[float] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    took_part: list[bool] = field(default_factory=list)


class Contributor:
    """A rank, and the one round of it that may be in flight."""

    def __init__(self, group: allfold.Group, orders: Orders) -> None:
        self._group = group
        self._orders = orders
        self._spare = np.ones((2, orders.numel), np.float32)
        self._until = monotonic() + orders.seconds
        self._under_way: allfold.Round | None = None
        self.report = Report()

    def run(self) -> None:
        """Contribute after each period, until a rank says that a round is the last one."""
        while True:
            sleep(self._orders.period)
            if self._finish() or (self._orders.is_slow and self._catch_up()):
                break
            ends = monotonic() > self._until and not self._orders.is_slow
            self._under_way = self._started(_IS_LAST if ends else _GOES_ON)
        self._finish()

    def _catch_up(self) -> bool:
        """Call the rounds that are done already; return True if one of them was the last."""
        is_last, behind = False, 1  # the first one tells how many there are
        while behind and not is_last:
            result = self._started(_ABSENT).wait()
            is_last, behind = self._note(result), result.behind
        return is_last

    def _started(self, weight: float) -> allfold.Round:
        orders = self._orders
        self._spare = self._spare[::-1]
        return self._group.start_round(
            self._spare[0],
            weight=weight,
            quorum=orders.quorum,
            within=orders.within,
            wire=orders.wire,
            feedback="outer",
        )

    def _finish(self) -> bool:
        """Wait for the round that was started a period ago; return True if it was the last."""
        handle, self._under_way = self._under_way, None
        return handle is not None and self._note(handle.wait())

    def _note(self, result: allfold.RoundResult) -> bool:
        self.report.ended.append(monotonic())
        self.report.weights.append(list(result.weights))
        self.report.took_part.append(result.took_part)
        return _IS_LAST in result.weights


def main() -> None:
    """Contribute, and tell."""
    seat, given = Seat.given()
    orders = Orders(**given)
    group = allfold.init(
        rank=seat.rank, world_size=seat.world, group=seat.group, timeout=_TIMEOUT_SECONDS
    )
    for _ in range(_WARM_UP):
        group.start_round(np.ones(orders.numel, np.float32), wire=orders.wire).wait()
    contributor = Contributor(group, orders)
    contributor.run()
    seat.tell("", contributor.report)
    allfold.shutdown()


if __name__ == "__main__":
    main()
