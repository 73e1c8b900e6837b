"""The flight recorder: one record per op that is over.

Of the ops that ranks do by themselves, in the short lane, it has a sample: see
:mod:`allfold_agent.groups.lane_records`.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

from allfold_agent.execution.op import Op
from allfold_core.operations import Fingerprint


class OpRecord(NamedTuple):
    """One op on this node.

    Attributes:
        epoch: the ordinal of the epoch in which it ran.
        fingerprint: the call; ``None`` where no local rank has made it.
        started_at: the first local arrival, in seconds since 1970.
        seconds: from the first local arrival until the outcome.
        arrivals: by local rank, seconds after the first one.
        missing: the local ranks that have not called it.
        error: the error's code, empty for a success.
    """

    seq: int
    epoch: int
    fingerprint: Fingerprint | None
    strategy: str
    started_at: float
    seconds: float
    arrivals: dict[int, float]
    missing: tuple[int, ...]
    error: str

    @property
    def what(self) -> str:
        """The call for people: ``all_reduce(sum, float32[1024])``."""
        return self.fingerprint.describe() if self.fingerprint else ""

    def to_dict(self) -> dict[str, Any]:
        shown = self._asdict()
        del shown["fingerprint"]
        return {"what": self.what, **shown}


def record(op: Op) -> OpRecord:
    """The record of an op that is over."""
    first, arrivals = op.first_arrival, op.arrivals
    is_complete = len(arrivals) == len(op.ranks)
    return OpRecord(
        op.seq,
        op.ordinal,
        op.fingerprint if arrivals else None,
        op.strategy,
        op.started_at,
        monotonic() - first,
        {rank: each.at - first for rank, each in arrivals.items()},
        () if is_complete else tuple(rank for rank in op.ranks if rank not in arrivals),
        op.error.code if op.error else "",
    )
