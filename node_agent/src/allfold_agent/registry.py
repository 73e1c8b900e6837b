"""The groups of this node, for every thread."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from time import monotonic

from allfold_agent.group import Group
from allfold_core.errors import RegisterNotFirstOperation
from allfold_core.plan import Plan

# A peer may have got its plan a moment before this node did.
PLAN_LAG_SECONDS = 4.0
_CLOSED_KEPT = 1024


class Registry:
    """Open groups by name and epoch; remembers which ones are over."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._groups: dict[tuple[str, int], Group] = {}
        self._over: dict[tuple[str, int], None] = {}

    def open(self, plan: Plan, make: Callable[[], Group]) -> Group:
        """The group of a plan; the first caller makes it."""
        key = (plan.group, plan.epoch)
        with self._changed:
            if key not in self._groups:
                self._groups[key] = make()
                self._changed.notify_all()
            return self._groups[key]

    def find(self, name: str, epoch: int, wait: float = 0.0) -> Group:
        """An open group, waiting up to ``wait`` seconds for one whose plan is on its way.

        Raises:
            RegisterNotFirstOperation: this node has no such group, or it is over.
        """
        deadline = monotonic() + wait
        key = (name, epoch)
        with self._changed:
            while key not in self._groups:
                left = deadline - monotonic()
                if key in self._over or left <= 0:
                    state = "is closed" if key in self._over else "is not open"
                    raise RegisterNotFirstOperation(f"group '{name}' epoch {epoch} {state} here")
                self._changed.wait(timeout=left)
            return self._groups[key]

    def look_for(self, name: str, epoch: int, wait: float) -> Group | None:
        """Like :meth:`find`; ``None`` where there is none, for news that only a group can use."""
        try:
            return self.find(name, epoch, wait)
        except RegisterNotFirstOperation:
            return None

    def remove(self, group: Group) -> None:
        """Forget a group that is over."""
        key = (group.name, group.epoch)
        with self._changed:
            if self._groups.pop(key, None) is not None:
                self._over[key] = None
                if len(self._over) > _CLOSED_KEPT:
                    del self._over[next(iter(self._over))]
            self._changed.notify_all()

    def all(self) -> list[Group]:
        """The open groups."""
        with self._changed:
            return list(self._groups.values())
