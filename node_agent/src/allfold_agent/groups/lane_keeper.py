"""The keeper of a group's short lane: opens it while all is well, and closes it when it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from allfold_agent.execution.op import RankEndpoint
from allfold_agent.groups.agreement import Agreement
from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.epoch_table import EpochTable
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.short_lane import ShortLane
from allfold_core.errors import PeerLost
from allfold_core.wire.local_wire import OpMessage

log = logging.getLogger(__name__)


class LaneGroup(Protocol):
    """The group, as the keeper of its lane sees it."""

    name: str
    node: str
    table: OpTable
    agreement: Agreement
    epoch_table: EpochTable
    current: Epoch
    evicted: PeerLost | None

    @property
    def submitted(self) -> Mapping[str, int]:
        """By session, the last op whose message was taken in."""

    def submit(
        self,
        session: str,
        connection: RankEndpoint,
        number: int,
        message: OpMessage,
        called: float | None = None,
    ) -> None:
        """Take in a local rank's call."""


class LaneKeeper:
    """Keeps the lane of the current epoch. With the lock of the group's ops held.

    Args:
        is_allowed: the settings of the node allow a lane.

    Attributes:
        lane: of the current epoch; ``None`` if its ranks cannot have one.
        on_taken_over: told when calls go on as if they were messages; their deadlines are to be
            watched.
    """

    def __init__(self, group: LaneGroup, *, is_allowed: bool) -> None:
        self.lane: ShortLane | None = None
        self.on_taken_over: Callable[[], None] = lambda: None
        self._group = group
        self._is_possible = is_allowed and ShortLane.is_possible()
        self._is_closing = False

    def entered(self, epoch: Epoch) -> None:
        """The group goes on in this epoch, whose ranks need a page of their own."""
        if not self._is_possible or (self.lane and self.lane.ordinal == epoch.ordinal):
            return
        self.lane = None
        if epoch.record.nodes == {self._group.node}:
            self.lane = ShortLane(epoch, self._group.node)

    def lane_of(self, ordinal: int) -> ShortLane | None:
        """Return the lane of an epoch, if that is the current one. From any thread."""
        lane = self.lane
        return lane if lane is not None and lane.ordinal == ordinal else None

    # Open

    def open_if_possible(self) -> None:
        """Open the lane, unless something is under way that concerns others than the ranks here."""
        lane, group = self.lane, self._group
        if lane is None or lane.is_open or group.table.in_flight or group.evicted is not None:
            return
        machine, epoch = group.agreement.machine, group.current
        if machine.frozen or epoch.ordinal != lane.ordinal or epoch.record.edge:
            return
        policy, views = machine.policy, group.epoch_table
        if policy.is_too_small(epoch.record) or not machine.dead.keys().isdisjoint(lane.sessions):
            return
        if any(views.view_of(session) < lane.ordinal for session in lane.sessions):
            return  # a rank has yet to learn that it is in this epoch
        called = (machine.called.get(session, -1) + 1 for session in lane.sessions)
        first = max(*called, *(epoch.record.since_of(session) for session in lane.sessions))
        if lane.may_open(first):
            lane.open(first)

    def handed(self, lane: ShortLane) -> None:
        """A rank was sent the page of a lane."""
        if lane is self.lane:
            self.open_if_possible()

    # Closed

    def close(self) -> None:
        """Take over what the ranks have not completed: the nodes have to agree on it."""
        lane = self.lane
        if lane is None or not lane.is_open or self._is_closing:
            return
        self._is_closing = True
        try:
            end = lane.close()
            self._group.agreement.machine.note_called(lane.last_posted())
            self._group.agreement.passed_by_ranks(end - 1)
            self._take_over(lane)
            lane.tell_closed()
        finally:
            self._is_closing = False

    def _take_over(self, lane: ShortLane) -> None:
        calls = lane.take_over()
        for each in calls:
            self._group.submit(each.session, each.endpoint, each.number, each.message, each.called)
        if calls:
            log.debug("group '%s': %d posted calls are taken over", self._group.name, len(calls))
            self.on_taken_over()

    # News of the ranks

    def message_came(self, session: str, seq: int, *, is_short: bool) -> None:
        """A rank has sent an op as a message.

        If others may have posted the same op, nobody can finish it but the agent.
        """
        lane = self.lane
        if lane is None or not lane.is_open:
            return
        if (is_short and seq >= lane.page.first) or lane.page.has_posted(seq):
            lane.note_misfit(seq)
            self.close()
        else:
            submitted = {**self._group.submitted, session: seq}
            self._group.agreement.passed_by_ranks(lane.complete(submitted) - 1)

    def look(self, seq: int) -> None:
        """A rank waits for an op that it has posted: see whether the ranks can finish it."""
        lane = self.lane
        if lane is None:
            return
        if not lane.is_open:
            self._take_over(lane)  # it was posted as the lane was closed
            lane.tell_closed()
        elif lane.is_stuck(seq, self._group.submitted):
            self.close()
