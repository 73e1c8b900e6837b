"""The keeper of a group's short lane: has it opened while all is well, and closed when it is not.

On one node the ranks need nobody else, so the keeper opens and closes the lane by itself. In a
group on several nodes all of them have to do an op in the same lane: it is opened, and closed, by a
round of the agreement, for which the keeper wishes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from allfold_agent.edges.connections import EdgeCounters
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.opening import EdgeRequest
from allfold_agent.groups.epoch import GroupEpoch, NodeResources
from allfold_agent.groups.lane.exchange import LaneExchange, RankInput
from allfold_agent.groups.lane.handover import LaneHandover
from allfold_agent.groups.lane.link import LaneDoor
from allfold_agent.groups.lane.links import LaneLinks
from allfold_agent.groups.lane.page import AgentPage
from allfold_agent.groups.lane.records import LaneRecords
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_agent.groups.lane.under_way import OpUnderWay
from allfold_agent.runtime import machine
from allfold_core.errors import ServiceError
from allfold_core.pricing.lane import lane_rules
from allfold_core.protocol.frames import FrameHeader
from allfold_core.short_lane.page import NEVER

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup


log = logging.getLogger(__name__)


def _nothing() -> None:
    """Do nothing: at the end of any event the group looks again at what waits."""


def _end_exchange(lane: NodeLane | None) -> None:
    if lane is not None and lane.exchange is not None:
        lane.exchange.end()


class LaneKeeper:
    """Keeps the lane of the current epoch. With the lock of the group's ops held.

    Attributes:
        records: what is to be seen of the lane of the current epoch.
        handover: takes what is left of a lane that is closed.
    """

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        self.records = LaneRecords(group)
        self.handover = LaneHandover(group, resources)
        self._group = group
        self._resources = resources
        self._obstacle = machine.why_unordered() if resources.short_lane else "it is switched off"
        self._links: LaneLinks | None = None
        self._is_closing = False
        # The lane that was open last in an earlier epoch: there may be posts to be taken over.
        self._previous: NodeLane | None = None

    def entered(self, epoch: GroupEpoch) -> None:
        """Make the lane of a new epoch, whose ranks need a page of their own."""
        before, self.lane = self.lane, None
        _end_exchange(before)
        nodes, thread = epoch.record.nodes, self._resources.lane_thread
        if self._obstacle or self._group.node not in nodes:
            pass
        elif len(nodes) == 1:
            self.lane = self._same(before, epoch) or NodeLane(epoch, self._group.node)
        elif thread is not None and lane_rules(epoch.plan).most_bytes:
            self._enter_across(before, epoch)
        for session, seq in self._group.calls.read().items():
            self.messages_read(session, seq)
        if before is not None and before is not self.lane and before.was_opened:
            self._previous = before

    def _same(self, before: NodeLane | None, epoch: GroupEpoch) -> NodeLane | None:
        """Return the lane of before, if its ranks are those of the epoch, in the same order."""
        if before is None or before.ordinal != epoch.ordinal:
            return None
        return before if before.node_order == epoch.record.layout else None

    def _enter_across(self, before: NodeLane | None, epoch: GroupEpoch) -> None:
        lane = self._same(before, epoch)
        if lane is not None:
            lane.exchange = self._exchange(epoch, lane.page, lane.rank_input)
        elif before is None or before.ordinal != epoch.ordinal:
            lane = NodeLane(epoch, self._group.node, self._exchange)
        self.lane = lane  # None where the ranks have a page for another order of the nodes
        self._have_links().want(self._others(epoch))

    def _others(self, epoch: GroupEpoch) -> list[str]:
        return sorted(epoch.record.nodes - {self._group.node})

    def _exchange(self, epoch: GroupEpoch, page: AgentPage, rank_input: RankInput) -> LaneExchange:
        thread = self._resources.lane_thread
        assert thread is not None
        return LaneExchange(
            epoch,
            self._group.node,
            page,
            rank_input,
            self._have_links(),
            self._group.table,
            self._resources.buffers,
            thread,
            lambda reason: self._group.event(partial(self.withdraw, reason)),
            self._op_published,
            self.handover.are_final,
            lambda end: self._soon(partial(self.handover.learn_final, end)),
        )

    def _have_links(self) -> LaneLinks:
        thread = self._resources.lane_thread
        assert thread is not None
        if self._links is None:
            self._links = LaneLinks(
                self._group.name,
                self._group.opening,
                self._group.node,
                self._group.members,
                self._resources.dial,
                thread,
                self,
                lambda: self._group.event(self._links_changed),
                self._resources.sender(self._group.plan),
            )
        return self._links

    # Frames, in the lane's thread: the exchange of the current epoch gets them

    def destination(self, node: str, header: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of a frame; ``None`` for any other."""
        lane = self.lane
        exchange = None if lane is None else lane.exchange
        return None if exchange is None else exchange.destination(node, header)

    def take(
        self, node: str, header: FrameHeader, payload: memoryview | bytearray, *, is_there: bool
    ) -> None:
        """Take in a frame; with ``is_there`` it has come to its :meth:`destination`."""
        lane = self.lane
        if lane is not None and lane.exchange is not None:
            lane.exchange.take(node, header, payload, is_there=is_there)

    def serve(self, request: EdgeRequest) -> LaneDoor:
        """Return the door for a connection that another node opens.

        Raises:
            ServiceError: this node has no short lane.
            PeerLost: the group goes on without that node.
        """
        if self._obstacle or self._resources.lane_thread is None:
            raise ServiceError(f"node {self._group.node} has no short lane")
        return self._have_links().serve(request)

    @property
    def lane(self) -> NodeLane | None:
        """The lane of the current epoch; ``None`` if its ranks cannot have one."""
        return self.records.lane

    @lane.setter
    def lane(self, lane: NodeLane | None) -> None:
        self.records.lane = lane

    def describe(self) -> str:
        """Return "open", "closed", or why there is no lane. From any thread."""
        lane = self.lane
        if lane is not None and lane.obstacle:
            return f"none: {lane.obstacle}"
        if lane is not None:
            return "open" if lane.is_open else "closed"
        if not lane_rules(self._group.current.plan).most_bytes:
            nodes = len(self._group.current.record.nodes)
            return f"none: between {nodes} nodes, by prediction, other ways are no slower"
        return f"none: {self._obstacle or 'the nodes stand in another order now'}"

    def counters(self) -> Iterator[tuple[str, str, EdgeCounters]]:
        """The traffic with other nodes: direction, peer and counters. From any thread."""
        links = self._links
        return iter(()) if links is None else links.counters()

    def rates(self) -> dict[str, LinkRate]:
        """The rate at which payloads come from each node. From any thread."""
        links = self._links
        return {} if links is None else links.rates()

    def sending(self) -> list[tuple[str, socket.socket]]:
        """Return the connections on which this node sends, with the node at the other end."""
        links = self._links
        return [] if links is None else links.sending()

    def lane_of(self, ordinal: int) -> NodeLane | None:
        """Return the lane of an epoch, if that is the current one. From any thread."""
        lane = self.lane
        return lane if lane is not None and lane.ordinal == ordinal else None

    # Open

    def consider_opening(self) -> None:
        """Open the lane, or wish for it, unless something is under way."""
        lane = self.lane
        if lane is None or lane.is_open or self.handover.is_under_way or not self._is_ready(lane):
            return
        first = self._next_op(lane)
        if not lane.may_open(first):
            return
        if lane.exchange is None:
            self._open(lane, first)
        elif self._have_links().are_whole(self._others(self._group.current)):
            self._group.agreement.wish_for_lane(wished=True)
        else:
            self._have_links().want(self._others(self._group.current))

    def _is_ready(self, lane: NodeLane) -> bool:
        """Return True if nothing concerns others than the ranks, and all ranks know the epoch."""
        group, epoch = self._group, self._group.current
        machine, views = group.agreement.machine, group.epoch_table
        return not (
            group.evicted is not None
            or machine.frozen
            or group.table.in_flight
            or epoch.ordinal != lane.ordinal
            or epoch.record.boundary
            or machine.policy.is_too_small(epoch.record)
            or not machine.dead.keys().isdisjoint(lane.sessions)
            or any(views.view_of(session) < lane.ordinal for session in lane.sessions)
        )

    def _next_op(self, lane: NodeLane) -> int:
        """Return the first op that no rank of this node has called."""
        machine, record = self._group.agreement.machine, self._group.current.record
        called = (machine.called.get(session, -1) + 1 for session in lane.sessions)
        return max(*called, *(record.since_of(session) for session in lane.sessions))

    def open_across(self, first: int) -> None:
        """Open the lane from an op on, as the nodes have agreed."""
        lane = self.lane
        if lane is None or lane.exchange is None:
            self.withdraw("there is no lane")
        elif self._next_op(lane) > first:
            self.withdraw(f"op {first} was called before the lane was open")
        else:
            log.debug("group '%s': the short lane is open from op %d on", self._group.name, first)
            self._open(lane, first)

    def _open(self, lane: NodeLane, first: int) -> None:
        self._previous = None  # all ranks know the epoch, so all that they had sent before was read
        lane.open(first)

    def handed(self, lane: NodeLane) -> None:
        """Note that a rank was sent the page of a lane; the last may open it. From any thread."""
        self._group.event(lambda: self.consider_opening() if lane is self.lane else None)

    def _links_changed(self) -> None:
        """Open or close the lane after a connection to another node was made, or has ended."""
        lane = self.lane
        if lane is None or lane.exchange is None:
            return
        if not lane.is_open:
            self.consider_opening()
        elif not self._have_links().are_whole(self._others(self._group.current)):
            self.withdraw("a connection of the short lane is broken")

    # Closed

    def withdraw(self, reason: str) -> None:
        """Ask the nodes to close the lane, in which this one cannot go on."""
        log.debug("group '%s': %s", self._group.name, reason)
        self._group.agreement.wish_for_lane(wished=False)

    def close(self) -> None:
        """Take over what the ranks have not completed: the nodes have to agree on it."""
        lane = self.lane
        if lane is None or not lane.is_open or self._is_closing:
            return
        self._is_closing = True
        try:
            self._group.agreement.machine.leave_lane()
            lane.close()
            end = lane.end_of_complete()
            log.debug("group '%s': the short lane is closed before op %d", self._group.name, end)
            self.records.harvest()
            self.handover.take_all(lane)
            lane.tell_closed()
        finally:
            self._is_closing = False

    def pass_completed(self) -> None:
        """Tell the agreement what the ranks have done."""
        self.handover.pass_completed(self.lane)

    def may_begin(self, seq: int) -> bool:
        """Return False while local ranks have an earlier op in the lane.

        If the lane is closed before that op is complete, it goes by the edges between the nodes,
        and on those the ops have to be in the same order on every node.
        """
        if self.handover.is_undecided_before(seq):
            return False
        lane = self.lane
        across = lane if lane is not None and lane.exchange is not None else None
        return not any(self._has_unfinished_before(seq, each) for each in (self._previous, across))

    def _has_unfinished_before(self, seq: int, lane: NodeLane | None) -> bool:
        dead = self._group.agreement.machine.dead
        return lane is not None and lane.has_unfinished_before(seq, dead)

    def _op_published(self, op: OpUnderWay) -> None:
        """Begin ops that waited until the ranks had a result, and record a long op.

        In the lane's thread, which ops must not keep: an event of the reactor's begins them.
        """
        if not op.program.is_in_slots:  # to record a short one would take as long as the op
            self.records.note(op)
        if self._group.runs.is_waiting:
            self._soon(_nothing)

    def _soon(self, event: Callable[[], None]) -> None:
        self._resources.reactor.later(0.0, lambda: self._group.event(event))

    def end(self) -> None:
        """Close the lane for good, as the group is over on this node."""
        _end_exchange(self.lane)
        self.lane = None
        if self._links is not None:
            self._links.close()

    # News of the ranks

    def message_came(self, seq: int, *, is_short: bool) -> None:
        """Take in that a rank has sent an op as a message.

        If others may have posted the same op, nobody can finish it but the agent.
        """
        self._take_over_late(seq)
        lane = self.lane
        if lane is None:
            return
        if lane.is_open and ((is_short and seq >= lane.page.first) or lane.page.has_posted(seq)):
            lane.note_misfit(seq)
            self._close_or_withdraw(lane, f"op {seq} has come as a message")
        elif lane.exchange is not None and lane.exchange.note_message(seq):
            self.withdraw(f"op {seq} has come as a message, and other nodes do it in the lane")

    def _take_over_late(self, seq: int) -> None:
        """Take over what ranks have posted, up to an op, as a lane was closed."""
        for lane in (self._previous, self.lane):
            if lane is None:
                continue
            if self._has_unfinished_before(min(seq + 1, lane.page.first), lane):
                self.handover.take_calls(lane)

    def messages_read(self, session: str, seq: int) -> None:
        """Allow a rank to post ops after ``seq``, as all its messages up to that were read."""
        if self.lane is not None:
            self.lane.note_read(session, seq)

    def arena_grew(self) -> None:
        """Look once more at posts whose memory was not known here. From any thread."""
        thread, lane = self._resources.lane_thread, self.lane
        if thread is not None and lane is not None and lane.exchange is not None:
            thread.call(_nothing)
        if self._previous is not None or (lane is not None and not lane.is_open):
            self._group.event(partial(self._take_over_late, NEVER))

    def look(self, seq: int) -> None:
        """Close the lane if the ranks cannot finish an op that one awaits. From any thread."""
        self._group.event(partial(self._look, seq))

    def _look(self, seq: int) -> None:
        self._take_over_late(seq)
        lane = self.lane
        if lane is not None and lane.is_stuck(seq, self._group.calls.submitted):
            self._close_or_withdraw(lane, f"op {seq} cannot be done in the short lane")

    def _close_or_withdraw(self, lane: NodeLane, reason: str) -> None:
        if lane.exchange is None:
            self.close()
        else:
            self.withdraw(reason)
