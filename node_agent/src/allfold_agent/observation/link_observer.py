"""Slow and lossy links: the connections over which this node sends to others of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from allfold_agent.groups.group import Group
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.tcp import sample
from allfold_core.diagnosis.links import LinkTrouble, LinkWatch, worst
from allfold_core.incident import Effect, Incident, link_culprit


class LinkObserver:
    """Watches what one group sends over TCP."""

    def __init__(self, group: Group, incidents: Incidents) -> None:
        self._group = group
        self._incidents = incidents
        self._watches: dict[socket.socket, LinkWatch] = {}
        self._troubled: set[str] = set()  # the nodes to which a link is slow or lossy

    def look(self, wall: float) -> None:
        """Look once at each connection."""
        watches, self._watches = self._watches, {}
        found: dict[str, list[LinkTrouble | None]] = {}
        for node, connected in self._connections():
            watch = self._watches[connected] = watches.get(connected) or LinkWatch()
            taken = sample(connected)
            if taken is not None:
                found.setdefault(node, []).append(watch.note(taken))
        before, self._troubled = self._troubled, set()
        for node, troubles in found.items():
            trouble = worst(troubles)
            if trouble is not None:
                self._troubled.add(node)
                self._open(node, trouble, wall)
        for node in before - self._troubled:
            self._incidents.end(self._key(node))

    def _connections(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield what sends to other machines, with the node at its other end."""
        group = self._group
        for edges in (group.edges, group.p2p.edges, group.lanes):
            for node, connected in edges.sending():
                if connected.family != socket.AF_UNIX:
                    yield node, connected

    def _open(self, node: str, trouble: LinkTrouble, wall: float) -> None:
        group = self._group
        culprit = link_culprit(group.node, node)
        self._incidents.open(
            self._key(node),
            Incident(
                "",
                trouble.cause,
                Effect.SLOW,
                culprit,
                f"group '{group.name}': {culprit} {trouble.phrase}",
                group.name,
                group.opening,
                began=wall - 1.0,
                evidence=trouble.evidence,
            ),
        )

    def _key(self, node: str) -> tuple[str, int, str, str]:
        return self._group.name, self._group.opening, "link", node
