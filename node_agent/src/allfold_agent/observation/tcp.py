"""The kernel's counters of a TCP connection (``TCP_INFO``, Linux ``include/uapi/linux/tcp.h``)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.runtime.locks import make_lock
from allfold_core.diagnosis.links import LinkSample

if TYPE_CHECKING:
    from allfold_agent.groups.group import Group

_MICROSECOND = 1e-6
_APP_LIMITED = 0x01  # of the byte at offset 7
_BYTES = 192
# total_retrans; data_segs_out; rtt and min_rtt in us; delivery_rate; and the times in us for which
# there was data to be sent, limited by the receiver's window, and by our own buffer
_FLAGS = struct.Struct("=B")
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")


def sending(group: Group) -> Iterator[tuple[str, socket.socket]]:
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
