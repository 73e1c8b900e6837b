"""The events of a group, one at a time, and what follows from them without the lock."""

from __future__ import annotations

import logging
from collections.abc import Callable

from allfold_agent.groups.op_table import OpTable

log = logging.getLogger(__name__)

Action = Callable[[], None]


class EventQueue:
    """Runs events with a lock held, and what they leave to do once it is free.

    An event may lead to another one: what is due waits for the outermost.

    Args:
        group: the name of it, for the log.
        table: whose lock is held.
    """

    def __init__(self, group: str, table: OpTable) -> None:
        self._group = group
        self._table = table
        self._depth = 0
        self._due: list[Action] = []

    def run(self, event: Action) -> None:
        """Run an event, and then what is due."""
        due: list[Action] = []
        try:
            with self._table.lock:
                self._depth += 1
                try:
                    event()
                finally:
                    self._depth -= 1
                    if self._due and not self._depth:
                        due, self._due = self._due, due
        finally:
            if due:
                self._do(due)

    def add_due(self, action: Action) -> None:
        """Have something done without the lock, in the order of these calls. With the lock held."""
        self._due.append(action)

    def _do(self, due: list[Action]) -> None:
        for action in due:
            try:
                action()
            except Exception:  # what is due to other ops must not wait for it
                log.exception("group '%s': something agreed upon could not be done", self._group)
