"""What the nodes of a group have agreed upon, carried out on this one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.link_watch import describe_layout
from allfold_agent.groups.lost_ranks import LostRanks
from allfold_agent.groups.outcomes import evicted
from allfold_core.errors import PeerLost
from allfold_core.survival import records
from allfold_core.survival.instructions import (
    Cancel,
    Drop,
    Evicted,
    Fetch,
    HandOut,
    Installed,
    Instruction,
    LeaveEdge,
    OpenLane,
    Refuse,
    RefuseCalls,
    Release,
    Start,
)

if TYPE_CHECKING:
    from allfold_agent.groups.group import Group

log = logging.getLogger(__name__)


class Decisions:
    """Does with a group's ops and members what its agreement says. With the table's lock held."""

    def __init__(self, group: Group, resources: NodeResources) -> None:
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
            case LeaveEdge(sessions):
                group.local_ranks.leave_edge(group.current, sessions)
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
                self._lost_ranks.note(before.record, record)
        group.lanes.entered(group.current)
        group.epoch_table.forget_old(group.table.in_flight.values(), group.agreement.machine.epochs)
        group.table.changed.notify_all()
        group.settle_joins()
        group.events.add_due(group.edges.resume_all)
        if not record.seats:
            group.events.add_due(partial(group.neighbours.group_over, group))

    def close_lane(self) -> None:
        """Let all that the ranks do by themselves be ops of the agreement."""
        self._group.lanes.close()

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
        group.local_ranks.leave_edge(group.current)
        group.events.add_due(group.edges.resume_all)
        group.events.add_due(partial(group.p2p.break_, error))
        if group.is_empty:
            group.events.add_due(partial(group.neighbours.group_over, group))
