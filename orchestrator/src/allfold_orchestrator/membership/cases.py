"""What the jury has open: accusations, silent links, and the patience they have led to. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from allfold_core.survival.suspicion import CLEARED_SECONDS
from allfold_orchestrator.membership.group_state import Life

ASK_AHEAD_SECONDS = 0.15
"""An accuser is asked so long before its charge is decided: it pings once more, and answers."""


class Charge(Enum):
    """What an agent accuses another one of."""

    REFUSED = "refused"
    SILENT = "silent"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True)
class Granted:
    """How long accusers wait for a node that was accused, and lives.

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
        is_asked: the accuser was asked if it still hears nothing.
    """

    is_asked: bool = False

    @property
    def due(self) -> float:
        """Return when there is something to do."""
        return self.until if self.is_asked else self.until - ASK_AHEAD_SECONDS


@dataclass(slots=True)
class Case(Open):
    """The accusations of one life that are not decided yet; without accusers it is our own."""

    charges: dict[Life, Charge] = field(default_factory=dict)
    link_ended: bool = False
    dial_refused: bool = False

    @property
    def is_refused_twice(self) -> bool:
        """True if a second path confirms what this replica found itself."""
        confirmed = self.link_ended or Charge.REFUSED in self.charges.values()
        return self.dial_refused and confirmed

    @property
    def is_refused_to_all(self) -> bool:
        """True if those who were linked to the node are refused now, as this replica is."""
        return self.dial_refused and Charge.REFUSED in self.charges.values()

    @property
    def is_charged(self) -> bool:
        """True while there is a reason to ask whether the node lives."""
        return bool(self.charges) or self.link_ended

    @property
    def is_stuck(self) -> bool:
        return Charge.STUCK in self.charges.values()
