"""The epochs of a group as one of its ranks sees them.

The agent tells of an epoch before the first outcome that carries it. The rank is in it when the
program waits for that outcome, and not before: so it is the same point of the program on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Lock
from time import monotonic
from typing import Any

from allfold._calls.call import EpochView
from allfold._lane.lanes import Lanes
from allfold_core.errors import AllfoldError
from allfold_core.protocol.rank_messages import Outcome
from allfold_core.verdict import counted

log = logging.getLogger("allfold")

_WARN_AFTER_SECONDS = 5.0
# The agent says so every second, or somewhat later where its machine has much to do.
_HELD_SECONDS = 3.0


class Epochs:
    """The current epoch of a rank, and the announced next ones.

    Args:
        view: the epoch in which it joined.
        lanes: the short lanes of the epochs.
        fixed: never leave that epoch: an op that is called after a loss then carries an older view
            than the agents' epoch, and fails.

    Attributes:
        view: the current epoch; replaced as a whole.
        lanes: the short lanes of the epochs.
        held_at: when the agent last said that the group recovers and deadlines are suspended
            (monotonic).
        held_for: for how many seconds it had recovered then.
        waits_for: what it waited for then.
    """

    def __init__(self, view: EpochView, lanes: Lanes, *, fixed: bool = False) -> None:
        self.view = view
        self.lanes = lanes
        self._fixed = fixed
        self.held_at = float("-inf")
        self.held_for = 0.0
        self.waits_for = ""
        self._upcoming: dict[int, EpochView] = {}
        self._boundary, self._passed_boundary = view.boundary, 0
        self._entering = Lock()
        self._has_warned = False

    def announce(self, body: Mapping[str, Any]) -> None:
        """Store an announced epoch; the rank enters it with the outcome of an op."""
        if self._fixed:
            return
        self.lanes.announce(body)
        self._upcoming[body["epoch"]] = EpochView.told(self.view.group, body)

    @property
    def is_held(self) -> bool:
        """True while the agent keeps saying that the group recovers."""
        return monotonic() < self.held_at + _HELD_SECONDS

    def enter(self, ordinal: int) -> None:
        """Enter the epoch of an outcome that was waited for, unless the current one is newer."""
        if self._has_warned:
            self._note_end()
        if ordinal <= self.view.epoch or self._fixed:
            return
        with self._entering:
            before, view = self.view, self._upcoming.get(ordinal)
            if ordinal <= before.epoch:
                return
            if view is None:
                log.error("group '%s': unknown epoch %d in an outcome", before.group, ordinal)
                return
            self.view = view
            self.announce_boundary(view.boundary)
            for older in [each for each in self._upcoming if each <= ordinal]:
                del self._upcoming[older]
        _log_change(before, view)

    def settle(self, outcome: Outcome, error: AllfoldError | None) -> bool:
        """Take the outcome of an op that was posted to a lane; return False if there is none."""
        return self.lanes.settle(outcome, error)

    # Boundaries, where others join and leave

    @property
    def boundary(self) -> int:
        """The number of the boundary that this rank has to come to; 0 while no rank waits there."""
        return self._boundary if self._boundary > self._passed_boundary else 0

    @property
    def awaits_others(self) -> bool:
        """True while too few ranks are left, and this one has not come to the boundary for that."""
        return self.view.boundary > self._passed_boundary

    def announce_boundary(self, boundary: int) -> None:
        """Note the boundary that was announced with the outcome of an op, or an epoch."""
        self._boundary = max(boundary, self._boundary)

    def pass_boundary(self, boundary: int, ordinal: int) -> None:
        """Enter the epoch in which the ranks go on from a boundary."""
        self._passed_boundary = max(boundary, self._passed_boundary)
        self.enter(ordinal)

    def hold(self, body: Mapping[str, Any]) -> None:
        """The group recovers; say so once if that takes long."""
        if self._has_warned and body["seconds"] < _WARN_AFTER_SECONDS:
            self._note_end()  # this is another wait
        self.held_for, self.waits_for = body["seconds"], body["waits_for"]
        self.held_at = monotonic()
        if body["seconds"] < _WARN_AFTER_SECONDS:
            return
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "group '%s' waits for %s, for %d s now",
                self.view.group,
                body["waits_for"],
                body["seconds"],
            )

    def _note_end(self) -> None:
        """Say that the group goes on, as seen where it was said that it waits."""
        self._has_warned = False
        seconds = self.held_for + monotonic() - self.held_at
        log.warning("group '%s' goes on, after %d s", self.view.group, seconds)


def _log_change(before: EpochView, view: EpochView) -> None:
    if view.world_size > before.world_size:
        log.info(
            "group '%s' has grown from %d to %d ranks; this process is rank %d",
            view.group,
            before.world_size,
            view.world_size,
            view.rank,
        )
        return
    if view.world_size == before.world_size:
        log.warning(
            "group '%s' has lost ranks, and others have joined: it has %s, as before; this "
            "process, rank %d until now, is rank %d",
            view.group,
            counted(view.world_size, "rank"),
            before.rank,
            view.rank,
        )
        return
    log.warning(
        "group '%s' has %d of its %d ranks left: this process, rank %d until now, is rank %d",
        view.group,
        view.world_size,
        before.world_size,
        before.rank,
        view.rank,
    )
