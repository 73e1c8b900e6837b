"""The asking side of a data connection: requests, their responses, and the switch to an edge."""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any

import h11

from allfold_agent.http.socket_io import (
    HEAD_LIMIT,
    RECEIVE_BYTES,
    Headers,
    arm,
    header_dict,
    receive_into,
    send_views,
    tokens,
    trailing,
)
from allfold_agent.http.transport import Transport
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    PeerError,
    PeerLost,
    ServiceError,
    from_dict,
)
from allfold_core.schema import read_object
from allfold_service import tls
from allfold_service.credentials import Tokens

BODY_LIMIT = 64 * 1024
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response's status and headers (by lower-case name), and what was read past its head."""

    status: int
    headers: dict[str, str]
    early: bytes


class ClientExchange:
    """One request on a client's connection, and its response."""

    def __init__(
        self, address: str, method: str, target: str, headers: Headers, tokens: Tokens
    ) -> None:
        sent = [("Host", address), *headers, *tokens.headers().items()]
        self._address = address
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        try:
            request = h11.Request(method=method, target=target, headers=sent)
            self.head = self._h11.send(request) or b""
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise InvalidArgument(f"cannot request {target!r}: {error}", target=target) from None

    def end_request(self) -> None:
        """Tell h11 that the request has no body, which it has to know before a switch."""
        self._h11.send(h11.EndOfMessage())

    def read_head(self, sock: socket.socket, deadline: float) -> ResponseHead:
        """The response's head, or ``100`` or ``101``; other interim responses are skipped."""
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                self._h11.receive_data(self._receive(sock, deadline))
            elif isinstance(event, h11.Response) or (
                isinstance(event, h11.InformationalResponse) and event.status_code in (100, 101)
            ):
                headers = header_dict(event)
                return ResponseHead(event.status_code, headers, trailing(self._h11))
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionAbortedError("the connection ended before a response")

    def _receive(self, sock: socket.socket, deadline: float) -> bytes:
        """Receive some of the response; where it is TLS that fails, the error says what to do."""
        arm(sock, deadline)
        try:
            return sock.recv(RECEIVE_BYTES)
        except ssl.SSLError as error:  # the server may refuse our certificate as late as this
            raise ConnectionAbortedError(tls.explain(self._address, error)) from error


def get_json(transport: Transport, address: str, target: str, timeout: float) -> dict[str, Any]:
    """Return the JSON object that an agent or orchestrator answers.

    Raises:
        AllfoldError: what the server refused with; a :class:`PeerError` for any other answer.
        OSError: no server could be reached, or answered in time.
    """
    exchange = ClientExchange(address, "GET", target, [("Connection", "close")], transport.tokens)
    exchange.end_request()
    deadline = monotonic() + timeout
    with transport.connect(address, deadline) as sock:
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
        return read_object(body)
    except ValueError as error:
        message = f"{address} answers {target}, but not as Allfold does"
        raise PeerError(message, address=address) from error


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
    with suppress(ValueError, KeyError, AttributeError):
        return from_dict(read_object(body)["error"])
    return PeerError(
        f"{address} answered {status} without an Allfold error: not an agent's data port?",
        address=address,
        http_status=status,
    )


def upgrade(
    transport: Transport, address: str, target: str, protocol: str, timeout: float
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
    exchange = ClientExchange(address, "GET", target, headers, transport.tokens)
    deadline = monotonic() + timeout
    sock: socket.socket | None = None
    try:
        sock = transport.connect_shortly(address, deadline)
        head = _request_switch(sock, exchange, address, protocol, deadline)
        sock.settimeout(None)
        return transport.plain(sock), head.early
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
