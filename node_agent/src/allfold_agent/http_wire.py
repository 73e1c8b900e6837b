"""HTTP/1.1 over blocking sockets: h11 parses and writes the heads, bodies never pass through it.

A body goes straight between the socket and its memory (:func:`receive_into`, :func:`send_views`).
For that a reader has to know what h11 read past the head: those bytes are ``early``. Every
function takes a deadline on :func:`time.monotonic`'s clock, or a timeout that it makes one from.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import termios
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from time import monotonic, sleep
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

from allfold_core.errors import AllfoldError, InvalidArgument, PeerError, PeerLost, from_dict

HEAD_LIMIT = 64 * 1024
ERROR_LIMIT = 64 * 1024
LINGER = 2.0

# What a peer has to manage all the same, so that a trickle does not hold memory for ever.
SLOWEST_RATE = 64 * 1024

Headers = Sequence[tuple[str, str]]
_RECEIVE = 64 * 1024


class BrokenBody(ConnectionError):
    """The peer ended the connection before the body that it announced was complete."""


class BadRequest(Exception):
    """Bytes that are no request; ``status`` is what to answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


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
        sent = sock.sendmsg(pending)
        while pending and sent >= len(pending[0]):
            sent -= len(pending.pop(0))
        if sent:
            pending[0] = pending[0][sent:]


def transfer_deadline(nbytes: int, stall: float) -> float:
    """When ``nbytes`` have to be through, whatever the pauses."""
    return monotonic() + stall + nbytes / SLOWEST_RATE


def peer_is_there(sock: socket.socket) -> bool:
    """Whether the peer has not closed its end. Looks, never waits, and takes no byte."""
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def await_delivery(sock: socket.socket, *, grace: float, deadline: float) -> None:
    """Return once the peer has what was sent; ``OSError`` where the connection broke instead.

    What the kernel accepted may be megabytes ahead of what the peer got. So wait for the peer's
    kernel to acknowledge it all, after the peer said something more (its next request, or that it
    is done) or had ``grace`` seconds to: a process that dies with bytes unread makes its kernel
    reset the connection. One that dies later than that, or with nothing unread, goes unnoticed.
    """
    with suppress(TimeoutError):
        arm(sock, min(deadline, monotonic() + grace))
        sock.recv(1, socket.MSG_PEEK)
    while True:
        unacknowledged = _unacknowledged(sock)  # stays as it was when the connection is reset
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        if not unacknowledged:
            return
        if monotonic() >= deadline:
            raise TimeoutError("the peer does not take what was sent")
        sleep(0.01)


def _unacknowledged(sock: socket.socket) -> int:
    try:
        answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL):  # not a system that can tell
            return 0
        raise
    return int(struct.unpack("i", answer)[0])


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
            if not sock.recv(_RECEIVE):
                break
    sock.close()


def _header_dict(event: h11.Request | h11.Response | h11.InformationalResponse) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def check_token(token: str) -> str:
    """A join token that a header can carry. The error does not show it."""
    if not (token and all("!" <= character <= "~" for character in token)):
        raise InvalidArgument("the join token must be visible ASCII characters without spaces")
    return token


def tokens(value: str) -> set[str]:
    """The elements of a comma-separated header, in lower case."""
    return {token.strip().lower() for token in value.split(",") if token.strip()}


def _trailing(connection: h11.Connection) -> bytes:
    return bytes(connection.trailing_data[0])


# ---------------------------------------------------------------------------------------- server


def status_of(error: AllfoldError) -> int:
    """The status that an error is sent with: its ``http_status`` detail or that of its class."""
    return int(error.details.get("http_status", error.status))


