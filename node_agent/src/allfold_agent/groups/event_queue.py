"""The one queue of a group: its events, one at a time, and what each of them leaves to do."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from allfold_agent.groups.op_table import OpTable
from allfold_core.survival.instructions import Instruction

log = logging.getLogger(__name__)

Action = Callable[[], None]


class EventQueue:
    """Runs the events of a group with its lock held, and what follows from them, in three turns.

    ================  ====================================================================
    :meth:`follow`    *At once*, with the lock held: the instructions of the agreement's machine, in
                      the order that it gave them. It goes on as if they were done, so one that
                      comes while another is carried out waits for that, and for those before it.
                      They are done before the event goes on, which looks at what has come of them.
    :attr:`at_end`    *At the end of the outermost event*, with the lock held: attempts begin that
                      may. Then no instruction is left, and no lane is half closed: an earlier op
                      that this node has yet to begin is among those that wait.
    :meth:`add_due`   *Once the lock is free*, in the order of the calls, in the thread of the
                      event: what takes time, or calls into other parts of the agent, whose locks
                      must not be taken under this one.
    ================  ====================================================================

    An event may lead to another one, which runs at once: the lock may be taken again by its thread.

    Two things look like a fourth turn, and are waits for a condition: ``OpRuns`` keeps attempts
    that may not begin yet (``_waiting``), and the next step of an op whose memory is in use
    (``Op.next_step``). An event that may change the condition has :attr:`at_end` look again.

    Args:
        group: the name of it, for the log.
        table: whose lock is held.

    Attributes:
        at_end: begins the attempts that may begin.
    """

    def __init__(self, group: str, table: OpTable) -> None:
        self.at_end: Action = lambda: None
        self._group = group
        self._table = table
        self._depth = 0
        self._instructions: deque[Instruction] = deque()
        self._is_following = False
        self._due: list[Action] = []

    def run(self, event: Action) -> None:
        """Run an event, and then what is due."""
        due: list[Action] = []
        try:
            with self._table.lock:
                self._depth += 1
                try:
                    try:
                        event()
                    finally:
                        if self._depth == 1:  # before it is 0: events of this turn are inner ones
                            self.at_end()
                finally:
                    self._depth -= 1
                    if self._due and not self._depth:
                        due, self._due = self._due, due
        finally:
            if due:
                self._do(due)

    def follow(
        self, instructions: Iterable[Instruction], carry_out: Callable[[Instruction], None]
    ) -> None:
        """Carry instructions out, after those that are left. With the lock held."""
        left = self._instructions
        left += instructions
        if self._is_following:
            return
        self._is_following = True
        while left:
            each = left.popleft()
            try:
                carry_out(each)
            except Exception:  # the machine goes by all of them, the next ones too
                log.exception("group '%s': %s could not be carried out", self._group, each)
        self._is_following = False

    def add_due(self, action: Action) -> None:
        """Do something without the lock, in the order of these calls. With the lock held."""
        self._due.append(action)

    def _do(self, due: list[Action]) -> None:
        for action in due:
            try:
                action()
            except Exception:  # what is due to other ops must not wait for it
                log.exception("group '%s': something agreed upon could not be done", self._group)
