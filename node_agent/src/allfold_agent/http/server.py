"""The serving side of a data connection: one request after the other, and their responses."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from time import monotonic
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from allfold_agent.http.socket_io import (
    HEAD_LIMIT,
    RECEIVE_BYTES,
    Headers,
    arm,
    header_dict,
    send_views,
    status_of,
    tokens,
    trailing,
)
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError

LINGER = 2.0
# What a peer has to manage all the same, so that a trickle does not hold memory without end.
SLOWEST_RATE = 64 * 1024


class BadRequest(Exception):
    """Bytes that are no request; ``status`` is what to answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def transfer_deadline(nbytes: int, stall: float) -> float:
    """Return the time by which ``nbytes`` must be through, whatever the pauses."""
    return monotonic() + stall + nbytes / SLOWEST_RATE


def peer_is_there(sock: socket.socket) -> bool:
    """Return True unless the peer has closed its end. Never waits, and takes no byte."""
    sock.setblocking(False)
    try:
        # Not that of SSLSocket, which cannot peek.
        return bool(socket.socket.recv(sock, 1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def close_gently(sock: socket.socket, linger: float = LINGER) -> None:
    """Close after the peer had a chance to read our last words.

    A socket that is closed with unread bytes resets the connection, and a reset may overtake the
    error that we sent: the peer would see a broken connection instead of the reason.
    """
    deadline = monotonic() + linger
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while monotonic() < deadline:
            arm(sock, deadline)
            if not sock.recv(RECEIVE_BYTES):
                break
    sock.close()


class HttpExchange:
    """One request of a server's connection, and its response.

    Attributes:
        method: in capitals.
        path: the target's segments, percent-decoded.
        query: the target's parameters; a repeated one is refused.
        headers: by lower-case name.
        early: bytes received but not consumed: the body's beginning or the next request.
        body_left: bytes of the request's body, which no route of ours reads.
        keep_alive: whether the connection serves another request afterwards.
        answered: whether a response was begun.
    """

    def __init__(
        self, sock: socket.socket, connection: h11.Connection, request: h11.Request | None
    ) -> None:
        self.sock = sock
        self._h11 = connection
        self.method = request.method.decode("ascii") if request else ""
        self.headers = header_dict(request) if request else {}
        self.early = trailing(connection)
        self.answered = False
        self.body_left = int(self.headers.get("content-length", 0))
        self.keep_alive = (
            request is not None
            and request.http_version >= b"1.1"
            and "close" not in tokens(self.headers.get("connection", ""))
            # A chunked body has no length: what follows cannot be found without parsing it.
            and "transfer-encoding" not in self.headers
        )
        self.path, self.query = _parse_target(request.target) if request else ((), {})

    def wants(self, protocol: str) -> bool:
        """Return True if the client asks to switch to this protocol."""
        return "upgrade" in tokens(
            self.headers.get("connection", "")
        ) and protocol.lower() in tokens(self.headers.get("upgrade", ""))

    def respond(
        self,
        status: int,
        headers: Headers = (),
        body: bytes | memoryview = b"",
        *,
        stall: float,
        deadline: float,
    ) -> None:
        """Send a response. ``Content-Length`` is the body's unless ``headers`` has one."""
        self.answered = True
        if self.body_left:
            self.keep_alive = False
        out = [("Date", formatdate(usegmt=True)), *headers]
        if status != 204 and not any(name == "Content-Length" for name, _ in headers):
            out.append(("Content-Length", str(len(body))))
        if not self.keep_alive:
            out.append(("Connection", "close"))
        head = self._h11.send(
            h11.Response(status_code=status, headers=out, reason=HTTPStatus(status).phrase)
        )
        shown = b"" if self.method == "HEAD" else body
        send_views(self.sock, head or b"", shown, stall=stall, deadline=deadline)

    def refuse(self, error: AllfoldError, headers: Headers = (), *, timeout: float) -> None:
        """Send an error as JSON, with the status of its class or its ``http_status`` detail."""
        body = json.dumps({"error": error.to_dict()}, default=str).encode()
        headers = [*headers, ("Content-Type", "application/json")]
        self.respond(status_of(error), headers, body, stall=timeout, deadline=monotonic() + timeout)

    def switch(self, protocol: str, *, timeout: float) -> None:
        """Answer ``101``: what follows on the socket belongs to the protocol."""
        self.answered = True
        self._h11.next_event()  # the end of the request, after which h11 lets us switch
        head = self._h11.send(
            h11.InformationalResponse(
                status_code=101, headers=[("Connection", "Upgrade"), ("Upgrade", protocol)]
            )
        )
        send_views(self.sock, head or b"", stall=timeout, deadline=monotonic() + timeout)


def _parse_target(target: bytes) -> tuple[tuple[str, ...], dict[str, str]]:
    try:
        parts = urlsplit(target.decode("ascii"))
        path = tuple(unquote(part, errors="strict") for part in parts.path.split("/")[1:])
        pairs = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=32, errors="strict")
    except ValueError as error:
        raise BadRequest(f"cannot read the target {target!r}: {error}", 400) from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise BadRequest(f"a parameter is given twice: {parts.query}", 400)
    return path, query


def read_request(
    sock: socket.socket, early: bytes, *, idle: float, timeout: float
) -> HttpExchange | None:
    """The next request of a connection; ``None`` when the peer has none any more.

    ``idle`` seconds may pass until its first byte, ``timeout`` from then to the end of its head.
    Raises :class:`BadRequest` for bytes that are no request.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
    if not early:
        sock.settimeout(idle)
        with suppress(TimeoutError):
            early = sock.recv(RECEIVE_BYTES)
        if not early:
            return None
    connection.receive_data(early)
    deadline = monotonic() + timeout
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            arm(sock, deadline)
            connection.receive_data(sock.recv(RECEIVE_BYTES))
    except h11.RemoteProtocolError as error:
        raise BadRequest(str(error), error.error_status_hint) from None
    if isinstance(event, h11.Request):
        return HttpExchange(sock, connection, event)
    raise ConnectionAbortedError("the connection ended inside a request's head")


def refuse_blindly(sock: socket.socket, error: AllfoldError, *, timeout: float) -> None:
    """Answer an error to a client whose request was not, or could not be, read."""
    connection = h11.Connection(h11.SERVER)
    HttpExchange(sock, connection, None).refuse(error, timeout=timeout)


def allow(exchange: HttpExchange, *methods: str) -> None:
    """Refuse a request with any other method: status 405."""
    if exchange.method not in methods:
        allowed = ", ".join(methods)
        message = f"{exchange.method} is not possible here, only {allowed}"
        raise LocalError(message, http_status=405, allowed=allowed)


def whole_number(name: str, text: str, limit: int) -> int:
    """The value of a parameter; :class:`InvalidArgument` unless it is from 0 to below ``limit``."""
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < limit):
        raise InvalidArgument(f"{name} is {text[:40]!r}, expected a number below {limit}")
    return int(text)
