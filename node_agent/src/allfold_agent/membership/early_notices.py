"""Messages and terms of groups whose plan has not come to this node yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from allfold_agent.groups.group import Group
from allfold_agent.groups.registry import Registry
from allfold_agent.runtime.locks import make_lock

MAX_KEPT = 1024
# For as long as a plan may take on a node that is overloaded.
_KEPT_SECONDS = 60.0

Notice = Callable[[Group], None]


class _Kept(NamedTuple):
    until: float
    group: str
    opening: int
    notice: Notice


class EarlyNotices:
    """Gives messages and terms to the groups that they are for, as soon as those are open.

    A peer may get its plan a moment before this node does, and its messages are not sent again
    while the link lasts. So they are kept for as long as a plan may take, at most :data:`MAX_KEPT`
    of them; the oldest go first. Those for groups that are over are dropped.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = make_lock("early notices")
        self._kept: deque[_Kept] = deque(maxlen=MAX_KEPT)

    def apply(self, name: str, opening: int, notice: Notice) -> bool:
        """Apply a notice now, or keep it for the moment in which the group opens.

        Returns:
            False where the group is over, and nobody wants the notice.
        """
        with self._lock:
            group = self._registry.look_for(name, opening, 0.0)
            is_over = group is None and self._registry.is_over(name, opening)
            if group is None and not is_over:
                now = monotonic()
                while self._kept and self._kept[0].until <= now:
                    self._kept.popleft()
                self._kept.append(_Kept(now + _KEPT_SECONDS, name, opening, notice))
        if group is not None:
            notice(group)
        return not is_over

    def opened(self, group: Group) -> None:
        """Apply what was kept for a group that has just opened."""
        now, key = monotonic(), (group.name, group.opening)
        with self._lock:
            due = [each for each in self._kept if each[1:3] == key and each.until > now]
            others = (each for each in self._kept if each[1:3] != key)
            self._kept = deque(others, maxlen=MAX_KEPT)
        for each in due:
            each.notice(group)
