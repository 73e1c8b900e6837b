"""Ranks that have left a group in order, and the ops that can therefore never be done. Pure."""

from __future__ import annotations

from allfold_core.errors import PeerLost
from allfold_core.verdict import LEFT, name_ranks


class Departures:
    """The ranks that have left an epoch, with the last op that each has called.

    Args:
        group: its name.
        first_seq: the number of the first op of the epoch.

    Attributes:
        last: by rank, the number of its last op.
    """

    def __init__(self, group: str, first_seq: int) -> None:
        self.last: dict[int, int] = {}
        self._group = group
        self._first_seq = first_seq
        self._how: dict[int, str] = {}

    def add(self, rank: int, last_seq: int, how: str = LEFT) -> None:
        """Note that a rank has left.

        Args:
            how: a phrase to follow its name: "ended with an exception (ValueError)".
        """
        self._how[rank] = how
        self.last[rank] = last_seq

    def error(self, seq: int) -> PeerLost | None:
        """Return the error of an op that ranks have left without calling; ``None`` for no rank."""
        if not self.last:
            return None
        gone = sorted(rank for rank, last in list(self.last.items()) if last < seq)
        if not gone:
            return None
        ways: dict[str, list[int]] = {}
        for rank in gone:
            ways.setdefault(self._how.get(rank, LEFT), []).append(rank)
        said = [f"{name_ranks(ranks)} {how}{self._when(ranks)}" for how, ranks in ways.items()]
        return PeerLost(
            f"op {seq} of group '{self._group}' can never be done: {'; '.join(said)}", ranks=gone
        )

    def _when(self, ranks: list[int]) -> str:
        last = {self.last[rank] for rank in ranks}
        if max(last) < self._first_seq:
            return f" before {'its' if len(ranks) == 1 else 'their'} first op"
        return f"{', the last of them' * (len(last) > 1)} after op {max(last)}"
