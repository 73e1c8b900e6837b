"""Suspicion: one observer's belief about one other node. The time is an argument everywhere.

A suspicion decides nothing about the node; it says when to try harder, and when to suspect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

PATIENCE_SECONDS = 0.4
LONGEST_PATIENCE_SECONDS = 3.0
PONG_FACTOR = 6.0
PONG_WINDOW_SECONDS = 10.0
CLEARED_SECONDS = 30.0
UNANSWERED_PINGS = 3


def patience_for(worst_pong: float) -> float:
    """Return how long a node may be silent if its slowest recent answer took this long."""
    return min(max(PATIENCE_SECONDS, PONG_FACTOR * worst_pong), LONGEST_PATIENCE_SECONDS)


SuspicionKind = Literal["refused", "silent", "stuck"]
"""The kind of a suspicion of one node by another."""


class RecentMaximum:
    """The highest of the values that were noted within the last ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted: deque[tuple[float, float]] = deque()

    def note(self, now: float, value: float) -> None:
        """Note a value; ``now`` never goes back."""
        while self._noted and self._noted[-1][1] <= value:
            self._noted.pop()  # it is neither higher nor younger
        self._noted.append((now, value))

    def at(self, now: float) -> float:
        """Return the maximum; 0 where nothing was noted of late."""
        while self._noted and self._noted[0][0] < now - self._seconds:
            self._noted.popleft()
        return self._noted[0][1] if self._noted else 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One node as another one sees it at one moment.

    Attributes:
        last_heard: when the last byte came, on the link or on any edge.
        unanswered: the pings that were due since the last one that was answered.
        worst_pong: the longest time to the answer of a ping within the last 10 s.
        own_lag: how late the observer's own thread was of late.
        refused: the connection has ended, and a new one is refused, or meets another incarnation.
    """

    last_heard: float
    unanswered: int = 0
    worst_pong: float = 0.0
    own_lag: float = 0.0
    refused: bool = False

    def is_silent(self, now: float) -> bool:
        """Return True if the node leaves pings unanswered, and has said nothing else for too long.

        Unanswered pings alone do not count as silence: the answers may just be slow.
        """
        window = patience_for(self.worst_pong) + self.own_lag
        return self.unanswered >= UNANSWERED_PINGS and now - self.last_heard >= window


class Action(Enum):
    """The next step against a node that is silent."""

    NOTHING = "nothing"
    DIAL_AGAIN = "dial a second connection"
    SUSPECT_SILENT = "suspect it of silence"
    SUSPECT_REFUSED = "suspect it: it refuses connections"


_KINDS: dict[Action, SuspicionKind] = {
    Action.SUSPECT_REFUSED: "refused",
    Action.SUSPECT_SILENT: "silent",
}


class Suspicion:
    """The course of one node's suspicion of another: a second dial, then a suspicion."""

    def __init__(self) -> None:
        self._heard = float("-inf")
        self._cleared = float("-inf")
        self._granted = 0.0
        self._has_dialled = False
        self._suspected = Action.NOTHING

    @property
    def kind(self) -> SuspicionKind | None:
        """The suspicion since the node was last heard or cleared; ``None`` if there is none."""
        return _KINDS.get(self._suspected)

    def clear(self, now: float, patience: float = 0.0) -> None:
        """The orchestrator has found a sign of life: start anew, with twice the patience.

        Args:
            patience: for how long the node may be silent now, at least.
        """
        self._cleared, self._granted = now, patience
        self._begin_anew()

    def patience(self, now: float, worst_pong: float) -> float:
        """Return how long the node may be silent before it is suspected."""
        patience = patience_for(worst_pong)
        if now >= self._cleared + CLEARED_SECONDS:
            return patience
        return max(2 * patience, self._granted)

    def decide(self, now: float, seen: Observation) -> Action:
        """Return what is to be done now; each action once, until the node is heard or cleared."""
        if seen.last_heard > self._heard:
            self._heard = seen.last_heard
            # Last words of a node that is about to end come after its refusal, too.
            if not (seen.refused and self._suspected is Action.SUSPECT_REFUSED):
                self._begin_anew()
        action = self._next_action(now, seen)
        if action is Action.DIAL_AGAIN:
            self._has_dialled = True
        elif action is not Action.NOTHING:
            self._suspected = action
        return action

    def _begin_anew(self) -> None:
        self._has_dialled = False
        self._suspected = Action.NOTHING

    def _next_action(self, now: float, seen: Observation) -> Action:
        window = self.patience(now, seen.worst_pong) + seen.own_lag
        # A refusal is more than silence, so it is told also of a node that is suspected of that.
        is_news = self._suspected is not Action.SUSPECT_REFUSED
        if seen.refused and is_news and now - self._cleared >= window:
            return Action.SUSPECT_REFUSED
        if self._suspected is not Action.NOTHING:
            return Action.NOTHING
        silence = now - max(self._heard, self._cleared)
        if silence >= window and seen.unanswered >= UNANSWERED_PINGS:
            return Action.SUSPECT_SILENT
        if silence >= window / 2 and not self._has_dialled:
            return Action.DIAL_AGAIN
        return Action.NOTHING


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

    def stuck(
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