class Exchange:
    """One request of a server's connection, and its response.

    Attributes:
        method: in capitals.
        path: the target's segments, percent-decoded.
        query: the target's parameters; a repeated one is refused.
        headers: by lower-case name.
        early: bytes received but not consumed: the body's beginning or the next request.
        body_left: bytes of the request's body that nobody has consumed.
        keep_alive: whether the connection serves another request afterwards.
        answered: whether a response was begun.
    """

    def __init__(
        self, sock: socket.socket, connection: h11.Connection, request: h11.Request | None
    ) -> None:
        self.sock = sock
        self._h11 = connection
        self.method = request.method.decode("ascii") if request else ""
        self.headers = _header_dict(request) if request else {}
        self.early = _trailing(connection)
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
        """Whether the client asks to switch to this protocol."""
        return "upgrade" in tokens(
            self.headers.get("connection", "")
        ) and protocol.lower() in tokens(self.headers.get("upgrade", ""))

    def receive_body(self, view: memoryview, *, stall: float, deadline: float) -> int:
        """Receive the body's next bytes into ``view``; how many there were, at least one."""
        view = view[: self.body_left]
        if self.early:
            count = min(len(self.early), len(view))
            view[:count] = self.early[:count]
            self.early = self.early[count:]
        else:
            self._allow_body(deadline)
            count = receive_some(self.sock, view, stall=stall, deadline=deadline)
        self.body_left -= count
        return count

    def _allow_body(self, deadline: float) -> None:
        if self._h11.they_are_waiting_for_100_continue:
            head = self._h11.send(h11.InformationalResponse(status_code=100, headers=[]))
            send_views(self.sock, head or b"", stall=deadline, deadline=deadline)

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
) -> Exchange | None:
    """The next request of a connection; ``None`` when the peer has none any more.

    ``idle`` seconds may pass until its first byte, ``timeout`` from then to the end of its head.
    Raises :class:`BadRequest` for bytes that are no request.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
    if not early:
        sock.settimeout(idle)
        with suppress(TimeoutError):
            early = sock.recv(_RECEIVE)
        if not early:
            return None
    connection.receive_data(early)
    deadline = monotonic() + timeout
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            arm(sock, deadline)
            connection.receive_data(sock.recv(_RECEIVE))
    except h11.RemoteProtocolError as error:
        raise BadRequest(str(error), error.error_status_hint) from None
    if isinstance(event, h11.Request):
        return Exchange(sock, connection, event)
    raise ConnectionAbortedError("the connection ended inside a request's head")


def refuse_blindly(sock: socket.socket, error: AllfoldError, *, timeout: float) -> None:
    """Answer an error to a client whose request was not, or could not be, read."""
    connection = h11.Connection(h11.SERVER)
    Exchange(sock, connection, None).refuse(error, timeout=timeout)


# ---------------------------------------------------------------------------------------- client


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response's status and headers (by lower-case name), and what was read past its head."""

    status: int
    headers: dict[str, str]
    early: bytes


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"address {address!r}: an IPv6 host needs brackets", address=address)
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidArgument(f"address {address!r} is not host:port", address=address)
    return host, int(port)


def shortcut(host: str, port: int) -> str | None:
    """The Unix socket beside a data port on loopback, ``None`` for any other port.

    Loopback belongs to one network namespace, and so do abstract Unix sockets: who can reach the
    one can reach the other. Through the Unix socket a byte costs about half of what it costs
    through TCP.
    """
    is_loopback = host.startswith("127.") or host == "::1"
    return f"\0allfold-data-{host}-{port}" if is_loopback else None


def _connect_edge(address: str, deadline: float) -> socket.socket:
    """A connection for an edge: the shortcut where there is one, else TCP."""
    path = shortcut(*parse_address(address))
    if path is not None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            arm(sock, deadline)
            sock.connect(path)
        except OSError:
            sock.close()  # an address that only leads to loopback here, through a tunnel, say
        else:
            return sock
    return connect(address, deadline)


