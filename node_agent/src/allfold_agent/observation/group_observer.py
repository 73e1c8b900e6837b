"""The observer of one group on this node: what ops wait for, slow ranks, slow links, lost nodes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from allfold_agent.groups.group import Group
from allfold_agent.observation.failures import FailureObserver
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.link_observer import LinkObserver
from allfold_agent.observation.samples import GroupSampler
from allfold_agent.observation.speed_observer import SpeedObserver
from allfold_agent.observation.wait_observer import WaitObserver
from allfold_core import incident
from allfold_core.agent_answers import Sample
from allfold_core.incident import Cause, Effect, Incident, node_culprit

log = logging.getLogger(__name__)

_MOST_NEWS = 4096

Pids = Mapping[tuple[str, int, str], int]


class GroupObserver:
    """Looks at one group.

    Args:
        now: monotonic.
    """

    def __init__(self, group: Group, incidents: Incidents, now: float) -> None:
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
        self._group.hindrances.note(found, now)

    def _look_at_nodes(self, wall: float) -> None:
        """As the leader, report the nodes that the group was left without since the last look."""
        term = self._group.agreement.term
        lost = frozenset(term.lost)
        new = sorted(lost - self._lost) if term.leader == self._group.node else []
        for node, how in new:
            is_silent = "silent" in how or "stuck" in how
            self._incidents.note(
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
