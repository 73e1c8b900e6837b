"""An op of the short lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from allfold._lane.recipe import Recipe
from allfold._session.requests import Pending

if TYPE_CHECKING:
    from allfold._lane.short_lane import RankLane

# After so long the agent is asked to look whether the op can be finished; again after twice that.
_ASK_SECONDS = 0.05
LONGEST_ASK_SECONDS = 1.0


class LaneOp(Pending):
    """An op that was posted.

    Attributes:
        slot: of the page.
        called: when (monotonic).
        in_use: the result has yet to be taken from the slot, once there is one.
        differs: another rank has posted another call.
    """

    __slots__ = (
        "_ask_at",
        "_ask_pause",
        "_deadline",
        "_lane",
        "called",
        "differs",
        "in_use",
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
    ) -> None:
        super().__init__(lane.connection)
        self._lane = lane
        self.seq = seq
        self.slot = slot
        self.recipe = recipe
        self.called = called
        self.in_use = True
        self.differs = False
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
