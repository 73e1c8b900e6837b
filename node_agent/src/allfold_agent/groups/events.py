"""The events of a group: its one queue, and the decisions that follow from them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.neighbours import describe_layout
from allfold_agent.groups.outcomes import OpTable, evicted, how_lost
from allfold_agent.p2p.engine import P2PEngine
from allfold_core.errors import PeerLost
from allfold_core.plan import Plan
from allfold_core.survival import records
from allfold_core.survival.instructions import (
    CallInPlace,
    Cancel,
    Drop,
    Evicted,
    Fetch,
    HandOut,
    Installed,
    Instruction,
    LeaveBoundary,
    OpenLane,
    Refuse,
    RefuseCalls,
    Release,
    Start,
)
from allfold_core.survival.judge import unpacked
from allfold_core.survival.records import Epoch
from allfold_core.verdict import LEFT, name_ranks

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup


log = logging.getLogger(__name__)

Action = Callable[[], None]


class EventQueue:
    """Runs the events of a group with its lock held, and what follows from them, in three turns.

    ================  ====================================================================
    :meth:`follow`    *At once*, with the lock held: the instructions of the agreement's machine, in
                      the order that it gave them. It goes on as if they were done, so one that
                      comes while another is carried out waits for that, and for those before it.
                      They are done before the event goes on, which looks at what has come of them.
    :attr:`at_end`    *At the end of the outermost event*, with the lock held: attempts begin that
                      may. Then no instruction is left, and no lane is half closed: an earlier op
                      that this node has yet to begin is among those that wait.
    :meth:`add_due`   *Once the lock is free*, in the order of the calls, in the thread of the
                      event: what takes time, or calls into other parts of the agent, whose locks
                      must not be taken under this one.
    ================  ====================================================================

    An event may lead to another one, which runs at once: the lock may be taken again by its thread.

    Two things look like a fourth turn, and are waits for a condition: ``OpRuns`` keeps attempts
    that may not begin yet (``_waiting``), and the next step of an op whose memory is in use
    (``Op.next_step``). An event that may change the condition has :attr:`at_end` look again.

    Args:
        group: the name of it, for the log.
        table: whose lock is held.

    Attributes:
        at_end: begins the attempts that may begin.
    """

    def __init__(self, group: str, table: OpTable) -> None:
        self.at_end: Action = lambda: None
        self._group = group
        self._table = table
        self._depth = 0
        self._instructions: deque[Instruction] = deque()
        self._is_following = False
        self._due: list[Action] = []

    def run(self, event: Action) -> None:
        """Run an event, and then what is due."""
        due: list[Action] = []
        try:
            with self._table.lock:
                self._depth += 1
                try:
                    try:
                        event()
                    finally:
                        if self._depth == 1:  # before it is 0: events of this turn are inner ones
                            self.at_end()
                finally:
                    self._depth -= 1
                    if self._due and not self._depth:
                        due, self._due = self._due, due
        finally:
            if due:
                self._do(due)

    def follow(
        self, instructions: Iterable[Instruction], carry_out: Callable[[Instruction], None]
    ) -> None:
        """Carry instructions out, after those that are left. With the lock held."""
        left = self._instructions
        left += instructions
        if self._is_following:
            return
        self._is_following = True
        while left:
            each = left.popleft()
            try:
                carry_out(each)
            except Exception:  # the machine goes by all of them, the next ones too
                log.exception("group '%s': %s could not be carried out", self._group, each)
        self._is_following = False

    def add_due(self, action: Action) -> None:
        """Do something without the lock, in the order of these calls. With the lock held."""
        self._due.append(action)

    def _do(self, due: list[Action]) -> None:
        for action in due:
            try:
                action()
            except Exception:  # what is due to other ops must not wait for it
                log.exception("group '%s': something agreed upon could not be done", self._group)


class LostRanks:
    """Fails the messages that wait for ranks that are gone. With the lock of the ops held.

    Args:
        plan: with which the group was opened.
        p2p: the sends and receives.
    """

    def __init__(self, plan: Plan, p2p: P2PEngine) -> None:
        self._fail_any_source = not plan.options.shrinks
        self._p2p = p2p
        self._group = plan.group

    def fail_messages(self, before: Epoch, now: Epoch) -> None:
        """Fail the messages that wait for ranks of the epoch before that are not in this one."""
        change = unpacked(now.change)
        gone = [seat for seat in before.seats if seat.session not in now.sessions]
        ways = {seat.number: how_lost(change, seat.session) for seat in gone}
        all_left = all(how == LEFT for how in ways.values())
        if all_left:  # they have finished, and nobody has lost them
            counts = len(now.seats), len(before.seats)
            who = name_ranks(sorted(ways))
            text = "epoch %d: %s of group '%s' left in order; %d of %d are left"
            log.info(text, now.ordinal, who, self._group, *counts)
        else:
            log.warning("epoch %d: %s", now.ordinal, change.message)
        for number, how in ways.items():
            if how == LEFT:
                self._p2p.rank_left(number, how)
            else:
                self._p2p.seat_lost(number, change, fail_any_source=self._fail_any_source)


class Decisions:
    """Does with a group's ops and members what its agreement says. With the table's lock held."""

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        self._group = group
        self._reactor = resources.reactor
        self._lost_ranks = LostRanks(group.plan, group.p2p)
        self._for_every_op: dict[type, Callable[[Any], None]] = {
            Start: group.runs.start,
            HandOut: group.runs.hand_out,
            Release: self._release,
        }

    def carry_out(self, instruction: Instruction) -> None:
        """Do what the agreement says; see :mod:`allfold_core.survival.instructions`."""
        action = self._for_every_op.get(type(instruction))
        if action is not None:
            action(instruction)
        else:
            self._carry_out(instruction)

    def _release(self, instruction: Release) -> None:
        group = self._group
        group.results.release(instruction.floor)
        group.residuals.settle(instruction.floor)
        group.agreement.release(instruction.floor)

    def _carry_out(self, instruction: Instruction) -> None:
        group = self._group
        match instruction:
            case CallInPlace(seq, session, call):
                group.calls.stand_in(seq, session, call)
            case Cancel(seq, forward):
                group.runs.cancel(seq, forward=forward)
            case Drop(seq):
                group.runs.drop(seq, group.current.record)
            case Fetch():
                group.runs.fetch(instruction)
            case Refuse():
                group.runs.refuse(instruction)
            case RefuseCalls(seq, sessions):
                group.runs.refuse_calls(seq, sessions, group.current)
            case Installed(epoch, older):
                self._installed(epoch, older)
            case OpenLane(first):
                group.lanes.open_across(first)
            case LeaveBoundary(sessions):
                group.local_ranks.leave_boundary(group.current, sessions)
            case Evicted(term):
                how = dict(term.lost).get(group.node, "no rank of it was left")
                self.evict(evicted(group.name, group.node, how))

    def _installed(self, record: records.Epoch, older: tuple[records.Epoch, ...]) -> None:
        group = self._group
        for each in older:
            # One with nodes that were lost before this node came: its ops are none of this node's.
            if each.nodes <= group.members.keys():
                group.epoch_table.take_in(each)
        before, group.current = group.current, group.epoch_table.take_in(record)
        if record.layout != before.record.layout:
            what = describe_layout(group.current.plan)
            log.warning("group '%s' epoch %d: %s", group.name, record.ordinal, what)
        if record.ordinal != before.ordinal:
            group.p2p.seats_added([*record.seats])
            if record.change:
                self._lost_ranks.fail_messages(before.record, record)
        group.lanes.entered(group.current)
        group.epoch_table.forget_old(group.table.in_flight.values(), group.agreement.machine.epochs)
        group.table.changed.notify_all()
        group.settle_joins()
        group.events.add_due(group.edges.resume_all)
        if not record.seats:
            group.events.add_due(partial(group.neighbours.group_over, group))

    def close_lane(self) -> None:
        """Make all that the ranks do by themselves ops of the agreement."""
        self._group.lanes.close()

    def resume_edges(self) -> None:
        """Look again at frames that wait for an op: it may have got an outcome without them."""
        self._group.events.add_due(self._group.edges.resume_all)

    def is_settled(self, seq: int) -> bool:
        """Return True if all local ranks have called an op, or it is over."""
        op = self._group.table.in_flight.get(seq)
        if op is not None:
            return op.ended or len(op.arrivals) == len(op.ranks)
        called = self._group.agreement.machine.called
        return all(called.get(each, -1) >= seq for each in self._sessions_here())

    def _sessions_here(self) -> frozenset[str]:
        return self._group.current.record.sessions_on(self._group.node)

    def deferred_calls(self) -> Mapping[str, int]:
        """By local session, the first op that waits for the GPU of its rank."""
        return dict(sorted(self._group.deferred, reverse=True))  # the lowest comes last

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Do something after a while, as an event."""
        self._reactor.later(seconds, lambda: self._group.event(task))

    def evict(self, error: PeerLost) -> None:
        """Fail the ops in flight and all later calls: the group goes on without this node."""
        group = self._group
        if group.evicted is not None:
            return
        self.close_lane()
        group.evicted = error
        group.agreement.machine.evict()
        log.warning("%s", error.message)
        for op in list(group.table.in_flight.values()):
            group.runs.fail(op, error)
        group.table.changed.notify_all()
        group.settle_joins()
        group.local_ranks.leave_boundary(group.current)
        group.events.add_due(group.edges.resume_all)
        group.events.add_due(partial(group.p2p.break_, error))
        if group.is_empty:
            group.events.add_due(partial(group.neighbours.group_over, group))
