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
from typing import Any

from allfold_agent.groups.group import NodeGroup
from allfold_agent.observation.failures import FailureObserver
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.link_observer import LinkObserver
from allfold_agent.observation.samples import GroupSampler
from allfold_agent.observation.speed_observer import SpeedObserver
from allfold_agent.observation.wait_observer import WaitObserver
from allfold_core import incident
from allfold_core.agent_answers import GroupHistory, Sample
from allfold_core.incident import Cause, Effect, Incident, node_culprit

log = logging.getLogger(__name__)

_MOST_NEWS = 4096

Pids = Mapping[tuple[str, int, str], int]


class GroupObserver:
    """Looks at one group.

    Args:
        now: monotonic.
    """

    def __init__(self, group: NodeGroup, incidents: Incidents, now: float) -> None:
        self._group = group
        self._incidents = incidents
        self._news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MOST_NEWS)
        self._sampler = GroupSampler(group, now)
        self._waits = WaitObserver(group, incidents, self._sampler)
        self._speeds = SpeedObserver(group, incidents, self._sampler, now)
        self._links = LinkObserver(group, incidents)
        self._failures = FailureObserver(group, incidents)
        self._lost = group.lost_before
        self._unreadable = set[str]()  # nodes
        group.on_observed = self.hear

    @property
    def samples(self) -> deque[Sample]:
        """One per second, the newest last."""
        return self._sampler.samples

    def hear(self, node: str, body: dict[str, Any]) -> None:
        """Take in what the observer of another node says. From any thread."""
        self._news.append((node, body))

    def look(self, now: float, wall: float, pids: Pids) -> None:
        """Look at everything once."""
        own = {
            session: pid
            for (name, opening, session), pid in pids.items()
            if (name, opening) == (self._group.name, self._group.opening)
        }
        self._take_in(now)
        self._group.hindrances.forget_lost(now)
        self._sampler.look(now, wall)
        self._waits.look(now, wall, own)
        self._speeds.look(now, wall, own)
        self._links.look(now, wall)
        self._look_at_nodes(wall)
        self._failures.look()

    def close(self, wall: float) -> None:
        """End all incidents of the group, which is over on this node."""
        self._look_at_nodes(wall)  # it may be over because of them
        self._incidents.end_all(self._group.name, self._group.opening)
        self._failures.look()
        self._group.hindrances.clear()

    def _take_in(self, now: float) -> None:
        while self._news:
            node, body = self._news.popleft()
            try:
                if "waits" in body:
                    self._waits.hear(node, body["waits"], now)
                if "messages" in body:
                    self._waits.hear_of_messages(node, body["messages"], now)
                if "own" in body:
                    self._speeds.hear(node, body["own"], now)
                if "link" in body:
                    self._links.hear(node, body["link"], now)
                if "incident" in body:
                    self._hear_incident(incident.from_dict(body["incident"]), now)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self._note_unreadable(node, error)

    def _note_unreadable(self, node: str, error: Exception) -> None:
        """Log it, once for each node: it says something some times a second."""
        if node not in self._unreadable:
            self._unreadable.add(node)
            text = "group '%s': what node %s has observed cannot be read: %r"
            log.error(text, self._group.name, node, error)

    def _hear_incident(self, found: Incident, now: float) -> None:
        self._incidents.hear(found, now)
        self._group.hindrances.take_in(found, now)

    def _look_at_nodes(self, wall: float) -> None:
        """As the leader, report the nodes that the group was left without since the last look."""
        term = self._group.agreement.term
        lost = frozenset(term.lost)
        new = sorted(lost - self._lost) if term.leader == self._group.node else []
        for node, how in new:
            is_silent = "silent" in how or "stuck" in how
            self._incidents.report(
                Incident(
                    "",
                    Cause.SILENT_NODE if is_silent else Cause.LOST_NODE,
                    Effect.FAILED,
                    node_culprit(node),
                    f"group '{self._group.name}' has lost node {node}, which {how}",
                    self._group.name,
                    self._group.opening,
                    began=wall,
                )
            )
        self._lost = lost


TICK_SECONDS = 0.25

"""By group, opening and session, the process of each local rank."""


class Observer:
    """Looks at the groups of this node.

    Args:
        groups: returns those that are open.
        pids: returns the processes of local ranks.
        incidents: takes what is found.
    """

    def __init__(
        self, groups: Callable[[], list[NodeGroup]], pids: Callable[[], Pids], incidents: Incidents
    ) -> None:
        self._groups = groups
        self._pids = pids
        self._incidents = incidents
        self._observers: dict[NodeGroup, GroupObserver] = {}
        self._failing: dict[NodeGroup, float] = {}  # since when
        self._opened: deque[NodeGroup] = deque()  # since the last look
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

    def opened(self, group: NodeGroup) -> None:
        """Look at a group that may be over before the next look. From any thread."""
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

    def _look_at(self, group: NodeGroup, now: float, wall: float, pids: Pids) -> None:
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
