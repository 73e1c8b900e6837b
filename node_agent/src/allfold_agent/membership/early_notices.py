"""Notices of losses and departures that come before the plan of their epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.registry import PLAN_LAG_SECONDS, Registry

MAX_KEPT = 1024

Notice = Callable[[Epoch], None]


class _Kept(NamedTuple):
    until: float
    group: str
    epoch: int
    notice: Notice


class EarlyNotices:
    """Applies notices to their epochs, those of epochs that are not open yet when they open.

    A peer may get its plan a moment before this node does. Nobody waits for that: a notice is kept
    for as long as a plan may take, and there are at most :data:`MAX_KEPT`; the oldest go first.
    Notices of epochs that are over are dropped, so that they take no places. For the event loop of
    the control plane, where epochs are opened too.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kept: deque[_Kept] = deque(maxlen=MAX_KEPT)

    def apply(self, group: str, epoch: int, notice: Notice) -> None:
        """Apply a notice now, or keep it for the moment in which the epoch opens."""
        found = self._registry.look_for(group, epoch, 0.0)
        if found is not None:
            notice(found.epochs[epoch])
            return
        if self._registry.is_over(group, epoch):
            return
        now = monotonic()
        while self._kept and self._kept[0].until <= now:
            self._kept.popleft()
        self._kept.append(_Kept(now + PLAN_LAG_SECONDS, group, epoch, notice))

    def opened(self, epoch: Epoch) -> None:
        """Apply what was kept for an epoch that has just opened."""
        now, key = monotonic(), (epoch.group, epoch.number)
        due = [each for each in self._kept if each[1:3] == key and each.until > now]
        self._kept = deque((each for each in self._kept if each[1:3] != key), maxlen=MAX_KEPT)
        for each in due:
            each.notice(epoch)
