"""An op of the short lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from allfold._lane.recipe import Recipe
from allfold._session.requests import Pending
from allfold_core.protocol.rank_messages import Region

if TYPE_CHECKING:
    from allfold._lane.short_lane import RankLane

Ends = tuple[Region, Region]
"""The regions of the arena in which a call has its input and its result."""

# After so long the agent is asked to look whether the op can be finished; again after twice that.
_ASK_SECONDS = 0.05
LONGEST_ASK_SECONDS = 1.0


class LaneOp(Pending):
    """An op that was posted.

    Attributes:
        slot: of the page.
        called: when (monotonic).
        in_use: the result has yet to be taken from where it is, once there is one.
        ends: where its input, and a result that the agent sends, lie in the arena; ``None`` where
            they are in the slot.
        place: of the page, where the result is; -1 for any other.
        differs: another rank has posted another call.
    """

    __slots__ = (
        "_ask_at",
        "_ask_pause",
        "_deadline",
        "_lane",
        "called",
        "differs",
        "ends",
        "in_use",
        "place",
        "recipe",
        "seq",
        "slot",
    )

    def __init__(
        self,
        lane: RankLane,
        seq: int,
        slot: int,
        recipe: Recipe,
        called: float,
        timeout: float,
        ends: Ends | None,
    ) -> None:
        super().__init__(lane.connection)
        self._lane = lane
        self.seq = seq
        self.slot = slot
        self.recipe = recipe
        self.called = called
        self.in_use = True
        self.differs = False
        self.ends = ends
        self.place = -1
        self._deadline = called + timeout
        self._ask_at = called + min(timeout, _ASK_SECONDS)
        self._ask_pause = _ASK_SECONDS

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        return self._lane.wait_until(self, condition, seconds)

    def poll(self) -> bool:
        return self.done or self._lane.poll(self)

    def look(self) -> bool:
        return self.done or self._lane.look(self)

    def is_time_to_ask(self, now: float) -> bool:
        """Return True now and then, so that the agent looks at an op that takes long."""
        if now < self._ask_at:
            return False
        self._ask_pause = min(2 * self._ask_pause, LONGEST_ASK_SECONDS)
        self._ask_at = now + self._ask_pause
        if now < self._deadline < self._ask_at:
            self._ask_at = self._deadline
        return True
