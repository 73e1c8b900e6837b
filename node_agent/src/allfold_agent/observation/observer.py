"""The observer: a thread that looks at all groups of this node, some times a second.

It reads what is there anyway (the flight recorder, the page of the short lane, the kernel's
accounts), so ops pay nothing for it. If it fails, it says so in the log, and nothing else suffers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from threading import Event, Thread
from time import monotonic, time

from allfold_agent.groups.group import Group
from allfold_agent.observation.group_observer import GroupObserver
from allfold_agent.observation.incidents import Incidents
from allfold_core.agent_answers import GroupHistory

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25

Pids = Mapping[tuple[str, int, str], int]
"""By group, opening and session, the process of each local rank."""


class Observer:
    """Looks at the groups of this node.

    Args:
        groups: returns those that are open.
        pids: returns the processes of local ranks.
        incidents: takes what is found.
    """

    def __init__(
        self, groups: Callable[[], list[Group]], pids: Callable[[], Pids], incidents: Incidents
    ) -> None:
        self._groups = groups
        self._pids = pids
        self._incidents = incidents
        self._observers: dict[Group, GroupObserver] = {}
        self._failing: dict[Group, float] = {}  # since when
        self._opened: deque[Group] = deque()  # since the last look
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="allfold-observer", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def opened(self, group: Group) -> None:
        """Have a group looked at that may be over before the next look. From any thread."""
        self._opened.append(group)

    def history(self, since: float) -> list[GroupHistory]:
        """Return the samples of each group, second by second.

        Args:
            since: seconds since 1970; older ones are left out.
        """
        return [
            {
                "name": group.name,
                "opening": group.opening,
                "samples": [each for each in [*observer.samples] if each["at"] > since],
            }
            for group, observer in list(self._observers.items())
        ]

    def _run(self) -> None:
        while not self._stopping.wait(TICK_SECONDS):
            try:
                self.look(monotonic(), time())
            except Exception:
                log.exception("the observer could not look at the groups; it goes on")

    def look(self, now: float, wall: float) -> None:
        """Look at all groups once.

        Args:
            now: monotonic.
            wall: seconds since 1970.
        """
        opened = [self._opened.popleft() for _ in range(len(self._opened))]
        groups, pids = self._groups(), self._pids()
        for group in dict.fromkeys([*opened, *groups]):
            self._look_at(group, now, wall, pids)
        for group in self._observers.keys() - groups:
            self._failing.pop(group, None)
            self._observers.pop(group).close(wall)
        self._incidents.repeat(now)

    def _look_at(self, group: Group, now: float, wall: float, pids: Pids) -> None:
        """Look at one group; where that fails, the others are looked at all the same."""
        try:
            observer = self._observers.get(group)
            if observer is None:
                observer = self._observers[group] = GroupObserver(group, self._incidents, now)
            observer.look(now, wall, pids)
        except Exception:
            if group not in self._failing:  # some times a second would fill the log
                log.exception("the observer cannot look at group '%s'; it goes on", group.name)
            self._failing.setdefault(group, now)
        else:
            began = self._failing.pop(group, None)
            if began is not None:
                text = "the observer can look at group '%s' again, after %.1f s"
                log.info(text, group.name, now - began)
