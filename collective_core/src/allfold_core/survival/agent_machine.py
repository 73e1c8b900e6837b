"""One node's part in the rounds of one group. Pure: no I/O, no clock, no threads.

A node that has reported to a round is *frozen*: until it has the decision of that round it starts
no op, treats no op as complete, hands out no result and does not raise its watermark. An op that
becomes complete meanwhile is noted, and counts afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from allfold_core.survival.decision import ProtocolViolation
from allfold_core.survival.group_ops import OpEntry
from allfold_core.survival.instructions import (
    CallInPlace,
    Cancel,
    Evicted,
    Installed,
    Instruction,
    Instructions,
    LeaveBoundary,
    OpenLane,
    Refuse,
    RefuseCalls,
    SendReport,
    SendWishes,
)
from allfold_core.survival.op_machine import OpMachine
from allfold_core.survival.records import NO_EPOCH, Epoch, Term
from allfold_core.survival.reports import (
    NO_LANE,
    Call,
    Fail,
    Forward,
    Install,
    OpState,
    Report,
    Run,
    Wishes,
)
from allfold_core.verdict import LEFT


class AgentMachine(OpMachine):
    """Takes part in the rounds of the group's terms: reports to them and carries out decisions.

    A node that joins a running group begins with :data:`NO_EPOCH` and :meth:`begin`.
    """

    def begin(self) -> Instructions:
        """Report to the term that has let this node in; it is in no epoch before the decision."""
        return self._report(0)

    def may_freeze(self, term: int, number: int) -> bool:
        """Return True if this node has to report to a round, and has not done so."""
        return not self.out and term == self.term.number and number > self.round

    def freeze(self, term: int, number: int) -> Instructions:
        """The leader asks for a report (FREEZE)."""
        return self._report(number) if self.may_freeze(term, number) else []

    # Ranks that come and go

    def join(self, session: str) -> Instructions:
        """A local rank is ready to join."""
        self.wishes = replace(self.wishes, join=(*self.wishes.join, session))
        return [] if self.out else [SendWishes(self.wishes)]

    def wish_to_leave(self, session: str) -> Instructions:
        """A local rank wants to leave at the next boundary."""
        self.wishes = replace(self.wishes, leave=(*self.wishes.leave, session))
        return [] if self.out else [SendWishes(self.wishes)]

    def wish_for_lane(self, wished: bool) -> Instructions:
        """This node is ready for the short lane, or cannot go on in it."""
        if self.out or wished is self.wishes.lane:
            return []
        self.wishes, self.has_wished = replace(self.wishes, lane=wished), True
        return [SendWishes(self.wishes)]

    def leave_lane(self) -> None:
        """The lane is closed on this node, whose next report says so."""
        self.wishes = replace(self.wishes, lane=False)

    def at_boundary(self, session: str, seq: int, boundary: int) -> Instructions:
        """A local rank has come to a boundary, and calls this op only after the boundary.

        Args:
            boundary: its number; a boundary that is over lets the rank go on at once.
        """
        if boundary != self.epoch.boundary or self._is_awaited_in(seq, session):
            return [LeaveBoundary((session,))]
        self._boundary = boundary
        self.wishes = replace(self.wishes, at_boundary={**self.wishes.at_boundary, session: seq})
        return [] if self.out else [SendWishes(self.wishes)]

    def _leave_boundary(self) -> Instructions:
        """Release the ranks at a boundary that is over; the next one may be announced already.

        A rank that others await in an op from before the boundary goes on sooner.
        """
        is_over, waiting = self.epoch.boundary != self._boundary, self.wishes.at_boundary
        on = {s: seq for s, seq in waiting.items() if is_over or self._is_awaited_in(seq, s)}
        if not on:
            return []
        staying = {s: seq for s, seq in waiting.items() if s not in on}
        self.wishes = replace(self.wishes, at_boundary=staying)
        done: Instructions = [LeaveBoundary(tuple(on))]
        return done if is_over else [*done, SendWishes(self.wishes)]

    def _is_awaited_in(self, seq: int, session: str) -> bool:
        """Return True if others run an op in an earlier epoch, and the rank has a part in it."""
        entry = self.ops.get(seq)
        if entry is None or entry.state is not OpState.OPEN or entry.stamp is None or entry.fetch:
            return False
        return entry.stamp != self.epoch.stamp and session in self._ours(self.epochs[entry.stamp])

    def _see_to_wishes(self) -> None:
        """Drop the wishes that were granted, and those of the dead."""
        wishes, here, dead = self.wishes, self.epoch.sessions, self.dead
        for session in wishes.leave:
            if session not in here:
                dead.setdefault(session, LEFT)
        self.wishes = Wishes(
            tuple(each for each in wishes.join if each not in here and each not in dead),
            tuple(each for each in wishes.leave if each in here and each not in dead),
            {each: seq for each, seq in wishes.at_boundary.items() if each in here or each in dead},
            wishes.lane,
        )

    # Rounds

    def registers(self) -> None:
        """The node reports that it holds this term, which must stay true until the answer has come.

        Also if the answer never comes: the store may have taken note.
        """
        self.registering = True

    def registered(self, generation: int) -> None:
        """The node has registered with a store: it takes no term that older ones announced."""
        self.registering = False
        self.generation = max(generation, self.generation)

    def may_take(self, term: Term, announced: int) -> bool:
        """Return True for a term that is newer and may follow the one that this node holds."""
        if self.out or self.registering or announced != self.generation:
            return False
        return term.may_follow(self.term)

    def take_term(self, term: Term, announced: int) -> Instructions:
        """The orchestrator, or another node, tells of a term (TERM): it is its round 0.

        Args:
            announced: the generation of the store that has announced it.
        """
        if not self.may_take(term, announced):
            return []
        if self.node not in term.voters or term.has_come_back(self.node, self.term):
            self.evict()
            return [Evicted(term)]
        self.term = term
        others = (each for each in term.voters if each != self.node)
        self._watermarks = {each: self._watermarks.get(each, -1) for each in others}
        self._look_who_is_awaited()
        return self._report(0)

    def evict(self) -> None:
        """The group goes on without this node, which takes part in nothing from here on."""
        self.out = True

    def _report(self, number: int) -> Instructions:
        self.round, self.frozen = number, True
        ops = {
            seq: entry.report(self._withdrawn)
            for seq, entry in self.ops.items()
            if seq > self.floor
        }
        older = tuple(each for stamp, each in self.epochs.items() if stamp != self.epoch.stamp)
        report = Report(
            self.node,
            self.term,
            number,
            self.epoch,
            older,
            dict(self.dead),
            self.floor,
            dict(self.called),
            ops,
            wishes=self.wishes,
            passed=max((self._reached, *self._passed)),
        )
        return [SendReport(report)]

    def is_frozen_for(self, install: Install) -> bool:
        """Return True if a decision is that of the very round to which this node has reported."""
        mine = (self.term.number, self.round)
        return self.frozen and not self.out and (install.term, install.round) == mine

    def install(self, install: Install) -> Instructions:
        """The decision of a round (INSTALL). It counts if this node is frozen in that very one."""
        if not self.is_frozen_for(install):
            return []
        self.frozen = False
        done: Instructions = []
        for epoch in (*install.older, install.epoch):
            self.epochs.setdefault(epoch.stamp, epoch)
        if install.epoch.stamp != self.epoch.stamp:
            self._enter(install.epoch)
            done.append(Installed(install.epoch, install.older))
        for seq, entry in self.ops.items():
            entry.forward = entry.forward or seq <= install.floor
        for seq, outcome in install.outcomes.items():
            if seq in self.ops or (seq > self._reached and self.epoch is not NO_EPOCH):
                done += self._apply(seq, outcome)
        done += self._drop_calls_of_the_lost()
        self._see_to_wishes()
        self._look_who_is_awaited()
        done += self.learn_floor(install.floor)
        for seq in sorted(self.ops):
            if seq in self.ops:
                done += self._advance(seq, self.ops[seq])
        self.wishes = replace(self.wishes, lane=install.lane != NO_LANE)
        if self.wishes.lane:
            done.append(OpenLane(install.lane))
        return done + self._settle() + self._leave_boundary()

    def _enter(self, epoch: Epoch) -> None:
        """Install another epoch.

        The ranks here have no part in ops before their first ones. Where all of them are new, that
        is behind all ops that anybody had begun.
        """
        self.epoch = epoch
        self.epochs.pop(NO_EPOCH.stamp, None)
        if self.node in epoch.nodes:
            first = min(epoch.since_of(session) for session in epoch.sessions_on(self.node))
            unfinished = (seq for seq, entry in self.ops.items() if not entry.is_final)
            self._reached = max(self._reached, min((first, *unfinished)) - 1)

    def _apply(self, seq: int, outcome: Fail | Forward | Run) -> Iterator[Instruction]:
        entry = self.ops.setdefault(seq, OpEntry())
        if isinstance(outcome, Fail):
            yield from self._fail(seq, entry, outcome)
        elif isinstance(outcome, Forward):
            yield from self._forward(seq, entry, outcome)
        elif entry.stamp != outcome.stamp or entry.fetch or entry.by_lane:
            # What nobody has begun begins in whichever epoch is current then.
            if entry.stamp is not None or outcome.stamp != self.epoch.stamp:
                yield from self._cancel(seq, entry)
                entry.stamp = outcome.stamp
            if not self._ours(self.epochs[outcome.stamp]):
                yield self._drop(seq)
                return
        if isinstance(outcome, Run) and outcome.call is not None:
            yield from self._stand_in(seq, entry, outcome.absent, outcome.call)

    def _stand_in(
        self, seq: int, entry: OpEntry, absent: frozenset[str], call: Call
    ) -> Iterator[Instruction]:
        """Call an op in place of the ranks here that it does not wait for."""
        late = absent & self._ours(self._epoch_of(entry)) - entry.calls.keys() - self.dead.keys()
        for session in sorted(late) if entry.state is OpState.OPEN else ():
            entry.calls[session] = call
            yield CallInPlace(seq, session, call)

    def _drop_calls_of_the_lost(self) -> Iterator[Instruction]:
        """Forget what a rank had called that is not in the epoch of the op.

        In its place the others may do something else: it says nothing about the kind of their op.
        """
        for seq, entry in self.ops.items():
            if entry.state is OpState.OPEN and not entry.fetch:
                gone = entry.calls.keys() - self._epoch_of(entry).sessions
                for session in gone:
                    del entry.calls[session]
                if gone:
                    yield RefuseCalls(seq, frozenset(gone))

    def _fail(self, seq: int, entry: OpEntry, outcome: Fail) -> Iterator[Instruction]:
        if entry.state is OpState.FAILED:
            return
        yield from self._cancel(seq, entry)
        entry.state, entry.error, entry.ordinal = OpState.FAILED, outcome.error, outcome.ordinal
        yield Refuse(seq, outcome.error, outcome.ordinal)

    def _forward(self, seq: int, entry: OpEntry, outcome: Forward) -> Iterator[Instruction]:
        entry.forward = True
        if entry.state is not OpState.OPEN:
            return
        if entry.stamp == outcome.stamp and entry.complete:
            return  # it became complete after the report
        yield from self._cancel(seq, entry, forward=entry.stamp == outcome.stamp)
        entry.stamp, entry.fetch, entry.forward = outcome.stamp, outcome.holders, True
        entry.is_whole = True  # else all nodes would have held their parts, and this one too
        if not self._takers(seq, entry):
            yield self._drop(seq)  # nobody is left here who could get it

    def _cancel(self, seq: int, entry: OpEntry, *, forward: bool = False) -> Iterator[Instruction]:
        """Give up an attempt, so that another one may begin from the same inputs."""
        if entry.state in (OpState.HANDED, OpState.FAILED):
            raise ProtocolViolation(f"op {seq} has an outcome, and is to get another: {entry}")
        if entry.started or entry.fetching:
            yield Cancel(seq, forward)
        entry.state = OpState.OPEN
        entry.stamp, entry.fetch = None, ()
        entry.started = entry.complete = entry.closed = entry.forward = False
        entry.fetching = entry.doubted = entry.by_lane = entry.is_whole = False
