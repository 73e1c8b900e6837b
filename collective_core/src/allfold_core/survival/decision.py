"""The decision of a round: one membership, and one outcome for every open op. Pure.

The rules are those of the protocol's model (``tests/core/survival``), in the order in which they
apply to an op:

1. A node reports that it has failed: the same error everywhere.
2. A node has the result, and a copy of it serves all (all-reduce, all-gather, broadcast, barrier),
   or every node that is left has its own part of it: the op has succeeded.
3. A call relies on another membership: the error that tells of the loss between them.
4. It is judged, because somebody doubts it or its calls do not fit together: an error.
5. Everybody whose input it needs is here, or has called it before dying: it goes on.
6. It can be done by those who are left: it is run again with them, from inputs that are untouched.
7. An error that says who was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from allfold_core.errors import AllfoldError
from allfold_core.plan import Layout
from allfold_core.survival.losses import (
    NODE_LOST,
    below_min_world,
    cannot_go_on,
    describe_loss,
    packed,
    root_lost_before,
    unpacked,
)
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Outcome,
    Report,
    Run,
    is_replicated,
    may_shrink,
)


class ProtocolViolation(Exception):
    """Reports that no correct run can produce."""


@dataclass(frozen=True)
class GroupPolicy:
    """The terms on which all ranks of a group opened it.

    Attributes:
        group: its name.
        shrink: True if ops are run again with the ranks that are left, where that is possible.
        min_world: with fewer ranks no op is run.
    """

    group: str
    shrink: bool = False
    min_world: int = 1

    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        """Return True if a call relies on another membership than that of an epoch.

        Mostly on one from before. On a later one, where the op had begun when a member was lost,
        and went on with what that member had given. An op whose arguments do not depend on the
        membership is run all the same.
        """
        return call.view != epoch.ordinal and not (self.shrink and may_shrink(call.kind))


Judge = Callable[[int, Epoch, Mapping[str, Report], Doubt | None], AllfoldError | None]
"""Judges one op by the calls in the reports: the error, or ``None`` where it may go on."""


def decide(
    policy: GroupPolicy,
    term: Term,
    number: int,
    reports: Mapping[str, Report],
    doubts: Mapping[int, Doubt],
    judge: Judge,
    layout: Layout | None = None,
) -> Install:
    """Return the decision of a round.

    Args:
        term: whose round it is.
        number: of the round.
        reports: of every voter of the term.
        doubts: of ops that are to be judged, by number.
        layout: the order of nodes from now on, for ops that nobody has started; ``None`` keeps it.
    """
    base = max((report.epoch for report in reports.values()), key=lambda epoch: epoch.stamp)
    dead = {session: how for report in reports.values() for session, how in report.dead.items()}
    seats = base.remaining(dead, term.voters)
    stamp = Stamp(term.number, number, term.generation)
    layout = base.layout if layout is None else layout
    epoch = base
    if seats != base.seats:
        loss = describe_loss(policy.group, base, _gone(base, term, dead), len(seats))
        epoch = Epoch(stamp, base.ordinal + 1, seats, packed(loss), layout)
    elif layout != base.layout:
        epoch = replace(base, stamp=stamp, layout=layout)
    known = {each.stamp: each for r in reports.values() for each in (*r.older, r.epoch)}
    known[epoch.stamp] = epoch
    round_ = _Round(policy, term, base, epoch, known, dead, reports, doubts, judge)
    floor = max(report.floor for report in reports.values())
    seqs = {seq for report in reports.values() for seq in report.ops if seq > floor}
    outcomes = {seq: round_.outcome(seq) for seq in sorted(seqs)}
    for seq in sorted(doubts.keys() - seqs):
        if seq > floor and (failed := round_.refusal(seq)) is not None:
            outcomes[seq] = failed
    older = tuple(each for each in _named(outcomes, known) if each != epoch)
    return Install(term.number, number, epoch, older, floor, outcomes, frozenset(dead))


def _named(outcomes: Mapping[int, Outcome], known: Mapping[Stamp, Epoch]) -> Iterator[Epoch]:
    """The epochs in which ops are run or have a result, or that ranks enter with an error.

    A node may have missed the round that made one of them.
    """
    stamps = {each.stamp for each in outcomes.values() if not isinstance(each, Fail)}
    ordinals = {each.ordinal for each in outcomes.values() if isinstance(each, Fail)}
    for stamp in sorted(known):
        if stamp in stamps or known[stamp].ordinal in ordinals:
            yield known[stamp]


def _gone(epoch: Epoch, term: Term, dead: Mapping[str, str]) -> dict[Seat, str]:
    """The seats of an epoch that are lost, each with how that is known."""
    lost = dict(term.lost)
    return {
        seat: dead.get(seat.session) or lost.get(seat.node, NODE_LOST)
        for seat in epoch.seats
        if seat.session in dead or seat.node not in term.voters
    }


@dataclass(frozen=True)
class _Round:
    """The evidence of one round, and the rules by which each op gets its outcome."""

    policy: GroupPolicy
    term: Term
    base: Epoch
    epoch: Epoch
    known: Mapping[Stamp, Epoch]
    dead: Mapping[str, str]
    reports: Mapping[str, Report]
    doubts: Mapping[int, Doubt]
    judge: Judge

    def outcome(self, seq: int) -> Outcome:
        said = {node: r.ops[seq] for node, r in self.reports.items() if seq in r.ops}
        attempt = _newest_attempt(said)
        epoch = self.known[attempt] if attempt else self.epoch
        return (
            _adopt_error(seq, said)
            or self._go_forward(seq, epoch, said)
            or self._of_other_view(epoch, said)
            or self._judged(seq, epoch)
            or self._without_root(seq, epoch, said)
            or (self._go_on(seq, epoch, said) if attempt else self._run_with_those_left(seq))
        )

    def refusal(self, seq: int) -> Fail | None:
        """The outcome of a doubted op that no rank has called, or could call."""
        return self._judged(seq, self.epoch)

    def _go_forward(self, seq: int, newest: Epoch, said: Mapping[str, OpReport]) -> Outcome | None:
        held = {n: r for n, r in said.items() if r.state in (OpState.HELD, OpState.HANDED)}
        if not held:
            return None
        calls = _calls(held, newest)
        if calls and not is_replicated(calls[0].kind):
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
        if newest.nodes.intersection(self.reports) <= parts.keys():
            return self._forward(newest.stamp, parts)
        if any(report.state is OpState.HANDED for report in held.values()):
            raise ProtocolViolation(f"op {seq} was handed out, and others cannot get it: {held}")
        return None

    def _forward(self, stamp: Stamp, held: Mapping[str, OpReport]) -> Forward:
        return Forward(stamp, tuple(node for node in self.term.voters if node in held))

    def _of_other_view(self, epoch: Epoch, said: Mapping[str, OpReport]) -> Fail | None:
        calls = _calls(said, epoch)
        if not any(self.policy.is_stale(call, epoch) for call in calls):
            return None
        is_old = any(call.view < epoch.ordinal for call in calls)
        return Fail((epoch if is_old else self.epoch).loss, self.epoch.ordinal)

    def _judged(self, seq: int, epoch: Epoch) -> Fail | None:
        doubt = self.doubts.get(seq)
        if doubt is not None and doubt.stamp not in (None, epoch.stamp):
            doubt = None  # that attempt was given up, and the newest one may do better
        error = self.judge(seq, epoch, self.reports, doubt)
        return self._fail(error) if error else None

    def _without_root(self, seq: int, epoch: Epoch, said: Mapping[str, OpReport]) -> Fail | None:
        """The error of an op whose root was lost before the op began."""
        roots = {call.root: call for call in _calls(said, epoch) if call.root}
        gone = next((call for root, call in roots.items() if root not in epoch.sessions), None)
        if gone is None:
            return None
        if gone.root in self.base.sessions:
            return self._fail(self._loss(seq, gone, self.base))
        loss = unpacked(self.epoch.loss)
        return self._fail(root_lost_before(self.policy.group, seq, gone, loss))

    def _go_on(self, seq: int, epoch: Epoch, said: Mapping[str, OpReport]) -> Outcome:
        """The outcome of an op that has been started in an epoch."""
        call = next(iter(_calls(said, epoch)), None)
        if self._is_viable(epoch, said):
            return Run(epoch.stamp)
        if self.policy.shrink and call is not None and self._can_shrink(call):
            return self._run_with_those_left(seq)
        return self._fail(self._loss(seq, call, epoch))

    def _run_with_those_left(self, seq: int) -> Outcome:
        left, least = len(self.epoch.seats), self.policy.min_world
        if left < least:
            group, loss = self.policy.group, self.epoch.loss
            return self._fail(below_min_world(group, seq, left, least, loss))
        return Run(self.epoch.stamp)

    def _is_viable(self, epoch: Epoch, said: Mapping[str, OpReport]) -> bool:
        """Return True if every input of an epoch's op is here.

        That of a dead rank is, if it has called: its agent has its memory mapped.
        """
        return all(
            seat.node in self.reports
            and (
                seat.session not in self.dead
                or (seat.node in said and seat.session in said[seat.node].calls)
            )
            for seat in epoch.seats
        )

    def _can_shrink(self, call: Call) -> bool:
        return may_shrink(call.kind) and (not call.root or call.root in self.epoch.sessions)

    def _loss(self, seq: int, call: Call | None, epoch: Epoch) -> AllfoldError:
        gone = _gone(epoch, self.term, self.dead)
        return cannot_go_on(self.policy.group, seq, call, epoch, gone, len(self.epoch.seats))

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
