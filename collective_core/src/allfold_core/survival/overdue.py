"""Nodes that answer pings, but do not do their part of a round. The time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

STUCK_SECONDS = 10.0


class Awaited(NamedTuple):
    """A node's part of a round that somebody waits for: a report, or the leader's decision."""

    group: str
    opening: int
    term: int
    round: int
    node: str


class OverdueRounds:
    """For how long one node has waited for others, in the rounds of all its groups."""

    def __init__(self) -> None:
        self._since: dict[Awaited, float] = {}

    def judge(
        self, now: float, awaited: Collection[Awaited], own_lag: float = 0.0
    ) -> dict[str, float]:
        """Return the nodes that are stuck, each with the seconds for which it was waited for.

        Args:
            awaited: what is waited for now, from nodes without an excuse. A node that answers no
                pings is excused, because that is silence; a leader is excused as long as it waits
                for others itself.
            own_lag: how late this node has recently been in reading messages of others.
        """
        self._since = {each: self._since.get(each, now) for each in awaited}
        waited: dict[str, float] = {}
        for each, since in self._since.items():
            waited[each.node] = max(now - since, waited.get(each.node, 0.0))
        patience = STUCK_SECONDS + own_lag
        return {node: seconds for node, seconds in waited.items() if seconds >= patience}
