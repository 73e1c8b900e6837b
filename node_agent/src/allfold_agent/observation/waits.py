"""A call that waits for a rank, as the observer knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waits because a rank has not made the call that belongs to it.

    Attributes:
        subject: what waits, for people.
        since: when that was called first (monotonic).
        seq: the op; ``None`` for a message.
        patience: for how many seconds it may wait before a rank whose process runs is late.
        waits_itself: the rank has called something else that is not done, so it is late only if its
            process does not wait for that.
    """

    subject: str
    since: float
    seq: int | None = None
    patience: float = 0.0
    waits_itself: bool = False
