"""Values of the failure detector: suspects, silent links, extended patience, instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from allfold_core.survival.suspicion import CLEARED_SECONDS, SuspicionKind
from allfold_core.survival.term_record import Life

ASK_AHEAD_SECONDS = 0.15
"""A reporter is asked so long before its suspicion is decided: it pings once more, and answers."""
HEAR_SECONDS = 0.3
"""A node that has just gone on is heard within this time: as many pings as make it silent."""


_DISPROVED_BY_LIFE: frozenset[SuspicionKind] = frozenset({"refused", "silent"})
# The nodes that have suspected it follow.
_IN_WORDS: dict[SuspicionKind, str] = {
    "refused": "refused connections of",
    "silent": "was silent to",
    "stuck": "did not do its part for",
}


@dataclass(frozen=True, slots=True)
class ExtendedPatience:
    """The longer time for which reporters wait for a node that was suspected, and lives.

    Attributes:
        before: as long they waited until then.
    """

    patience: float
    before: float
    since: float

    def holds(self, now: float) -> bool:
        return now < self.since + CLEARED_SECONDS

    def is_new(self, now: float) -> bool:
        """Return True while those who suspect it cannot know of the patience yet."""
        return now < self.since + self.patience


@dataclass(slots=True)
class Open:
    """A question that is open from ``begun`` to ``until``."""

    begun: float
    until: float


@dataclass(slots=True)
class SilentLink(Open):
    """A link on which the reporter hears nothing.

    Attributes:
        lag: how late the reporter is to read what others say.
        is_asked: the reporter was asked if it still hears nothing.
    """

    lag: float = 0.0
    is_asked: bool = False

    def listen_again(self, now: float) -> None:
        """Wait once more for the reporter: the other end lives now, and its word may be older."""
        self.until = max(self.until, now + HEAR_SECONDS + self.lag)
        self.is_asked = False

    @property
    def due(self) -> float:
        """Return when there is something to do."""
        return self.until if self.is_asked else self.until - ASK_AHEAD_SECONDS


@dataclass(slots=True)
class SuspectedLife(Open):
    """The suspicions of one life that are not decided yet; without reporters it is our own.

    ``until`` is for a sign of life. A node that does not do its part has a time of its own for
    that: neither suspicion may be decided by the time of the other.

    Attributes:
        suspicions: of each reporter. A node may be silent, and have done nothing before that.
        link_ended: its control link to this replica has ended.
        dial_refused: it refuses connections of this replica.
        is_asked: a sign of life was asked for at all replicas.
        stuck_until: the end of the time in which a node that is suspected of it may do its part.
    """

    suspicions: dict[Life, set[SuspicionKind]] = field(default_factory=dict)
    link_ended: bool = False
    dial_refused: bool = False
    is_asked: bool = False
    stuck_until: float = 0.0

    @property
    def due(self) -> float:
        """Return when there is something to decide."""
        if "stuck" not in self.kinds:
            return self.until
        return min(self.until, self.stuck_until) if self.is_missed else self.stuck_until

    def wait_for_life(self, until: float) -> None:
        """Wait for a sign of life at least until then, and from when it has been asked for."""
        self.until, self.is_asked = max(self.until, until), False

    def add(self, reporter: Life, kind: SuspicionKind) -> None:
        """Add a suspicion to those of the same reporter."""
        self.suspicions.setdefault(reporter, set()).add(kind)

    def withdraw(self, reporter: Life, kind: SuspicionKind) -> None:
        """Withdraw suspicions; a node that was heard is neither refusing nor silent."""
        withdrawn = {kind} if kind == "stuck" else _DISPROVED_BY_LIFE
        left = self.suspicions.pop(reporter, set()) - withdrawn
        if left:
            self.suspicions[reporter] = left

    def clear(self) -> list[Life]:
        """Drop the suspicions that a sign of life disproves; return their reporters.

        A suspicion of being stuck stays: a stuck node gives signs of life.
        """
        disproved = [by for by, kinds in self.suspicions.items() if kinds & _DISPROVED_BY_LIFE]
        self.suspicions = {
            by: {"stuck"} for by, kinds in self.suspicions.items() if "stuck" in kinds
        }
        self.dial_refused = False
        return disproved

    @property
    def kinds(self) -> set[SuspicionKind]:
        """All that the node is suspected of."""
        return {kind for kinds in self.suspicions.values() for kind in kinds}

    @property
    def is_missed(self) -> bool:
        """True if a reporter says that it gives no sign of life."""
        return bool(self.kinds & _DISPROVED_BY_LIFE)

    @property
    def is_refused_twice(self) -> bool:
        """True if a second path confirms what this replica found itself."""
        return self.dial_refused and (self.link_ended or "refused" in self.kinds)

    @property
    def is_refused_to_all(self) -> bool:
        """True if those who were linked to the node are refused now, as this replica is."""
        return self.dial_refused and "refused" in self.kinds

    @property
    def is_suspected(self) -> bool:
        """True while there is a reason to ask whether the node lives."""
        return bool(self.suspicions) or self.link_ended

    @property
    def how(self) -> str:
        """Return what the node did, as a message says it after the node's name."""
        if self.kinds == {"stuck"}:
            return f"was stuck: it answered {self._reporters()}, but did not do its part"
        parts = [
            f"{words} {self._reporters(kind)}"
            for kind, words in _IN_WORDS.items()
            if kind in self.kinds
        ]
        return ", ".join([*parts, "and gave no sign of life"])

    def _reporters(self, of: SuspicionKind | None = None) -> str:
        """Return the names of those that suspect it, of one thing or of any."""
        return ", ".join(
            sorted(by[0] for by, kinds in self.suspicions.items() if of in {None, *kinds})
        )


# Instructions: what the detector asks for.


@dataclass(frozen=True, slots=True)
class Probe:
    """Look for a sign of life: ask the node, dial it, let ``members`` ping it."""

    suspected: Life
    members: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a reporter to say at once if it has heard the suspect meanwhile."""

    reporter: Life
    suspected: Life


@dataclass(frozen=True, slots=True)
class Cleared:
    """Tell a reporter that the node lives, and how long it may be silent from now on."""

    reporter: Life
    suspected: Life
    patience: float


@dataclass(frozen=True, slots=True)
class Evict:
    """End these lives, all at once; each with the way in which it was found dead.

    Attributes:
        is_refused: they refuse connections here and at a reporter. This replica has not reached
            them before, so it is no proof, but it is more than silence.
    """

    lives: Mapping[Life, str]
    is_proven: bool
    is_refused: bool = False


Instruction = Probe | Ask | Cleared | Evict
