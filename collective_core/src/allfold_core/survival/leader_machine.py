"""The rounds of one term, on the node that leads it. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from allfold_core.survival.admission import is_due
from allfold_core.survival.decision import decide, is_wished
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import Epoch, Term
from allfold_core.survival.reports import NO_LANE, Doubt, Install, Reason, Report, Wishes
from allfold_core.survival.round_evidence import Judge
from allfold_core.topology import Layout


@dataclass(frozen=True, slots=True)
class Freeze:
    """Ask every voter of a term for a report."""

    term: int
    round: int


class LeaderMachine:
    """Gathers the reports of a term's rounds, and decides them.

    A term begins with round 0, which needs no request. Losses that are reported while a round is
    gathering are kept for the next one, so a burst of deaths costs two rounds.

    Attributes:
        term: the term that is led.
        round: the newest round.
        gathering: True while reports of that round are missing.
        reports: the reports of that round, by node.
        epoch: the current epoch, as decided last.
    """

    def __init__(
        self, policy: GroupPolicy, term: Term, epoch: Epoch, judge: Judge, *, gathering: bool
    ) -> None:
        self.policy = policy
        self.term = term
        self.round = 0
        self.gathering = gathering
        self.reports: dict[str, Report] = {}
        self.epoch = epoch
        self._wishes: dict[str, Wishes] = {}
        self._wishes_since: dict[str, Wishes] = {}  # of this round
        self._judge = judge
        self._dead: dict[str, str] = {}
        self._doubts: dict[int, Doubt] = {}
        self._later: dict[int, Doubt] = {}
        # Kept until these ops are over: a node that was asked for its next report before it got the
        # decision has not called in place of its late ranks.
        self._unwaited: dict[int, Doubt] = {}
        self._has_unwaited = False  # of which no round knows yet
        self._layout: Layout | None = None
        self._later_layout: Layout | None = None
        self._has_lane = False

    def copy(self) -> LeaderMachine:
        """Return an independent machine in the same state."""
        other = object.__new__(type(self))  # copy.copy takes three times as long
        other.__dict__.update(self.__dict__)
        other.reports = dict(self.reports)
        other._dead = dict(self._dead)
        other._doubts = dict(self._doubts)
        other._later = dict(self._later)
        other._unwaited = dict(self._unwaited)
        other._wishes = dict(self._wishes)
        other._wishes_since = dict(self._wishes_since)
        return other

    @property
    def missing(self) -> tuple[str, ...]:
        """The voters whose report the round waits for."""
        return tuple(v for v in self.term.voters if self.gathering and v not in self.reports)

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """The doubts that the newest round is to judge."""
        return tuple(self._doubts.values())

    def down(self, dead: Mapping[str, str]) -> list[Freeze]:
        """Sessions are over (DOWN)."""
        self._dead.update(dead)
        return self._begin_if_idle()

    def doubt(self, doubt: Doubt) -> list[Freeze]:
        """An op is to be judged (DOUBT), or need not wait for all ranks any more."""
        if doubt.reason is Reason.QUORUM:
            self._unwaited[doubt.seq] = doubt
            self._has_unwaited = True
            return self._begin_if_idle()
        before = self._later.get(doubt.seq)
        if before is None or _says_more(doubt, before):
            self._later[doubt.seq] = doubt
        return self._begin_if_idle()

    def wish(self, node: str, wishes: Wishes) -> list[Freeze]:
        """Ranks of a node want to join or to leave, or have come to a boundary (WISHES)."""
        self._wishes[node] = wishes
        if self.gathering:
            self._wishes_since[node] = wishes
        return self._begin_if_idle()

    def arrange(self, layout: Layout) -> list[Freeze]:
        """The nodes are to stand in another order, from the next op on that nobody has started."""
        self._later_layout = layout
        return self._begin_if_idle()

    def report(self, report: Report) -> list[Install | Freeze]:
        """A voter has reported (FROZEN); the last one makes the decision."""
        wanted = report.term.number == self.term.number and report.round == self.round
        if not (wanted and self.gathering and report.node in self.term.voters):
            return []
        self.reports[report.node] = report
        if self.missing:
            return []
        install = decide(
            self.policy,
            self.term,
            self.round,
            self.reports,
            self._doubts,
            self._judge,
            self._layout,
            frozenset(self._unwaited),
        )
        self.gathering = False
        self.epoch = install.epoch
        self._wishes = {node: each.wishes for node, each in self.reports.items()}
        self._has_lane = install.lane != NO_LANE
        if not self._has_lane:  # whoever still wishes for it says so again
            self._wishes = {n: replace(each, lane=False) for n, each in self._wishes.items()}
        self._wishes |= self._wishes_since
        self.reports, self._doubts = {}, {}
        self._unwaited = {k: each for k, each in self._unwaited.items() if k > install.floor}
        for session in install.dead:
            self._dead.pop(session, None)
        return [install, *self._begin_if_idle()]

    def _is_change_due(self) -> bool:
        if is_wished(self.epoch, self._wishes) != self._has_lane:
            return True
        return is_due(self.policy, self.term, self.epoch, self._wishes)

    def _begin_if_idle(self) -> list[Freeze]:
        news = self._dead or self._later or self._later_layout or self._has_unwaited
        if self.gathering or not (news or self._is_change_due()):
            return []
        self.round += 1
        self.gathering = True
        self._wishes_since = {}
        self._dead = {}  # whoever told of them says so in his report, too
        self._doubts, self._later = self._later, {}
        self._has_unwaited = False
        self._layout, self._later_layout = self._later_layout, None
        return [Freeze(self.term.number, self.round)]


def _says_more(doubt: Doubt, before: Doubt) -> bool:
    """Return True if a doubt of an op has to be judged rather than an earlier one."""
    if before.reason in (Reason.MISMATCH, Reason.STALE):
        return True  # the calls show it without a doubt, too
    # The attempt of the earlier one may be over; a doubt of the op itself always counts.
    return before.stamp is not None and (doubt.stamp is None or doubt.stamp > before.stamp)
