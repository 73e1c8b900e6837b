"""The decision of a round: one membership, and one outcome for every open op. Pure.

The rules are those of the protocol's model (``tests/core/survival``), in the order in which they
apply to an op:

1. A node reports that it has failed: the same error everywhere.
2. A node has the result, and a copy of it serves all (all-reduce, all-gather, broadcast, barrier),
   or every node that is left has its own part of it: the op has succeeded.
3. A call was made for another membership: the error of the change between the two.
4. It is judged, because somebody doubts it or its calls do not fit together: an error.
5. Every rank whose input it needs is alive, or has called it before dying: it goes on.
6. The remaining ranks can do it: they run it again, from their unchanged inputs.
7. In any other case: an error that says which ranks were lost.

An op that goes on or is run again, and that a quorum has called, does not wait for the others, but
for newcomers whose first op it is. That changes no rule: their nodes call it in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.survival.admission import possible_change, waiting_sessions, with_others_awaited
from allfold_core.survival.judge import (
    below_min_world,
    cannot_go_on,
    packed,
    root_lost_before,
    unpacked,
)
from allfold_core.survival.plans import GroupPolicy
from allfold_core.survival.records import NO_EPOCH, Epoch, Stamp, Term
from allfold_core.survival.reports import (
    NO_LANE,
    NO_WISHES,
    Call,
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Outcome,
    Reason,
    Report,
    Run,
    Wishes,
    may_shrink,
)
from allfold_core.survival.round_evidence import Evidence, Judge, lost_seats
from allfold_core.topology import Layout

# How many ops ranks may call between the report of their node and the decision. A rank that calls
# more makes its node withdraw the wish.
_MARGIN = 8


def is_wished(epoch: Epoch, wishes: Mapping[str, Wishes]) -> bool:
    """Return True if all nodes that have ranks are ready for the lane."""
    return bool(epoch.nodes) and all(wishes.get(n, NO_WISHES).lane for n in epoch.nodes)


def first_in_lane(
    before: Epoch, epoch: Epoch, reports: Mapping[str, Report], outcomes: Mapping[int, Outcome]
) -> int:
    """Return the first op that goes by the lane after a round; :data:`NO_LANE` if none does.

    Args:
        before: the epoch before the round.
        epoch: the current epoch after it.
    """
    wishes = {node: report.wishes for node, report in reports.items()}
    if epoch.ordinal != before.ordinal or epoch.waiting or not is_wished(epoch, wishes):
        return NO_LANE
    called = (seq for report in reports.values() for seq in report.called.values())
    return max((-1, *called, *outcomes)) + 1 + _MARGIN


class ProtocolViolation(Exception):
    """Reports that no correct run can produce."""


def decide(
    policy: GroupPolicy,
    term: Term,
    number: int,
    reports: Mapping[str, Report],
    doubts: Mapping[int, Doubt],
    judge: Judge,
    layout: Layout | None = None,
    quorums: frozenset[int] = frozenset(),
) -> Install:
    """Return the decision of a round.

    Args:
        term: whose round it is.
        number: of the round.
        reports: of every voter of the term.
        doubts: of ops that are to be judged, by number.
        layout: the order of nodes from now on, for ops that nobody has started; ``None`` keeps it.
        quorums: the ops that need not wait for all ranks any more.
    """
    base = max((report.epoch for report in reports.values()), key=lambda epoch: epoch.stamp)
    dead = {session: how for report in reports.values() for session, how in report.dead.items()}
    stamp = Stamp(term.number, number, term.generation)
    if base == NO_EPOCH:
        return _end(policy, stamp, dead)
    wishes = {node: report.wishes for node, report in reports.items()}
    change = possible_change(policy, term, base, wishes, dead)
    evidence = Evidence(policy, term, base, dead, reports, doubts, judge, quorums)
    if evidence.has_lost:
        change = None  # a round that has lost ranks admits nobody
    waiting = base.waiting if change else waiting_sessions(policy, term, base, wishes, dead)
    epoch = evidence.epoch_without_the_lost(stamp, None if change else layout, waiting)
    round_ = _Round(evidence, epoch)
    outcomes = round_.outcomes()
    if round_.left_behind:
        epoch, reduced = evidence.epochs_of_attempts(round_.left_behind, epoch, stamp)
        round_ = _Round(evidence, epoch, reduced)
        outcomes = round_.outcomes()
    elif change is not None:
        first = max(change.at_boundary, evidence.first_untouched(outcomes))
        epoch = with_others_awaited(policy, change.apply(policy, base, stamp, first))
        epoch = epoch if layout is None else replace(epoch, layout=layout)
        round_ = _Round(evidence, epoch)
        outcomes = {seq: each for seq, each in outcomes.items() if seq < first}
        outcomes = round_.outcomes() | outcomes
    known = {**evidence.known, **round_.known}
    older = tuple(each for each in _named(outcomes, known) if each != epoch)
    floor, gone = evidence.floor, frozenset(dead)
    lane = first_in_lane(base, epoch, reports, outcomes)
    return Install(term.number, number, epoch, older, floor, outcomes, gone, lane)


def _end(policy: GroupPolicy, stamp: Stamp, dead: Collection[str]) -> Install:
    """Return the end of a group if all nodes that are left were still joining it."""
    why = PeerLost(f"group '{policy.group}' has lost all its ranks before others could join it")
    epoch = Epoch(stamp, 1, (), packed(why))
    return Install(stamp.term, stamp.round, epoch, (), -1, {}, frozenset(dead))


def _named(outcomes: Mapping[int, Outcome], known: Mapping[Stamp, Epoch]) -> Iterator[Epoch]:
    """The epochs in which ops are run or have a result, or that ranks enter with an error.

    A node may have missed the round that made one of them.
    """
    stamps = {each.stamp for each in outcomes.values() if not isinstance(each, Fail)}
    ordinals = {each.ordinal for each in outcomes.values() if isinstance(each, Fail)}
    for stamp in sorted(known):
        if stamp in stamps or known[stamp].ordinal in ordinals:
            yield known[stamp]


@dataclass(frozen=True)
class _Round:
    """The rules by which each op gets its outcome.

    Attributes:
        epoch: the current epoch after the round.
        reduced: by the epoch of their last attempt, the epoch in which ops are run again that
            began before ranks joined; all others are run in the current one.
        left_behind: the epochs of attempts that ``reduced`` still lacks.
    """

    evidence: Evidence
    epoch: Epoch
    reduced: Mapping[Stamp, Epoch] = field(default_factory=dict)
    left_behind: set[Stamp] = field(default_factory=set)

    @property
    def known(self) -> dict[Stamp, Epoch]:
        """The epochs that the round has made."""
        return {each.stamp: each for each in (*self.reduced.values(), self.epoch)}

    def outcomes(self) -> dict[int, Outcome]:
        """Return the outcomes of all ops."""
        evidence = self.evidence
        found = {
            seq: self._without_the_late(seq, self.outcome(seq)) for seq in evidence.seqs(self.epoch)
        }
        outcomes = {seq: outcome for seq, outcome in found.items() if outcome is not None}
        for seq in sorted(evidence.doubts.keys() - outcomes.keys()):
            # A doubted op that no rank has called, or could call.
            if seq > evidence.floor and (failed := self._judged(seq, self.epoch)) is not None:
                outcomes[seq] = failed
        return outcomes

    def _without_the_late(self, seq: int, outcome: Outcome | None) -> Outcome | None:
        """Return the outcome of an op that a quorum has called, so that it waits for no other rank.

        It does wait for newcomers whose first op it is: until they call it they may pull the state
        of the others, who change it as soon as the op is done. If one dies, the round of its death
        has it not among the ranks any more.

        A call in place of a rank counts as the rank's.
        """
        if not isinstance(outcome, Run) or seq not in self.evidence.quorums:
            return outcome
        epoch = {**self.evidence.known, **self.known}[outcome.stamp]
        calls = {s: call for r in self.evidence.of(seq).values() for s, call in r.calls.items()}
        called = sorted(calls.keys() & epoch.sessions)
        if not called or len(called) < calls[called[0]].fingerprint.quorum.ranks:
            return outcome
        if not epoch.beginners(seq) <= calls.keys():
            return outcome
        return replace(outcome, absent=epoch.sessions.difference(called), call=calls[called[0]])

    def outcome(self, seq: int) -> Outcome | None:
        """Return the outcome of an op that some node reports; ``None`` where it has to wait."""
        said = self.evidence.of(seq)
        attempt = _newest_attempt(said)
        if attempt:
            epoch = self.evidence.known[attempt]
        elif seq < self.epoch.first_op_of_all:
            epoch = self.evidence.epoch_before(seq)
        else:
            epoch = self.epoch
        return (
            _adopt_error(seq, said)
            or self._go_forward(seq, epoch, said)
            or self._of_other_view(epoch, said)
            or self._judged(seq, epoch)
            or self._without_root(seq, epoch, said)
            or (self._go_on(seq, epoch, said) if attempt else self._begin(seq, epoch))
        )

    def _go_forward(self, seq: int, newest: Epoch, said: Mapping[str, OpReport]) -> Outcome | None:
        held = {n: r for n, r in said.items() if r.state in (OpState.HELD, OpState.HANDED)}
        if not held:
            return None
        calls = _calls(held, newest)
        if not all(report.serves_all for report in held.values()):
            return self._go_forward_with_parts(seq, newest, held)
        stamps = {report.stamp for report in held.values()}
        (stamp,) = stamps if len(stamps) == 1 else (None,)
        if stamp is None or not calls:
            raise ProtocolViolation(f"op {seq} has results of several epochs: {said}")
        return self._forward(stamp, held)

    def _go_forward_with_parts(
        self, seq: int, newest: Epoch, held: Mapping[str, OpReport]
    ) -> Outcome | None:
        # A node that sends and gets nothing may hold its part of an attempt that all have given up.
        parts = {node: r for node, r in held.items() if r.stamp == newest.stamp}
        if self.evidence.members_of(newest) <= parts.keys():
            return self._forward(newest.stamp, parts)
        if any(report.state is OpState.HANDED for report in held.values()):
            raise ProtocolViolation(f"op {seq} was handed out, and others cannot get it: {held}")
        return None

    def _forward(self, stamp: Stamp, held: Mapping[str, OpReport]) -> Forward:
        return Forward(stamp, tuple(node for node in self.evidence.term.voters if node in held))

    def _of_other_view(self, epoch: Epoch, said: Mapping[str, OpReport]) -> Fail | None:
        calls = _calls(said, epoch)
        if not any(self.evidence.policy.is_stale(call, epoch) for call in calls):
            return None
        is_old = any(call.view < epoch.ordinal for call in calls)
        return Fail((epoch if is_old else self.epoch).change, self.epoch.ordinal)

    def _judged(self, seq: int, epoch: Epoch) -> Fail | None:
        doubt = self.evidence.doubts.get(seq)
        if doubt is not None and doubt.stamp not in (None, epoch.stamp):
            doubt = None  # that attempt was given up, and the newest one may do better
        if doubt is not None and doubt.reason is Reason.DEADLINE and self._is_too_small(epoch):
            return self._fail(self._too_small(seq, len(epoch.seats)))
        error = self.evidence.judge(seq, epoch, self.evidence.reports, doubt)
        return self._fail(error) if error else None

    def _without_root(self, seq: int, epoch: Epoch, said: Mapping[str, OpReport]) -> Fail | None:
        """The error of an op whose root was lost before the op began."""
        roots = {call.root: call for call in _calls(said, epoch) if call.root}
        gone = next((call for root, call in roots.items() if root not in epoch.sessions), None)
        if gone is None:
            return None
        if gone.root in self.evidence.base.sessions:
            return self._fail(self._loss(seq, gone, self.evidence.base))
        change = unpacked(self.epoch.change)
        return self._fail(root_lost_before(self.evidence.policy.group, seq, gone, change))

    def _go_on(self, seq: int, epoch: Epoch, said: Mapping[str, OpReport]) -> Outcome:
        """The outcome of an op that has been started in an epoch."""
        call = next(iter(_calls(said, epoch)), None)
        if self._is_viable(epoch, said):
            return Run(epoch.stamp)
        if not self.evidence.policy.options.shrinks or call is None or not self._can_shrink(call):
            return self._fail(self._loss(seq, call, epoch))
        return self._run_with_those_left(seq, epoch)

    def _run_with_those_left(self, seq: int, attempt: Epoch) -> Outcome:
        left = self.evidence.remaining(attempt)
        if len(left) < self.evidence.policy.options.min_world:
            return self._fail(self._too_small(seq, len(left)))
        if left == self.epoch.seats:
            return Run(self.epoch.stamp)
        if attempt.stamp in self.reduced:
            return Run(self.reduced[attempt.stamp].stamp)
        self.left_behind.add(attempt.stamp)
        return self._fail(self._loss(seq, None, attempt))

    def _begin(self, seq: int, epoch: Epoch) -> Outcome | None:
        """Return the outcome of an op that nobody has started.

        If too few ranks are left, the op may wait for others to join, and run in a later epoch.

        Args:
            epoch: the epoch whose ranks have a part in it.
        """
        evidence = self.evidence
        if epoch is not self.epoch:
            is_whole = evidence.remaining(epoch) == epoch.seats and not self._is_too_small(epoch)
            return Run(epoch.stamp) if is_whole else self._run_with_those_left(seq, epoch)
        if not self._is_too_small(self.epoch):
            return Run(self.epoch.stamp)
        if evidence.policy.waits_in_ops(self.epoch) and not evidence.has_lost:
            return None
        return self._fail(self._too_small(seq, len(self.epoch.seats)))

    def _is_too_small(self, epoch: Epoch) -> bool:
        return self.evidence.policy.is_too_small(epoch)

    def _too_small(self, seq: int, left: int) -> AllfoldError:
        policy = self.evidence.policy
        return below_min_world(policy.group, seq, left, policy.options.min_world, self.epoch.change)

    def _is_viable(self, epoch: Epoch, said: Mapping[str, OpReport]) -> bool:
        """Return True if every input of an epoch's op is here.

        The input of a dead rank is here if that rank has called: its agent has mapped its memory.
        """
        members = self.evidence.members_of(epoch)
        return all(
            seat.node in members
            and (
                seat.session not in self.evidence.dead
                or (seat.node in said and seat.session in said[seat.node].calls)
            )
            for seat in epoch.seats
        )

    def _can_shrink(self, call: Call) -> bool:
        return may_shrink(call.kind) and (not call.root or call.root in self.epoch.sessions)

    def _loss(self, seq: int, call: Call | None, epoch: Epoch) -> AllfoldError:
        evidence = self.evidence
        gone = lost_seats(epoch, evidence.term, evidence.dead)
        left = len(evidence.remaining(epoch))
        return cannot_go_on(evidence.policy.group, seq, call, epoch, gone, left)

    def _fail(self, error: AllfoldError) -> Fail:
        return Fail(packed(error), self.epoch.ordinal)


def _adopt_error(seq: int, said: Mapping[str, OpReport]) -> Fail | None:
    failed = [report for report in said.values() if report.state is OpState.FAILED]
    if not failed:
        return None
    if any(report.state is OpState.HANDED for report in said.values()):
        raise ProtocolViolation(f"op {seq} has failed on one node and was handed out: {said}")
    return Fail(failed[0].error, failed[0].ordinal)


def _newest_attempt(said: Mapping[str, OpReport]) -> Stamp | None:
    return max((r.stamp for r in said.values() if r.stamp is not None), default=None)


def _calls(said: Mapping[str, OpReport], epoch: Epoch) -> list[Call]:
    """The calls of the members of an epoch. Those of a rank that is not in it bind nobody."""
    return [
        call
        for report in said.values()
        for session, call in report.calls.items()
        if session in epoch.sessions
    ]
