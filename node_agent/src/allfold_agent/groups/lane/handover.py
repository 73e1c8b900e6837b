"""The handover from the short lane to the agreement of the nodes, as the lane is closed.

With the lock of the group's ops held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_agent.runtime.buffers import Buffer

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup

log = logging.getLogger(__name__)


class LaneHandover:
    """Gives the agreement what the ranks have done, what is held, and what is left to be done.

    Attributes:
        is_under_way: calls are being taken over.
        on_taken_over: told when calls go on as if they were messages; their deadlines are to be
            watched.
    """

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        self.is_under_way = False
        self.on_taken_over: Callable[[], None] = lambda: None
        self._group = group
        self._resources = resources
        self._end = 0  # of the ops that ranks have done
        self._held = -1  # the op of which this node held its part as the lane was closed last

    def are_final(self, end: int) -> bool:
        """Return True if all ops below a number are final on all nodes, if those of the lane are.

        What is not of the lane is known here until it is final everywhere.
        """
        return not any(seq < end for seq in self._group.agreement.machine.ops)

    def learn_final(self, end: int) -> None:
        """Tell the agreement that all ops below a number are final on all nodes."""
        self._group.agreement.learn_floor(end - 1)

    def pass_completed(self, lane: NodeLane | None) -> None:
        """Tell the agreement what the ranks have done."""
        if lane is not None:
            self._note_completed(lane)
        if self._end:
            self._group.agreement.passed_by_ranks(self._end - 1)

    def _note_completed(self, lane: NodeLane) -> None:
        end = lane.end_of_complete()
        if lane.exchange is not None:  # it may be opened in advance of what the ranks have called
            read, posted = self._group.calls.submitted, lane.last_posted()
            called = (max(read.get(each, -1), posted.get(each, -1)) for each in lane.sessions)
            # And what was posted as the lane was closed may not have been taken over yet.
            end = min([end, min(called) + 1, *lane.incomplete()])
        self._end = max(self._end, end)

    def take_all(self, lane: NodeLane) -> None:
        """Take all of a lane that was just closed."""
        self._group.agreement.machine.note_called(lane.last_posted())
        self._hold_results(lane)
        give_part = self._hold_part(lane)  # before the calls: it must not begin anew
        self.pass_completed(lane)
        self.take_calls(lane)
        if give_part is not None:
            give_part()

    def _hold_results(self, lane: NodeLane) -> None:
        """Give the agreement results that other nodes may not have."""
        if lane.exchange is None:
            return
        group, epoch = self._group, self._group.current
        machine, sessions = group.agreement.machine, lane.sessions
        # First: a node that knows that all have their parts says so, and reports none.
        results = lane.exchange.results
        final, everywhere = results.known_final, results.final_everywhere()
        # Until an op of the lane is done here, nobody here may have called those right before it:
        # the lane was opened in advance, and others have come further.
        if everywhere > lane.since and self.are_final(everywhere):
            final = everywhere
        self.learn_final(final)
        for seq, result in sorted(results.held().items()):
            if result.program.is_in_parts:
                continue
            calls = dict.fromkeys(sessions, epoch.call_of(result.program.spec))
            machine.hold(seq, calls, is_whole=True)
            raw = result.kept.bytes
            group.results.keep_copy(seq, epoch.stamp, self._copy(raw), len(raw))
        parts = [each for each in results.parts() if each[0] > machine.floor]
        for seq, program in parts:
            machine.hold(seq, dict.fromkeys(sessions, epoch.call_of(program.spec)))
        results.set_aside()

    def _copy(self, raw: memoryview) -> Buffer:
        buffer = self._resources.buffers.take(len(raw))
        buffer.view[: len(raw)] = raw
        return buffer

    def _hold_part(self, lane: NodeLane) -> Callable[[], None] | None:
        """Give the agreement the op of which this node holds its part, and its ranks have nothing.

        Returns what gives the part itself, once the calls of the ranks were taken over.
        """
        found = None if lane.exchange is None else lane.exchange.take_held_part()
        if found is None:
            return None
        seq, result = found
        self._held = seq
        group, epoch = self._group, self._group.current
        call = epoch.call_of(result.program.spec)
        calls = dict.fromkeys(lane.sessions, call)
        group.agreement.machine.hold(seq, calls, is_handed_out=False)

        def give() -> None:
            op = group.table.in_flight.get(seq)
            if op is not None:
                nbytes = epoch.runner.prepare_result(op)
                op.result = self._resources.buffers.take(nbytes)
                assert op.compiled is not None
                parts, arithmetic = op.compiled.layout, op.compiled.arithmetic
                work = arithmetic.kept(op.result.view, parts.held)
                result.program.write_part(result.kept, parts, work)

        return give

    def take_calls(self, lane: NodeLane) -> None:
        """Have posts that the ranks cannot finish go on as if they were messages."""
        calls = lane.take_over()
        if not calls:
            return
        log.debug("group '%s': %d posted calls are taken over", self._group.name, len(calls))
        before, self.is_under_way = self.is_under_way, True
        try:
            for each in calls:
                self._group.calls.submit(
                    each.session, each.endpoint, each.number, each.message, each.called, posted=True
                )
        finally:
            self.is_under_way = before
        self.on_taken_over()

    def is_undecided_before(self, seq: int) -> bool:
        """Return True while an earlier op, of which this node holds its part, awaits a round.

        The op may be run again, and on the connections between nodes ops are in order.
        """
        return self._held < seq and self._group.agreement.machine.is_undecided(self._held)