def connect(address: str, deadline: float) -> socket.socket:
    """A connection without delay of small packets. ``OSError`` when there is none to be had."""
    host, port = parse_address(address)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise InvalidArgument(f"{host[:300]!r} cannot be a host: {error}") from None
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, proto, _, place in places:
        sock = socket.socket(family, kind, proto)
        try:
            arm(sock, deadline)
            sock.connect(place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


class ClientExchange:
    """One request on a client's connection, and its response."""

    def __init__(
        self, address: str, method: str, target: str, headers: Headers, token: str | None
    ) -> None:
        sent = [("Host", address), *headers]
        if token is not None:
            sent.append(("Authorization", f"Bearer {check_token(token)}"))
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        try:
            request = h11.Request(method=method, target=target, headers=sent)
            self.head = self._h11.send(request) or b""
        except h11.LocalProtocolError as error:
            raise InvalidArgument(f"cannot request {target!r}: {error}", target=target) from None

    def end_request(self) -> None:
        """Tell h11 that the request has no body, which it has to know before a switch."""
        self._h11.send(h11.EndOfMessage())

    def read_head(self, sock: socket.socket, deadline: float) -> ResponseHead:
        """The response's head, or ``100`` or ``101``; other interim responses are skipped."""
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                arm(sock, deadline)
                self._h11.receive_data(sock.recv(_RECEIVE))
            elif isinstance(event, h11.Response) or (
                isinstance(event, h11.InformationalResponse) and event.status_code in (100, 101)
            ):
                headers = _header_dict(event)
                return ResponseHead(event.status_code, headers, _trailing(self._h11))
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionAbortedError("the connection ended before a response")


def read_error(
    sock: socket.socket, head: ResponseHead, address: str, deadline: float
) -> AllfoldError:
    """The error that an agent sent as JSON; a :class:`PeerError` for any other response."""
    length = head.headers.get("content-length", "")
    body = head.early
    if length.isdigit() and int(length) <= ERROR_LIMIT:
        memory = bytearray(max(int(length), len(body)))
        memory[: len(body)] = body
        rest = memoryview(memory)[len(body) :]
        receive_into(sock, rest, stall=deadline, deadline=deadline)
        body = bytes(memory)
    return _parse_error(head.status, body, address)


def _parse_error(status: int, body: bytes, address: str) -> AllfoldError:
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        error = json.loads(body)["error"]
        if isinstance(error["code"], str):
            return from_dict(error)
    return PeerError(
        f"{address} answered {status} without an Allfold error: not an agent's data port?",
        address=address,
        http_status=status,
    )


def upgrade(
    address: str, target: str, protocol: str, token: str | None, timeout: float
) -> tuple[socket.socket, bytes]:
    """Connect and switch the connection to ``protocol``.

    Returns the socket, blocking without timeout, and the bytes of the protocol that came along
    with the response's head. Raises what the server refused with, or :class:`PeerLost` where no
    server could be reached or answered in time.
    """
    headers = [("Connection", "Upgrade"), ("Upgrade", protocol)]
    exchange = ClientExchange(address, "GET", target, headers, token)
    deadline = monotonic() + timeout
    sock: socket.socket | None = None
    try:
        sock = _connect_edge(address, deadline)
        head = _request_switch(sock, exchange, address, protocol, deadline)
    except (OSError, h11.RemoteProtocolError) as error:
        if sock is not None:
            sock.close()
        if isinstance(error, AllfoldError):  # a PeerMissing is a TimeoutError is an OSError
            raise
        raise PeerLost(f"{address} is lost: {error} ({target})", address=address) from error
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    sock.settimeout(None)
    return sock, head.early


def _request_switch(
    sock: socket.socket, exchange: ClientExchange, address: str, protocol: str, deadline: float
) -> ResponseHead:
    exchange.end_request()
    send_views(sock, exchange.head, stall=deadline, deadline=deadline)
    head = exchange.read_head(sock, deadline)
    if head.status != 101:
        raise read_error(sock, head, address, deadline)
    if protocol.lower() not in tokens(head.headers.get("upgrade", "")):
        raise PeerError(f"{address} switched to another protocol than {protocol}", address=address)
    return head
