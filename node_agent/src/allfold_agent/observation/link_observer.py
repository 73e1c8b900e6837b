"""Slow and lossy links, from the kernel's counters (``TCP_INFO``, Linux ``uapi/linux/tcp.h``)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic
from typing import Any

from allfold_agent.groups.group import NodeGroup
from allfold_agent.observation.incidents import Incidents
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.diagnosis.links import ConnectionWatch, LinkSample, LinkTrouble, worst
from allfold_core.incident import Cause, Effect, Incident, link_culprit
from allfold_core.protocol.peer_link import LinkMessageType

_MICROSECOND = 1e-6
_APP_LIMITED = 0x01  # of the byte at offset 7
_BYTES = 192
# total_retrans; data_segs_out; rtt and min_rtt in us; delivery_rate; and the times in us for which
# there was data to be sent, limited by the receiver's window, and by our own buffer
_FLAGS = struct.Struct("=B")
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")


def sending(group: NodeGroup) -> Iterator[tuple[str, socket.socket]]:
    """Yield the open connections on which a group sends, each with the node at its other end."""
    for edges in (group.edges, group.p2p.edges, group.lanes):
        yield from edges.sending()


def sample(connected: socket.socket) -> LinkSample | None:
    """Return the counters of a connection; ``None`` where the kernel has none, or it is closed."""
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    except OSError:
        return None
    if len(info) < _BYTES:
        return None

    def word(at: int) -> int:
        value: int = _U32.unpack_from(info, at)[0]
        return value

    def long(at: int) -> int:
        value: int = _U64.unpack_from(info, at)[0]
        return value

    shortest = word(148)
    return LinkSample(
        at=monotonic(),
        busy=long(168) * _MICROSECOND,
        hindered=(long(176) + long(184)) * _MICROSECOND,
        segments=word(156),
        lost=word(100),
        rate=float(long(160)),
        is_bound=bool(_FLAGS.unpack_from(info, 7)[0] & _APP_LIMITED),
        round_trip=word(68) * _MICROSECOND,
        # all ones until there was one
        shortest=0.0 if shortest == 0xFFFFFFFF else shortest * _MICROSECOND,
    )


class Retransmits:
    """Counts the segments that were sent again, also over connections that are closed by now.

    What a connection has sent again between the last count and its end is not known.
    """

    def __init__(self) -> None:
        self._lock = make_lock("retransmits")
        self._total = 0
        self._counted: dict[socket.socket, int] = {}

    def count(self, connections: Iterable[socket.socket]) -> int:
        """Return the total, once the open connections are looked at; one caller at a time."""
        with self._lock:
            taken = {each: sample(each) for each in connections}
            before = self._counted
            self._counted = {each: now.lost for each, now in taken.items() if now is not None}
            self._total += sum(n - before.get(each, 0) for each, n in self._counted.items())
            return self._total


_NEWS_SECONDS = 1.0


class LinkObserver:
    """Watches what one group sends over TCP."""

    def __init__(self, group: NodeGroup, incidents: Incidents) -> None:
        self._group = group
        self._incidents = incidents
        self._watches: dict[socket.socket, ConnectionWatch] = {}
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
            watch = self._watches[connected] = watches.get(connected) or ConnectionWatch()
            taken = sample(connected)
            if taken is not None:
                found.setdefault(node, []).append(watch.judge(taken))
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
