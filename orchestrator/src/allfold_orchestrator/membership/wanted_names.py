"""The names of groups that ranks wait for, as one replica knows them."""

from __future__ import annotations

from collections.abc import Iterator

from allfold_orchestrator.membership.group_state import GroupState

ASKS_AGAIN_SECONDS = 5.0
"""A rank that was refused, and still waits, asks again within so long."""


class WantedNames:
    """The groups that ranks have asked for and are not in yet."""

    def __init__(self) -> None:
        self._refused_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._refused_at])

    def waits(self, group: str) -> None:
        """A rank has a seat in the formation of a group."""
        self._refused_at.setdefault(group, float("-inf"))

    def refused(self, group: str, now: float) -> None:
        """A rank was refused for now, and is to ask again."""
        self._refused_at[group] = now

    def has(self, state: GroupState, now: float) -> bool:
        """Return True if a group could open or take in a rank at once, if its name were free."""
        is_complete = state.forming is not None and state.forming.full
        return is_complete or self._is_asked_for(state.group, now)

    def forget_if_unwanted(self, state: GroupState, now: float) -> None:
        """Drop a name for which nobody waits any more."""
        if state.forming is None and not self._is_asked_for(state.group, now):
            self._refused_at.pop(state.group, None)

    def _is_asked_for(self, group: str, now: float) -> bool:
        return now <= self._refused_at.get(group, float("-inf")) + ASKS_AGAIN_SECONDS
