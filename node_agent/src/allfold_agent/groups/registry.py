"""The groups of this node by name, for every thread."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.group import Group
from allfold_agent.runtime.locks import make_condition
from allfold_core.errors import RegisterNotFirstOperation
from allfold_core.plan import Plan

# A peer may have got its plan a moment before this node did.
PLAN_LAG_SECONDS = 4.0
_CLOSED_KEPT = 1024


class Registry:
    """Open groups by name; remembers which epochs are over.

    A name may be opened anew while ranks of the group that had it before have yet to leave, so
    there may be several groups of one name. Each holds its own epochs.
    """

    def __init__(self) -> None:
        self._changed = make_condition("registry")
        self._groups: dict[str, list[Group]] = {}
        self._over: dict[tuple[str, int], None] = {}

    def open(self, plan: Plan, make: Callable[[], Group]) -> Group:
        """Return the group that has the epoch of a plan; the first caller makes it."""
        with self._changed:
            group = self._having(plan.group, plan.epoch)
            if group is None:
                group = make()
                self._groups.setdefault(plan.group, []).append(group)
                self._changed.notify_all()
            return group

    def install(self, group: Group, plan: Plan, first_seq: int | None = None) -> Epoch:
        """Have a group take in a newer epoch, and wake those who wait for that.

        The arguments and errors are those of :meth:`Group.install`.
        """
        with self._changed:
            epoch = group.install(plan, first_seq)
            self._changed.notify_all()
            return epoch

    def _having(self, name: str, epoch: int) -> Group | None:
        return next((each for each in self._groups.get(name, ()) if epoch in each.epochs), None)

    def find(self, name: str, epoch: int, wait: float = 0.0) -> Group:
        """Return the open group that has an epoch.

        Args:
            wait: seconds to wait for a plan that is on its way.

        Raises:
            RegisterNotFirstOperation: this node has no such epoch, or it is over.
        """
        deadline = monotonic() + wait
        with self._changed:
            while (group := self._having(name, epoch)) is None:
                left = deadline - monotonic()
                is_over = (name, epoch) in self._over
                if is_over or left <= 0:
                    state = "is closed" if is_over else "is not open"
                    raise RegisterNotFirstOperation(f"group '{name}' epoch {epoch} {state} here")
                self._changed.wait(timeout=left)
            return group

    def look_for(self, name: str, epoch: int, wait: float) -> Group | None:
        """Like :meth:`find`; ``None`` where there is none, for news that only a group can use."""
        try:
            return self.find(name, epoch, wait)
        except RegisterNotFirstOperation:
            return None

    def is_over(self, name: str, epoch: int) -> bool:
        """Return True if an epoch was open here and will not be again."""
        with self._changed:
            return (name, epoch) in self._over

    def remove(self, group: Group) -> None:
        """Forget a group that is over."""
        with self._changed:
            groups = self._groups.get(group.name, [])
            if group in groups:
                groups.remove(group)
                if not groups:
                    del self._groups[group.name]
                self._remember_end(group)
            self._changed.notify_all()

    def _remember_end(self, group: Group) -> None:
        for epoch in group.epochs:
            self._over[group.name, epoch] = None
        while len(self._over) > _CLOSED_KEPT:
            del self._over[next(iter(self._over))]

    def all(self) -> list[Group]:
        """The open groups; of one name, the newest last."""
        with self._changed:
            return [group for groups in self._groups.values() for group in groups]
