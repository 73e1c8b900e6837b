"""Forked children close the descriptors that their parent shares with its node agent.

The agent takes a rank for alive as long as anybody holds its socket open. A child that outlives its
parent, a worker of a data loader perhaps, would hide the parent's death.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """A resource of the parent that a forked child inherits."""

    def disown(self) -> None:
        """Release the child's copy. Called in the child, which has one thread."""


_inherited: WeakSet[Inherited] = WeakSet()


def disown_in_children(inherited: Inherited) -> None:
    """Have every child that is forked from now on call ``disown``."""
    _inherited.add(inherited)


def _disown_all() -> None:
    for each in list(_inherited):
        each.disown()


os.register_at_fork(after_in_child=_disown_all)
