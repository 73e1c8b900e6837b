"""The policy of a group about losses and joins. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from allfold_core.survival.records import Epoch
from allfold_core.survival.reports import Call, may_shrink


@dataclass(frozen=True)
class GroupPolicy:
    """The policy of a group about losses and newcomers.

    Attributes:
        group: its name.
        shrink: True if ops are run again with the ranks that are left, where that is possible.
        min_world: with fewer ranks no op is run.
        max_world: ranks may join up to this number; ``None``: none may.
        at_commits: ranks join and leave only where all ranks commit their state.
    """

    group: str
    shrink: bool = False
    min_world: int = 1
    max_world: int | None = None
    at_commits: bool = False

    @property
    def is_elastic(self) -> bool:
        """True if ranks may join while the group runs."""
        return self.max_world is not None

    def is_too_small(self, epoch: Epoch) -> bool:
        """Return True if too few ranks are left to run any op."""
        return len(epoch.seats) < self.min_world

    def waits_in_ops(self, epoch: Epoch) -> bool:
        """Return True if ops wait for others to join: too few are left.

        If others may only join at edges, ops fail instead, and the ranks wait at an edge.
        """
        return self.is_elastic and not self.at_commits and self.is_too_small(epoch)

    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        """Return True if a call relies on another membership than that of an epoch.

        Usually on an earlier one; on a later one if the op had begun before a member was lost, and
        goes on with that member's input. An op whose arguments do not depend on the membership is
        never stale.
        """
        return call.view != epoch.ordinal and not (self.shrink and may_shrink(call.kind))
