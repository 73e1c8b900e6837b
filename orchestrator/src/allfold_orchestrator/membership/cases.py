"""The open cases of the jury: accusations, silent links, and extended patience. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from allfold_core.survival.suspicion import CLEARED_SECONDS
from allfold_orchestrator.membership.group_state import Life

ASK_AHEAD_SECONDS = 0.15
"""An accuser is asked so long before its charge is decided: it pings once more, and answers."""
HEAR_SECONDS = 0.3
"""A node that has just gone on is heard within this time: as many pings as make it silent."""


class Charge(Enum):
    """The kind of an accusation of one node by another."""

    REFUSED = "refused"
    SILENT = "silent"
    STUCK = "stuck"


_DISPROVED_BY_LIFE = frozenset({Charge.REFUSED, Charge.SILENT})
# The nodes that have accused it follow.
_IN_WORDS = {
    Charge.REFUSED: "refused connections of",
    Charge.SILENT: "was silent to",
    Charge.STUCK: "did not do its part for",
}


@dataclass(frozen=True, slots=True)
class ExtendedPatience:
    """The longer time for which accusers wait for a node that was accused, and lives.

    Attributes:
        before: as long they waited until then.
    """

    patience: float
    before: float
    since: float

    def holds(self, now: float) -> bool:
        return now < self.since + CLEARED_SECONDS

    def is_new(self, now: float) -> bool:
        """Return True while those who accuse it cannot know of the patience yet."""
        return now < self.since + self.patience


@dataclass(slots=True)
class Open:
    """A question that is open from ``begun`` to ``until``."""

    begun: float
    until: float


@dataclass(slots=True)
class SilentLink(Open):
    """A link on which the accuser hears nothing.

    Attributes:
        lag: how late the accuser is to read what others say.
        is_asked: the accuser was asked if it still hears nothing.
    """

    lag: float = 0.0
    is_asked: bool = False

    def listen_again(self, now: float) -> None:
        """Let the accuser listen to the other end, which lives now; its word may be older."""
        self.until = max(self.until, now + HEAR_SECONDS + self.lag)
        self.is_asked = False

    @property
    def due(self) -> float:
        """Return when there is something to do."""
        return self.until if self.is_asked else self.until - ASK_AHEAD_SECONDS


@dataclass(slots=True)
class Case(Open):
    """The accusations of one life that are not decided yet; without accusers it is our own.

    ``until`` is for a sign of life. A node that does not do its part has a time of its own for
    that: neither charge may be decided by the time of the other.

    Attributes:
        charges: of each accuser. A node may be silent, and have done nothing before that.
        link_ended: its control link to this replica has ended.
        dial_refused: it refuses connections of this replica.
        is_asked: a sign of life was asked for at all replicas.
        stuck_until: the end of the time in which a node that is accused of it may do its part.
    """

    charges: dict[Life, set[Charge]] = field(default_factory=dict)
    link_ended: bool = False
    dial_refused: bool = False
    is_asked: bool = False
    stuck_until: float = 0.0

    @property
    def due(self) -> float:
        """Return when there is something to decide."""
        if Charge.STUCK not in self.kinds:
            return self.until
        return min(self.until, self.stuck_until) if self.is_missed else self.stuck_until

    def wait_for_life(self, until: float) -> None:
        """Wait for a sign of life at least until then, and from when it has been asked for."""
        self.until, self.is_asked = max(self.until, until), False

    def charge(self, accuser: Life, charge: Charge) -> None:
        """Add what a node is accused of, to what it is accused of by the same one already."""
        self.charges.setdefault(accuser, set()).add(charge)

    def withdraw(self, accuser: Life, charge: Charge) -> None:
        """Take charges of an accuser back. A node that was heard neither refuses nor is silent."""
        withdrawn = {charge} if charge is Charge.STUCK else _DISPROVED_BY_LIFE
        left = self.charges.pop(accuser, set()) - withdrawn
        if left:
            self.charges[accuser] = left

    def acquit(self) -> list[Life]:
        """Drop what a sign of life disproves; return whose charges those were.

        To live is no excuse for a node that does not do its part.
        """
        disproved = [each for each, said in self.charges.items() if said & _DISPROVED_BY_LIFE]
        self.charges = {
            each: {Charge.STUCK} for each, said in self.charges.items() if Charge.STUCK in said
        }
        self.dial_refused = False
        return disproved

    @property
    def kinds(self) -> set[Charge]:
        """All that the node is accused of."""
        return {charge for said in self.charges.values() for charge in said}

    @property
    def is_missed(self) -> bool:
        """True if somebody says that it gives no sign of life."""
        return bool(self.kinds & _DISPROVED_BY_LIFE)

    @property
    def is_refused_twice(self) -> bool:
        """True if a second path confirms what this replica found itself."""
        return self.dial_refused and (self.link_ended or Charge.REFUSED in self.kinds)

    @property
    def is_refused_to_all(self) -> bool:
        """True if those who were linked to the node are refused now, as this replica is."""
        return self.dial_refused and Charge.REFUSED in self.kinds

    @property
    def is_charged(self) -> bool:
        """True while there is a reason to ask whether the node lives."""
        return bool(self.charges) or self.link_ended

    @property
    def how(self) -> str:
        """Return what the node did, as a message says it after the node's name."""
        if self.kinds == {Charge.STUCK}:
            return f"was stuck: it answered {self._accusers()}, but did not do its part"
        said = [
            f"{words} {self._accusers(charge)}"
            for charge, words in _IN_WORDS.items()
            if charge in self.kinds
        ]
        return ", ".join([*said, "and gave no sign of life"])

    def _accusers(self, of: Charge | None = None) -> str:
        """Return the names of those that accuse it, of one thing or of any."""
        return ", ".join(sorted(by[0] for by, said in self.charges.items() if of in {None, *said}))
