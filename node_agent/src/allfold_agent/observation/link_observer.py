"""Slow and lossy links: the connections over which this node sends to others of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

from allfold_agent.groups.group import Group
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.tcp import sample, sending
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.diagnosis.links import LinkTrouble, LinkWatch, worst
from allfold_core.incident import Cause, Effect, Incident, link_culprit
from allfold_core.wire.peer_link import LinkMessageType

_NEWS_SECONDS = 1.0


class LinkObserver:
    """Watches what one group sends over TCP."""

    def __init__(self, group: Group, incidents: Incidents) -> None:
        self._group = group
        self._incidents = incidents
        self._watches: dict[socket.socket, LinkWatch] = {}
        self._slow: dict[str, float] = {}  # by node, the rate of a slow link to it
        self._heard: dict[str, tuple[float, float]] = {}  # that of its link to us, when
        self._open: set[str] = set()

    def hear(self, node: str, body: Mapping[str, Any], now: float) -> None:
        """Take in that another node's link to this one is slow."""
        self._heard[node] = float(body["rate"]), now

    def look(self, now: float, wall: float) -> None:
        """Look once at each connection."""
        troubles = self._troubles()
        before, self._slow = self._slow, {}
        still_open = set[str]()
        for node, trouble in troubles.items():
            rate = trouble.evidence.get("rate")
            if trouble.cause is Cause.SLOW_LINK and rate is not None:
                self._slow[node] = rate
                self._group.send(node, LinkMessageType.OBSERVED, {"link": {"rate": rate}})
                # Twice before it is reported, as the other node may say that it is its own link.
                is_new = node not in before and node not in self._open
                if is_new or self._is_slower_backwards(node, rate, now):
                    continue
            still_open.add(node)
            self._report(node, trouble, wall)
        for node in self._open - still_open:
            self._incidents.end(self._key(node))
        self._open = still_open

    def _is_slower_backwards(self, node: str, rate: float, now: float) -> bool:
        """Return True if it is the acknowledgements that are slow: the link from the other node."""
        other, heard = self._heard.get(node, (rate, float("-inf")))
        return now - heard < _NEWS_SECONDS and other < rate

    def _troubles(self) -> dict[str, LinkTrouble]:
        """Return what is wrong with the link to each node, if anything."""
        watches, self._watches = self._watches, {}
        found: dict[str, list[LinkTrouble | None]] = {}
        for node, connected in self._connections():
            watch = self._watches[connected] = watches.get(connected) or LinkWatch()
            taken = sample(connected)
            if taken is not None:
                found.setdefault(node, []).append(watch.note(taken))
        worst_ones = {node: worst(each) for node, each in found.items()}
        return {node: each for node, each in worst_ones.items() if each is not None}

    def _connections(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield what sends to other machines, with the node at its other end."""
        for node, connected in sending(self._group):
            if crosses_a_wire(connected):
                yield node, connected

    def _report(self, node: str, trouble: LinkTrouble, wall: float) -> None:
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
