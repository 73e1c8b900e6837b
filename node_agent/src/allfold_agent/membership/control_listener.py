"""What the groups of this node say and hear on the control link."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from allfold_agent.groups.group import Group

log = logging.getLogger(__name__)


class GroupsOnControlLink:
    """The control link's listener. Terms are not acted upon yet: agents tell each other of losses.

    Args:
        groups: returns the groups that are open on this node.
        end_life: called when the orchestrator has evicted this node.
    """

    def __init__(self, groups: Callable[[], list[Group]], end_life: Callable[[], None]) -> None:
        self._groups = groups
        self._end_life = end_life

    def held(self) -> list[dict[str, Any]]:
        return []

    def registered(self, generation: int, out: Sequence[str]) -> None:
        log.debug("registered in generation %d; out of %s", generation, list(out))

    def term(self, generation: int, group: str, record: dict[str, Any]) -> None:
        log.debug("generation %d: group '%s' has %s", generation, group, record)

    def evicted(self) -> None:
        self._end_life()

    def cleared(self, node: str, incarnation: str, patience: float) -> None:
        log.debug("node %s (%s) lives, patience is %.1f s", node, incarnation, patience)

    def lag(self) -> float:
        return 0.0

    def heard(self) -> dict[str, float]:
        return {}

    def progress(self) -> list[dict[str, Any]]:
        return [
            {
                "group": group.name,
                "epoch": group.opening,
                "last_seq": max(group.last_called().values(), default=-1),
                "in_flight": len(group.table.in_flight),
            }
            for group in self._groups()
        ]
