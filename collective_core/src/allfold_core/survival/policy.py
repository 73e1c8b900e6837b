"""The policy of a group about losses and joins. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from allfold_core.group_options import GroupOptions
from allfold_core.survival.records import Epoch
from allfold_core.survival.reports import Call, may_shrink


@dataclass(frozen=True)
class GroupPolicy:
    """The policy of a group about losses and newcomers.

    Attributes:
        group: its name.
        options: those of the group.
    """

    group: str
    options: GroupOptions

    def is_too_small(self, epoch: Epoch) -> bool:
        """Return True if too few ranks are left to run any op."""
        return len(epoch.seats) < self.options.min_world

    def waits_in_ops(self, epoch: Epoch) -> bool:
        """Return True if ops wait for others to join: too few are left.

        If others may only join at edges, ops fail instead, and the ranks wait at an edge.
        """
        return self.options.is_elastic and not self.options.at_commits and self.is_too_small(epoch)

    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        """Return True if a call relies on another membership than that of an epoch.

        Usually on an earlier one; on a later one if the op had begun before a member was lost, and
        goes on with that member's input. An op whose arguments do not depend on the membership is
        never stale.
        """
        return call.view != epoch.ordinal and not (self.options.shrinks and may_shrink(call.kind))
