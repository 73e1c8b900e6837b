"""The lines that connections send on, as the kernel knows them, and what senders ask of the pacer.

``TCP_INFO`` is asked (Linux ``uapi/linux/tcp.h``): what a class above has on its line costs that
class nothing.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from dataclasses import dataclass

from allfold_agent.runtime.tunnels import PlainEnd, crosses_a_wire
from allfold_agent.traffic.pacer import Flow, LineState, Pacer

_MICROSECOND = 1e-6
# snd_mss, unacked, bytes_acked, notsent_bytes, min_rtt and data_segs_out
_INFO = struct.Struct("=16xI4xI92xQ16xII4xI")
_NO_ROUND_TRIP = 0xFFFFFFFF


class TcpLine:
    """The line of one connection over TCP, with or without TLS."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def look(self) -> LineState | None:
        """Return its state; ``None`` where it has ended."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            tunnelled = _in_tunnel(self._socket)
        except (OSError, ValueError):
            return None
        segment, unacked, acked, unsent, round_trip, segments = _INFO.unpack(info)
        return LineState(
            in_flight=unacked,
            segments=segments,
            acked=acked,
            queued=unacked * segment + unsent + tunnelled,
            round_trip=0.0 if round_trip == _NO_ROUND_TRIP else round_trip * _MICROSECOND,
        )


def _in_tunnel(connected: socket.socket) -> int:
    """Return the bytes that are to be encrypted yet; 0 without TLS."""
    if not isinstance(connected, PlainEnd):
        return 0
    waiting = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(waiting, "little")


@dataclass(frozen=True, slots=True)
class Sender:
    """The sending side of a group towards one zone: opens the flows of its connections.

    Attributes:
        level: of the group's class; 0 goes first.
    """

    pacer: Pacer
    group: str
    zone: str
    level: int

    def open(self, connected: socket.socket) -> Flow | None:
        """Return the flow of a connection; ``None`` between processes of one machine.

        These share no line with anybody, and most of what they say is where a payload lies.
        """
        if not crosses_a_wire(connected):
            return None
        return self.pacer.open(self.group, self.zone, self.level, TcpLine(connected))
