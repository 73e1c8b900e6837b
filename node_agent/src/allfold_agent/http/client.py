"""The asking side of a data connection: requests, their responses, and the switch to an edge."""

from __future__ import annotations

import errno
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any

import h11

from allfold_agent.http.addresses import parse_address
from allfold_agent.http.wire import (
    HEAD_LIMIT,
    RECEIVE_BYTES,
    Headers,
    arm,
    check_token,
    header_dict,
    receive_into,
    send_views,
    shortcut,
    tokens,
    trailing,
)
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    PeerError,
    PeerLost,
    ServiceError,
    from_dict,
)

BODY_LIMIT = 64 * 1024
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response's status and headers (by lower-case name), and what was read past its head."""

    status: int
    headers: dict[str, str]
    early: bytes


def connect_shortly(address: str, deadline: float) -> socket.socket:
    """A connection for much data: the shortcut where there is one, else TCP."""
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
    except OSError:
        # Without file descriptors it fails with whatever error there was before: say which it is.
        socket.socket().close()
        raise
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
                self._h11.receive_data(sock.recv(RECEIVE_BYTES))
            elif isinstance(event, h11.Response) or (
                isinstance(event, h11.InformationalResponse) and event.status_code in (100, 101)
            ):
                headers = header_dict(event)
                return ResponseHead(event.status_code, headers, trailing(self._h11))
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionAbortedError("the connection ended before a response")


def get_json(address: str, target: str, token: str | None, timeout: float) -> dict[str, Any]:
    """Return the JSON object that an agent or orchestrator answers.

    Raises:
        AllfoldError: what the server refused with; a :class:`PeerError` for any other answer.
        OSError: no server could be reached, or answered in time.
    """
    exchange = ClientExchange(address, "GET", target, [("Connection", "close")], token)
    exchange.end_request()
    deadline = monotonic() + timeout
    with connect(address, deadline) as sock:
        send_views(sock, exchange.head, stall=timeout, deadline=deadline)
        try:
            head = exchange.read_head(sock, deadline)
        except h11.RemoteProtocolError as error:
            raise PeerError(f"{address} does not answer in HTTP: {error}") from error
        if head.status != HTTPStatus.OK:
            refusal = read_error(sock, head, address, deadline)
            refusal.details.setdefault("http_status", head.status)
            raise refusal
        body = _read_body(sock, head, deadline)
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PeerError(f"{address} answers {target}, but not as Allfold does", address=address)
    return answer


def read_error(
    sock: socket.socket, head: ResponseHead, address: str, deadline: float
) -> AllfoldError:
    """The error that an agent sent as JSON; a :class:`PeerError` for any other response."""
    return _parse_error(head.status, _read_body(sock, head, deadline), address)


def _read_body(sock: socket.socket, head: ResponseHead, deadline: float) -> bytes:
    """A body of a known and small length; of another one what came along with the head."""
    length = head.headers.get("content-length", "")
    body = head.early
    if length.isdigit() and int(length) <= BODY_LIMIT:
        memory = bytearray(max(int(length), len(body)))
        memory[: len(body)] = body
        rest = memoryview(memory)[len(body) :]
        receive_into(sock, rest, stall=deadline, deadline=deadline)
        body = bytes(memory)
    return body


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
    with the response's head.

    Raises:
        AllfoldError: what the server refused with.
        PeerLost: no server could be reached, or answered in time.
        ServiceError: this process has no file descriptor left, which is not the server's fault.
    """
    headers = [("Connection", "Upgrade"), ("Upgrade", protocol)]
    exchange = ClientExchange(address, "GET", target, headers, token)
    deadline = monotonic() + timeout
    sock: socket.socket | None = None
    try:
        sock = connect_shortly(address, deadline)
        head = _request_switch(sock, exchange, address, protocol, deadline)
    except (OSError, h11.RemoteProtocolError) as error:
        if sock is not None:
            sock.close()
        if isinstance(error, AllfoldError):  # a PeerMissing is a TimeoutError is an OSError
            raise
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
            raise ServiceError(
                f"the node agent cannot connect to {address}: {error}; raise its limit of open "
                "files (ulimit -n)"
            ) from error
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
