"""A round: a weighted mean that is computed while the rank goes on with other work."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from allfold._handles.work import Work
from allfold_core.errors import InvalidArgument
from allfold_core.verdict import counted


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round. All of it is the same on every rank, but for the last six.

    Attributes:
        tensors: what was given to the round; the mean is in them.
        epoch: of the group; ranks are numbered as in this epoch.
        weights: of every rank, in rank order; 0 of one that took no part.
        participants: the ranks that took part.
        took_part: this rank did: its weight is not 0, and the round has waited for it.
        kept: what this rank has brought is not in the mean, and will be in its next round of the
            same ``feedback`` name.
        behind: how many later rounds of the group were done before this rank has called them.
        bytes: how many bytes of tensors this rank's node sent to other nodes for the round.
        seconds: from the call to the moment when the result was there.
        hidden_seconds: so much of that was not spent in :meth:`Round.wait`.
    """

    tensors: Any
    epoch: int
    weights: tuple[float, ...]
    participants: tuple[int, ...]
    took_part: bool
    kept: bool
    behind: int
    bytes: int
    seconds: float
    hidden_seconds: float


class Round:
    """A handle of a round. Leave its tensors alone until it is done.

    It is done once :meth:`wait` has returned or raised, or :meth:`is_completed` has returned True.
    A handle may be dropped: the result comes to the tensors all the same.

    Attributes:
        work: the op as any other one in flight.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self._waited = 0.0
        self._result: RoundResult | None = None

    def __repr__(self) -> str:
        return f"<allfold.Round: {self.work!r}>"

    def is_completed(self) -> bool:
        """Return True if :meth:`wait` would return, or raise, at once."""
        return self.work.is_completed()

    def wait(self, timeout: float | None = None) -> RoundResult:
        """Wait for the outcome; returns it, also when called again.

        Args:
            timeout: seconds. Without one, the round's own deadline counts.

        Raises:
            InvalidArgument: the weights of all ranks are 0. All ranks get this error, and their
                tensors are as they were.
            AllfoldError: the errors of :meth:`Work.wait`.
        """
        if self._result is None:
            began = monotonic()
            try:
                tensors = self.work.wait(timeout)
            finally:
                self._waited += monotonic() - began
            self._result = self._made(tensors)
        return self._result

    def _made(self, tensors: Any) -> RoundResult:
        report, epoch = self.work.report, self.work.epoch
        assert epoch is not None
        weights = tuple(np.frombuffer(b64decode(report["weights"]), "<f8").tolist())
        if not any(weights):
            raise InvalidArgument(
                f"a round of {counted(len(weights), 'rank')} has no mean, because all weights are "
                "0; the tensors are as they were. Give a weight above 0 on one rank at least."
            )
        seconds = report["seconds"]
        return RoundResult(
            tensors,
            epoch,
            weights,
            tuple(rank for rank, weight in enumerate(weights) if weight),
            weights[report["rank"]] > 0,
            report.get("kept", False),
            report.get("behind", 0),
            report["bytes"],
            seconds,
            max(0.0, seconds - self._waited),
        )
