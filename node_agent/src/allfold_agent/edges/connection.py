"""The connection of an edge: its options and its counters, for both ends."""

from __future__ import annotations

import logging
import select
import socket
from dataclasses import dataclass

log = logging.getLogger(__name__)

LOOPBACK_BUFFER = 512 * 1024
# How long the receiver tries to open an edge again that has broken.
RECONNECT_SECONDS = 1.0


@dataclass
class EdgeCounters:
    """Payload traffic of one direction, without headers and without frames sent again.

    Attributes:
        scrapped_frames: frames that have come, beside the others, but that nobody wanted any more.
    """

    payload_bytes: int = 0
    frames: int = 0
    scrapped_frames: int = 0


def tune(connected: socket.socket) -> None:
    """Set the socket buffers where the kernel's choice is bad.

    Between machines the kernel adapts them to the link. On loopback there is no link to fill, and
    what is queued beyond the caches is fetched from memory again: half a MiB was fastest.
    """
    # Not by the address of the peer: a connection that it has reset already has none.
    if connected.family == socket.AF_UNIX or _is_loopback(connected.getsockname()[0]):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def await_bytes(connected: socket.socket, seconds: float) -> None:
    """Wait until there is something to be read, or the connection has ended."""
    try:
        readable = select.poll()
        readable.register(connected, select.POLLIN)
        readable.poll(seconds * 1000)
    except (OSError, ValueError) as error:
        log.debug("the connection is gone: %s", error)
