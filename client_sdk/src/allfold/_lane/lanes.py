"""The short lanes of a group, one for each epoch that the agent has made a page for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allfold._lane.lane_page import RankPage
from allfold._lane.recipe import PageSeat
from allfold._lane.short_lane import RankLane
from allfold._session.connection import AgentConnection
from allfold_core.errors import AllfoldError
from allfold_core.protocol.rank_messages import Outcome
from allfold_core.short_lane.choice import LaneRules
from allfold_core.short_lane.page import PageLayout


class Lanes:
    """The pages of a rank.

    Args:
        number: the agent's number of the group.
    """

    def __init__(self, connection: AgentConnection, number: int) -> None:
        self._connection = connection
        self._number = number
        self._by_epoch: dict[int, RankLane] = {}
        self._last_message = -1

    def announce(self, body: Mapping[str, Any]) -> None:
        """Take in the page of an epoch, if the agent has sent one with its news of it."""
        files = body.get("files")
        if files is None:
            return
        known = self._by_epoch.get(body["epoch"])
        if known is not None and known.page.files is files:  # this very message was taken in before
            return
        about = body["page"]
        seat = PageSeat(tuple(map(tuple, about["placement"])), about["node"], about["index"])
        page = RankPage(files, PageLayout.from_dict(about), seat.index)
        epoch = body["epoch"]
        rules = LaneRules.from_dict(about)
        lane = RankLane(page, self._connection, self._number, epoch, seat, rules)
        # Before the lane can be found: no post may overtake a message that is still to be read.
        lane.gate.unread = self._last_message
        used = {each: old for each, old in self._by_epoch.items() if old.open_ops()}
        self._by_epoch = {**used, epoch: lane}

    def close(self) -> None:
        """Let go of the pages: this rank has left."""
        lanes, self._by_epoch = self._by_epoch, {}
        for each in lanes.values():
            each.close()

    def of(self, epoch: int) -> RankLane | None:
        """Return the lane of an epoch; ``None`` if that has none."""
        return self._by_epoch.get(epoch)

    def note_message(self, seq: int, packed: bytes | None) -> None:
        """This rank sends an op with this fingerprint as a message; ``None``: it cannot call it."""
        self._last_message = seq
        for lane in self._by_epoch.values():
            lane.note_message(seq, packed)

    def settle(self, outcome: Outcome, error: AllfoldError | None) -> bool:
        """Take an outcome from the agent; return False if no op of the lanes waits for it."""
        return any(lane.settle(outcome, error) for lane in list(self._by_epoch.values()))
