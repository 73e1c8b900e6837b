"""The policy of a group about its members and the ops that they do. Pure."""

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
        max_world: further ranks are taken in up to this number; ``None``: none at all.
        at_commits: they are only where all ranks commit their state.
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

    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        """Return True if a call relies on another membership than that of an epoch.

        Mostly on one from before. On a later one, where the op had begun when a member was lost,
        and went on with what that member had given. An op whose arguments do not depend on the
        membership is run all the same.
        """
        return call.view != epoch.ordinal and not (self.shrink and may_shrink(call.kind))
