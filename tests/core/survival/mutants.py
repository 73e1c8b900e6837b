"""The rules of the agreement, each switched off: the search has to find what it was there for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from allfold_core.errors import PeerLost
from allfold_core.survival import decision
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.group_ops import OpEntry
from allfold_core.survival.instructions import (
    Instruction,
    Instructions,
    Release,
    SendClosing,
    SendReport,
)
from allfold_core.survival.judge import packed
from allfold_core.survival.leader_machine import Freeze, LeaderMachine
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Forward,
    Install,
    OpReport,
    OpState,
    Outcome,
    Report,
    Run,
    Wishes,
    is_replicated,
)
from allfold_core.survival.round_evidence import Evidence
from allfold_core.topology import Layout
from tests.core.survival.scenario import FAITHFUL, Mutant
from tests.core.survival.scenarios import DEEP, SCENARIOS
from tests.core.survival.search import explore, walk
from tests.support.policies import changed
from tests.support.state_search import Found

Round = decision._Round
"""The decision of one round, whose rules are replaced one by one."""


class ClaimsWhileFrozen(AgentMachine):
    def _advance(self, seq: int, entry: OpEntry) -> Instructions:
        frozen, self.frozen = self.frozen, False
        done = super()._advance(seq, entry)
        self.frozen = frozen
        return done


class FetchesWhileFrozen(AgentMachine):
    def fetched(self, seq: int, stamp: Stamp) -> Instructions:
        frozen, self.frozen = self.frozen, False
        done = super().fetched(seq, stamp)
        self.frozen = frozen
        return done


class ClosesWhileFrozen(AgentMachine):
    def completed(self, seq: int, stamp: Stamp, floor: int = -1) -> Instructions:
        done = super().completed(seq, stamp, floor)
        entry = self.ops.get(seq)
        if self.frozen and entry is not None and entry.complete and self._must_close(entry):
            done.append(SendClosing(seq))
        return done


class TakesAnyInstall(AgentMachine):
    def install(self, install: Install) -> Instructions:
        if self.frozen and install.term == self.term.number:
            self.round = install.round
        return super().install(install)


class ForgetsErrors(AgentMachine):
    """Keeps an error until its own node has the outcome, and not until all nodes have it."""

    def _forget(self) -> None:
        failed = [k for k, each in self.ops.items() if each.state is OpState.FAILED]
        for seq in failed:
            if seq <= self._reached:
                del self.ops[seq]
        super()._forget()


class ForgetsErrorsBeforeTheCall(AgentMachine):
    def _forget(self) -> None:
        for seq in [seq for seq in self.ops if seq <= self.floor]:
            del self.ops[seq]
        super()._forget()


class ReleasesAlone(AgentMachine):
    """Drops its copy of a result once its own node is done with it."""

    def _settle(self) -> Instructions:
        done = super()._settle()
        if not self.frozen and self.floor < self.watermark:
            self.floor = self.watermark
            self._forget()
            done.append(Release(self.floor))
        return done


class ForgetsWhatItHasPassed(AgentMachine):
    """Ranks that join may have a part in an op that went on without their node."""

    def _report(self, number: int) -> Instructions:
        (sent,) = super()._report(number)
        assert isinstance(sent, SendReport)
        return [SendReport(replace(sent.report, passed=-1))]


class AwaitsItsFormerLife(AgentMachine):
    """A node that was left out, and came back, takes part in what its ranks of then had begun."""

    def _ours(self, epoch: Epoch) -> frozenset[str]:
        return epoch.sessions_on(self.node)


class WaitsForOpsOfOthers(AgentMachine):
    """A node does not pass the ops that are final everywhere, and in which it has no part."""

    def _is_over(self, seq: int) -> bool:
        entry = self.ops.get(seq)
        return entry.is_final if entry else seq in self._passed


class KeepsWhatNobodyTakes(AgentMachine):
    """Ops that dead ranks have called stay open, though others have the result."""

    def _drop_what_is_over(self) -> Iterator[Instruction]:
        return iter(())


class NeverCloses(AgentMachine):
    def _must_close(self, entry: OpEntry) -> bool:
        return False


class IgnoresMinWorld(AgentMachine):
    def __init__(self, node: str, policy: GroupPolicy, term: Term, epoch: Epoch) -> None:
        super().__init__(node, changed(policy, min_world=1), term, epoch)


class BeginsWithoutTheRoot(AgentMachine):
    def _may_begin(self, entry: OpEntry, epoch: Epoch) -> bool:
        calls = entry.calls.values()
        return super()._may_begin(entry, epoch) or any(
            call.root and call.root not in epoch.sessions for call in calls
        )


class ForgetsCallsInPlace(AgentMachine):
    """An op still waits for the rank."""

    def _stand_in(
        self, seq: int, entry: OpEntry, absent: frozenset[str], call: Call
    ) -> Iterator[Instruction]:
        called = dict(entry.calls)
        yield from super()._stand_in(seq, entry, absent, call)
        entry.calls = called


class CallsInPlaceOfAll(AgentMachine):
    """Also of a rank that has called since the report."""

    def _stand_in(
        self, seq: int, entry: OpEntry, absent: frozenset[str], call: Call
    ) -> Iterator[Instruction]:
        meanwhile = {s: entry.calls.pop(s) for s in absent & entry.calls.keys()}
        yield from super()._stand_in(seq, entry, absent, call)
        entry.calls |= meanwhile


class StaysForTheNextBoundary(AgentMachine):
    """Its ranks stay at a boundary while there is any, and not while it is the one they came to."""

    def _leave_boundary(self) -> Instructions:
        return [] if self.epoch.boundary else super()._leave_boundary()


class OldViewsFit(GroupPolicy):
    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        return super().is_stale(call, epoch) and call.view > epoch.ordinal


class NewerViewsFit(GroupPolicy):
    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        return super().is_stale(call, epoch) and call.view < epoch.ordinal


class MajorityDecides(LeaderMachine):
    @property
    def missing(self) -> tuple[str, ...]:
        missing = super().missing
        return missing if len(missing) * 2 >= len(self.term.voters) else ()


class ForgetsDeathsWhileGathering(LeaderMachine):
    def down(self, dead: Mapping[str, str]) -> list[Freeze]:
        return [] if self.gathering else super().down(dead)


class ForgetsQuorums(LeaderMachine):
    """An op need not wait in one round, and has to in the next."""

    def report(self, report: Report) -> list[Install | Freeze]:
        made = super().report(report)
        if made:
            self._unwaited = {}
        return made


class ForgetsWishesWhileGathering(LeaderMachine):
    def wish(self, node: str, wishes: Wishes) -> list[Freeze]:
        return [] if self.gathering else super().wish(node, wishes)


def never_comes_back(self: Term, node: str, older: Term) -> bool:
    return False


def right_after_the_floor(self: Evidence, _: object) -> int:
    return self.floor + 1


def nothing(*_: object) -> None:
    """The rule never applies."""


def forward_if_all_held(
    self: Any, seq: int, newest: Epoch, said: Mapping[str, OpReport]
) -> Outcome | None:
    """Of partitioned kinds the dead are asked, too."""
    outcome: Outcome | None = REAL_FORWARD(self, seq, newest, said)
    if isinstance(outcome, Forward):
        kind = next(iter(said[outcome.holders[0]].calls.values())).kind
        nodes = self.evidence.known[outcome.stamp].nodes
        if not is_replicated(kind) and not nodes <= set(outcome.holders):
            return None
    return outcome


def judge_first(self: Any, seq: int) -> Outcome | None:
    """A verdict comes before a result."""
    judged: Outcome | None = self._judged(seq, self.epoch)
    if judged is not None:
        return judged
    outcome: Outcome | None = REAL_OUTCOME(self, seq)
    return outcome


def viable_with_the_dead(self: Any, epoch: Epoch, said: Mapping[str, OpReport]) -> bool:
    return epoch.nodes.issubset(self.evidence.reports)


def begins_anew(self: Any, seq: int, epoch: Epoch, said: Mapping[str, OpReport]) -> Outcome:
    """Ops that have begun move to the newest epoch, too."""
    outcome: Outcome = REAL_GO_ON(self, seq, epoch, said)
    return Run(self.epoch.stamp) if isinstance(outcome, Run) else outcome


def with_the_old_stamp(
    self: Any, stamp: Stamp, layout: Layout | None, waiting: tuple[str, ...]
) -> Epoch:
    epoch: Epoch = REAL_EPOCH(self, stamp, layout, waiting)
    return epoch if self.has_lost else replace(epoch, stamp=self.base.stamp)


def with_a_new_ordinal(
    self: Any, stamp: Stamp, layout: Layout | None, waiting: tuple[str, ...]
) -> Epoch:
    epoch: Epoch = REAL_EPOCH(self, stamp, layout, waiting)
    if self.has_lost or epoch is self.base:
        return epoch
    return replace(epoch, ordinal=epoch.ordinal + 1, change=packed(PeerLost("nobody")))


def lowest_floor(self: Any) -> int:
    """Ops above the lowest floor are decided, and not above the highest."""
    floor: int = min(report.floor for report in self.reports.values())
    return floor


def wait_for_all(self: Any, seq: int, outcome: Outcome | None) -> Outcome | None:
    return outcome


def no_beginners(self: Any, seq: int) -> frozenset[str]:
    return frozenset()


def count_the_lost(self: Any, seq: int, outcome: Outcome | None) -> Outcome | None:
    """Who has called counts, though it is lost and its input with it."""
    if not isinstance(outcome, Run) or seq not in self.evidence.quorums:
        return outcome
    calls = {s: call for r in self.evidence.of(seq).values() for s, call in r.calls.items()}
    call = next(iter(calls.values()), None)
    if call is None or len(calls) < call.fingerprint.quorum.ranks:
        return outcome
    sessions = {**self.evidence.known, **self.known}[outcome.stamp].sessions
    return replace(outcome, absent=sessions.difference(calls), call=call)


REAL_EPOCH = Evidence.epoch_without_the_lost
REAL_FORWARD, REAL_OUTCOME, REAL_GO_ON = Round._go_forward, Round.outcome, Round._go_on
held_is_final = property(lambda entry: entry.state is not OpState.OPEN)


@dataclass(frozen=True)
class Case:
    """A mutant, and the scenario that catches it soonest.

    Attributes:
        changes: of modules and classes: what, the name in it, and what is there instead.
        seed: of walks; 0 for breadth-first.
    """

    scenario: str
    mutant: Mutant = FAITHFUL
    changes: tuple[tuple[object, str, object], ...] = ()
    seed: int = 0

    def search(self, most: int) -> Found:
        """Search the scenario with this mutant."""
        scenario = BY_NAME[self.scenario]
        with ExitStack() as stack:
            for target, name, instead in self.changes:
                stack.enter_context(patch.object(target, name, instead, create=True))
            if self.seed:
                return walk(scenario, most, self.seed, self.mutant)
            return explore(scenario, most, self.mutant)


def of_agent(scenario: str, agent: type[AgentMachine]) -> Case:
    return Case(scenario, Mutant(agent=agent))


def of_leader(scenario: str, leader: type[LeaderMachine]) -> Case:
    return Case(scenario, Mutant(leader=leader))


def of_decision(scenario: str, target: object, name: str, instead: object) -> Case:
    return Case(scenario, changes=((target, name, instead),))


BY_NAME = {each.name: each for each in SCENARIOS + DEEP}
SUM, PARTS = "one all-reduce, crash", "one reduce-scatter, crash"
LATE = "one late all-reduce, verdict, crash"
JUDGED = "one all-reduce, verdict, false suspicion"
ORDER = "another order, raise"
BACK_AGAIN = "a node is evicted, and joins again"
EMPTY = "a node without ranks has one again, before an op that others have called"
RECALL = "one all-reduce, record lost, false suspicions"
# Two rules are not here, as they need nodes that join and long ways: the grace after the loss of
# the record, and that a node whose term has no voter in common with the record's is out. As long
# as nobody joins, every living node of a newer term is a voter of each older one, which therefore
# waits for its report. ``Mutant.grace`` and ``Mutant.strangers_are_out`` switch them off.
CASES = {
    "frozen agents claim": of_agent(SUM, ClaimsWhileFrozen),
    "frozen agents take fetched results": Case(
        "one late broadcast, rank dies, false suspicion", Mutant(agent=FetchesWhileFrozen), seed=4
    ),
    "frozen agents close": of_agent(PARTS, ClosesWhileFrozen),
    "any INSTALL counts": of_agent("two rounds", TakesAnyInstall),
    "errors are forgotten before others know them": of_agent(LATE, ForgetsErrors),
    "errors are forgotten before the call": of_agent("two rounds", ForgetsErrorsBeforeTheCall),
    "copies go too early": of_agent(SUM, ReleasesAlone),
    "partitioned kinds do not close": of_agent(PARTS, NeverCloses),
    "held parts are final": of_decision(PARTS, OpEntry, "is_final", held_is_final),
    "min_world is forgotten": of_agent("fewer than min_world", IgnoresMinWorld),
    "the root may be lost": of_agent("the root is lost before the call", BeginsWithoutTheRoot),
    "the leader forgets that the root is lost": of_decision(
        "the root is lost, and a call in advance", Round, "_without_root", nothing
    ),
    "old views fit": Case("old views, raise", Mutant(policy=OldViewsFit)),
    "newer views fit": Case("a view newer than the op", Mutant(policy=NewerViewsFit)),
    "a majority decides": of_leader(LATE, MajorityDecides),
    "deaths are forgotten": of_leader("two ranks die", ForgetsDeathsWhileGathering),
    "wishes are forgotten": of_leader("a node joins", ForgetsWishesWhileGathering),
    "a node that was left out goes on": Case(
        BACK_AGAIN, changes=((Term, "has_come_back", never_comes_back),), seed=1
    ),
    "newcomers have a part in what has begun": of_decision(
        "a node joins", Evidence, "first_untouched", right_after_the_floor
    ),
    "what went on without a node is forgotten": of_agent(EMPTY, ForgetsWhatItHasPassed),
    "what ranks of a former life have begun is awaited": Case(
        "deep: joins, min_world", Mutant(agent=AwaitsItsFormerLife), seed=3
    ),
    "what is final on all others is awaited": Case(
        "deep: joins, all kinds", Mutant(agent=WaitsForOpsOfOthers), seed=1
    ),
    "what dead ranks have called is awaited": Case(
        "deep: joins", Mutant(agent=KeepsWhatNobodyTakes), seed=1
    ),
    "the end of a boundary is missed": Case(
        "deep: commits", Mutant(agent=StaysForTheNextBoundary), seed=7
    ),
    "quorums are forgotten": of_leader("quorum, a silent rank", ForgetsQuorums),
    "all are waited for": of_decision(
        "quorum, a silent rank", Round, "_without_the_late", wait_for_all
    ),
    "the lost count": of_decision(
        "quorum, rank dies before anybody starts", Round, "_without_the_late", count_the_lost
    ),
    "newcomers are not waited for": of_decision(
        "quorum, a rank joins at a commit, rank dies", Epoch, "beginners", no_beginners
    ),
    "calls in place do not count": of_agent("quorum, a silent rank", ForgetsCallsInPlace),
    "ranks that have called are called in place of": of_agent(
        "quorum, a late rank", CallsInPlaceOfAll
    ),
    "errors are not adopted": of_decision(LATE, decision, "_adopt_error", nothing),
    "results do not go forward": of_decision(SUM, Round, "_go_forward", nothing),
    "one part serves all": of_decision(PARTS, OpReport, "serves_all", property(bool)),
    "the dead are asked": of_decision(PARTS, Round, "_go_forward", forward_if_all_held),
    "verdicts come first": of_decision(JUDGED, Round, "outcome", judge_first),
    "the dead need not have called": of_decision(
        "two ranks die", Round, "_is_viable", viable_with_the_dead
    ),
    "ops below the highest floor are decided": of_decision(
        "floors that differ", Evidence, "floor", property(lowest_floor)
    ),
    "another order lets ops begin anew": of_decision(ORDER, Round, "_go_on", begins_anew),
    "another order has the old stamp": of_decision(
        ORDER, Evidence, "epoch_without_the_lost", with_the_old_stamp
    ),
    "another order is another membership": of_decision(
        "a late all-gather, another order",
        Evidence,
        "epoch_without_the_lost",
        with_a_new_ordinal,
    ),
    "no compare-and-set": Case(RECALL, Mutant(compare_and_set=False)),
    "silence evicts in recall": Case(RECALL, Mutant(recalled_evicts_no_silent=False)),
    "old announcements count": Case(RECALL, Mutant(generation=False)),
    "to be out is no proof": Case(
        "one late all-reduce, record lost, false suspicion", Mutant(out_is_proof=False)
    ),
    "siblings do not meet": Case(
        "one late all-reduce, record lost, false suspicion, crash",
        Mutant(siblings_meet=False),
        seed=8,
    ),
}
