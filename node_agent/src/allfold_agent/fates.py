"""Which ops of a group can never succeed, and why. Pure; the group's lock protects it."""

from __future__ import annotations

from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.verdict import name_ranks

REMEMBERED = 512


class Fates:
    """What is known about failed ops, ranks that left, and members that are lost.

    Attributes:
        left: the last op of every rank that has left the group in order.
        broken: why no further op can be done at all.
    """

    def __init__(self, group: str) -> None:
        self.left: dict[int, int] = {}
        self.broken: PeerLost | None = None
        self._group = group
        self._failed: dict[int, AllfoldError] = {}

    def of(self, seq: int) -> AllfoldError | None:
        """Why an op has failed or is bound to; ``None`` for one that may succeed."""
        return self._failed.get(seq) or self.broken or self._missing_for(seq)

    def fail(self, seq: int, error: AllfoldError) -> None:
        """Remember a verdict for the ranks that have yet to call the op."""
        self._failed[seq] = error

    def forget_before(self, seq: int) -> None:
        """Every local rank has called this op: much older verdicts are known to all."""
        for old in [each for each in self._failed if each < seq - REMEMBERED]:
            del self._failed[old]

    def _missing_for(self, seq: int) -> PeerLost | None:
        if not self.left:
            return None
        gone = sorted(rank for rank, last in list(self.left.items()) if last < seq)
        if not gone:
            return None
        return PeerLost(
            f"op {seq} of group '{self._group}' can never be done: {name_ranks(gone)} "
            f"left the group after op {max(self.left[rank] for rank in gone)}",
            ranks=gone,
        )
