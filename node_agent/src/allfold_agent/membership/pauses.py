"""Pauses between tries to reach the orchestrator."""

from __future__ import annotations

import random

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class Pauses:
    """The seconds until the next try: longer and longer, and random, so that agents spread."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    def reset(self) -> None:
        """Begin again with the shortest one."""
        self._next = _FIRST_PAUSE

    def draw(self) -> float:
        """Return the next one."""
        longest, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE)
        return random.uniform(longest / 2, longest)
