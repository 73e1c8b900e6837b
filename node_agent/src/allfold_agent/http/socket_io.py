"""HTTP/1.1 over blocking sockets: h11 parses and writes the heads, bodies never pass through it.

A body goes straight between the socket and its memory (:func:`receive_into`, :func:`send_views`).
For that a reader has to know what h11 read past the head: those bytes are ``early``. Every
function takes a deadline on :func:`time.monotonic`'s clock, or a timeout that it makes one from.
This module has what :mod:`~allfold_agent.http.server` and :mod:`~allfold_agent.http.client` share.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from time import monotonic

import h11

from allfold_core.errors import AllfoldError

HEAD_LIMIT = 64 * 1024
Headers = Sequence[tuple[str, str]]
RECEIVE_BYTES = 64 * 1024
_JOINED_BYTES = 16 * 1024


class BrokenBody(ConnectionError):
    """The peer ended the connection before the body that it announced was complete."""


def arm(sock: socket.socket, deadline: float) -> None:
    """Bound the next blocking call of the socket by the deadline."""
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(left)


def receive_into(sock: socket.socket, view: memoryview, *, stall: float, deadline: float) -> None:
    """Fill ``view`` from the socket, whose bytes may pause for ``stall`` seconds at most."""
    received = 0
    while received < len(view):
        received += receive_some(sock, view[received:], stall=stall, deadline=deadline)


def receive_some(sock: socket.socket, view: memoryview, *, stall: float, deadline: float) -> int:
    """Receive into the beginning of ``view``; how many bytes there were, at least one."""
    arm(sock, min(deadline, monotonic() + stall))
    count = sock.recv_into(view)
    if not count:
        raise BrokenBody(f"the connection ended with {len(view)} bytes still to come")
    return count


def send_views(
    sock: socket.socket, *views: bytes | memoryview, stall: float, deadline: float
) -> None:
    """Send all views in one go where they fit, so that a head does not cost a packet of its own."""
    pending = [memoryview(view) for view in views if len(view)]
    while pending:
        arm(sock, min(deadline, monotonic() + stall))
        sent = _send_some(sock, pending)
        while pending and sent >= len(pending[0]):
            sent -= len(pending.pop(0))
        if sent:
            pending[0] = pending[0][sent:]


def _send_some(sock: socket.socket, pending: list[memoryview]) -> int:
    """Send the beginning of some views. TLS has no such call: few bytes are joined for it."""
    if not isinstance(sock, ssl.SSLSocket):
        return sock.sendmsg(pending)
    if len(pending) > 1 and sum(map(len, pending)) <= _JOINED_BYTES:
        return sock.send(b"".join(pending))
    return sock.send(pending[0])


def header_dict(event: h11.Request | h11.Response | h11.InformationalResponse) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def tokens(value: str) -> set[str]:
    """The elements of a comma-separated header, in lower case."""
    return {token.strip().lower() for token in value.split(",") if token.strip()}


def trailing(connection: h11.Connection) -> bytes:
    return bytes(connection.trailing_data[0])


def status_of(error: AllfoldError) -> int:
    """The status that an error is sent with: its ``http_status`` detail or that of its class."""
    return int(error.details.get("http_status", error.status))


def shortcut(host: str, port: int) -> str | None:
    """The Unix socket beside a data port on loopback, ``None`` for any other port.

    Loopback belongs to one network namespace, and so do abstract Unix sockets: who can reach the
    one can reach the other. Through the Unix socket a byte costs about half of what it costs
    through TCP.
    """
    is_loopback = host.startswith("127.") or host == "::1"
    return f"\0allfold-data-{host}-{port}" if is_loopback else None
