"""The agent's data port: an HTTP/1.1 server on blocking sockets, one thread per connection.

Bodies are received straight into their memory and sent straight from it; edges begin as a
request and then have their connection to themselves, and so do links.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from time import monotonic

from allfold_agent.edges.link_probe import PROBE_PROTOCOL, serve_probe
from allfold_agent.edges.opening import EdgeRequest
from allfold_agent.groups.results import Result, ResultRequest, serve_result
from allfold_agent.http.connections import ConnectionLimits, Connections, PortConnection, Stage
from allfold_agent.http.server import (
    BadRequest,
    HttpExchange,
    allow,
    close_gently,
    read_request,
    refuse_blindly,
)
from allfold_agent.http.socket_io import status_of
from allfold_agent.http.transport import Transport, shut_down
from allfold_agent.membership.link_dialling import LinkRequest
from allfold_agent.runtime.threads import start_thread
from allfold_agent.tensors.offers import Offers, TensorRoutes
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError
from allfold_core.protocol.frames import EDGE_PROTOCOL
from allfold_core.protocol.peer_link import LINK_PROTOCOL
from allfold_service.credentials import no_token

log = logging.getLogger(__name__)
SocketTaker = Callable[[socket.socket], None]
_OPENED = (EDGE_PROTOCOL, LINK_PROTOCOL, PROBE_PROTOCOL)
_DEFAULT_LIMITS = ConnectionLimits()
_ACCEPT_POLL = 1.0
_ACCEPT_PAUSE = 0.1
_REFUSE_LINGER = 0.2
_LEAST_SECONDS = 0.001


class DataPort:
    """Serves the data port of one agent.

    Args:
        listener: bound to the port's address; belongs to the server from now on.
        transport: what a client has to show, a token or a certificate, and how it is spoken to.
        open_edge: decides on an edge. It raises an :class:`AllfoldError` to refuse it (the peer
            gets that error), or returns the function that takes the connection over once the peer
            has been told. It must not reserve anything: the peer may be gone before that.
        offers: what ``/v1/tensors`` shows.
        find_result: looks for the result of an op, held for the caller; ``None`` without one.
        open_link: decides on a link to a peer, in the same way as ``open_edge``.
        limits: how many connections there may be; more get ``503``.
        idle_timeout: how long a connection may be without a request after its first one.
        stall_timeout: how long a peer may keep us waiting inside a request or response.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        transport: Transport,
        open_edge: Callable[[EdgeRequest], SocketTaker],
        offers: Offers,
        open_link: Callable[[LinkRequest], SocketTaker] | None = None,
        find_result: Callable[[ResultRequest], Result | None] = lambda _: None,
        limits: ConnectionLimits = _DEFAULT_LIMITS,
        idle_timeout: float = 60.0,
        stall_timeout: float = 30.0,
    ) -> None:
        self._transport = transport
        self._listeners = [listener, *_beside(listener, transport)]
        self._open_edge = open_edge
        self._open_link = open_link
        self._find_result = find_result
        self._limits = limits
        self._idle_timeout = idle_timeout
        self._stall_timeout = stall_timeout
        self._closed = Event()
        self._fails = False
        self._tensors = TensorRoutes(offers, stall_timeout)
        self._connections = Connections(limits)
        self._acceptor = Thread(target=self._run, name="allfold-data-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        for listener in self._listeners:
            listener.listen(128)
            listener.setblocking(False)
        self._acceptor.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop accepting, break the connections that were not handed over, wait for the threads."""
        deadline = monotonic() + timeout
        self._closed.set()
        for listener in self._listeners:
            _shutdown(listener)  # wakes the thread that waits for callers
        if self._acceptor.ident is not None:
            self._acceptor.join(max(0.0, deadline - monotonic()))
        for listener in self._listeners:
            listener.close()
        connections = self._connections.all()
        for connection in connections:
            _shutdown(connection.sock)
        for connection in connections:
            if connection.thread is not None:
                connection.thread.join(max(0.0, deadline - monotonic()))

    def _run(self) -> None:
        callers = select.poll()
        by_number = {listener.fileno(): listener for listener in self._listeners}
        for number in by_number:
            callers.register(number, select.POLLIN)
        while not self._closed.is_set():
            for number, _ in callers.poll(_ACCEPT_POLL * 1000):
                self._accept(by_number[number])

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, place = listener.accept()
        except BlockingIOError:  # the caller has gone again
            return
        except OSError as error:
            if not (self._fails or self._closed.is_set()):
                # Most likely out of file descriptors: others will be closed, keep serving.
                log.warning("cannot accept connections to the data port: %s", error)
                self._fails = True
            self._closed.wait(_ACCEPT_PAUSE)
            return
        if self._fails:
            log.info("the data port accepts connections again")
            self._fails = False
        if self._closed.is_set():
            sock.close()
        else:
            sock.setblocking(True)
            address = place[0] if listener.family != socket.AF_UNIX else ""
            self._admit(sock, address)

    def _admit(self, accepted: socket.socket, address: str) -> None:
        try:
            sock = self._transport.accepted(accepted)
        except OSError as error:  # reset already; this thread must live on
            log.info("a connection to the data port broke: %s", error)
            accepted.close()
            return
        connection, victim = self._connections.admit(sock, address)
        if victim is not None:
            log.info("the data port lets go of a connection from %s to make room", address)
            _shutdown(victim)
        try:
            connection.thread = start_thread(lambda: self._serve(connection), "allfold-data")
        except ServiceError as error:  # this client's loss, not the port's end
            log.warning("cannot serve a connection to the data port: %s", error)
            self._connections.remove(connection)
            self._turn_away(sock, error)

    def _turn_away(self, sock: socket.socket, error: ServiceError) -> None:
        try:
            refuse_blindly(sock, error, timeout=_REFUSE_LINGER)
        except OSError:
            sock.close()
        else:
            close_gently(sock, _REFUSE_LINGER)

    def _serve(self, connection: PortConnection) -> None:
        """A connection's thread: requests, until the peer is done or one takes the socket over."""
        sock = connection.sock
        taker: SocketTaker | None = None
        try:
            self._transport.greet(sock, connection.began + self._limits.greeting_seconds)
            taker = self._converse(connection)
        except BadRequest as error:
            self._refuse_bytes(sock, error)
        except OSError as error:
            log.info("a connection to the data port broke: %s", error)
        finally:
            self._connections.remove(connection)
            if taker is None:
                sock.close()
        if taker is not None:
            self._hand_over(sock, taker)

    def _hand_over(self, sock: socket.socket, taker: SocketTaker) -> None:
        sock.settimeout(None)
        taken = sock
        try:
            taken = self._transport.plain(sock)
            taker(taken)
        except Exception:  # its peer will open another one; this port must live on
            log.exception("an edge or link could not take its connection")
            taken.close()

    def _refuse_bytes(self, sock: socket.socket, error: BadRequest) -> None:
        refusal = LocalError(f"not a request: {error}", http_status=error.status)
        try:
            refuse_blindly(sock, refusal, timeout=self._stall_timeout)
        except OSError:
            return
        close_gently(sock)

    def _converse(self, connection: PortConnection) -> SocketTaker | None:
        early, sock = b"", connection.sock
        while not self._closed.is_set():
            exchange = read_request(sock, early, **self._patience(connection))
            if exchange is None:
                return None
            taker = self._answer(connection, exchange)
            if taker is not None:
                return taker
            if not exchange.keep_alive:
                close_gently(sock)
                return None
            early = exchange.early
        return None

    def _patience(self, connection: PortConnection) -> dict[str, float]:
        """Return how long a connection may take until its next request, and for its head."""
        if connection.stage is not Stage.STRANGER:
            return {"idle": self._idle_timeout, "timeout": self._stall_timeout}
        left = connection.began + self._limits.greeting_seconds - monotonic()
        return {"idle": max(left, _LEAST_SECONDS), "timeout": max(left, _LEAST_SECONDS)}

    def _answer(self, connection: PortConnection, exchange: HttpExchange) -> SocketTaker | None:
        try:
            self._authorize(exchange)
            opens = any(map(exchange.wants, _OPENED))
            self._connections.advance(connection, Stage.OPENING if opens else Stage.SERVED)
            return self._route(exchange)
        except AllfoldError as error:
            if isinstance(error, ServiceError):
                exchange.keep_alive = False
            exchange.refuse(error, _hints(error), timeout=self._stall_timeout)
        except OSError:
            raise
        except Exception as error:
            log.exception("the data port failed on %s %s", exchange.method, exchange.path)
            if exchange.answered:
                raise ConnectionAbortedError("a response could not be completed") from error
            failure = AllfoldError(f"the agent failed: {type(error).__name__}")
            exchange.refuse(failure, timeout=self._stall_timeout)
        return None

    def _authorize(self, exchange: HttpExchange) -> None:
        tokens = self._transport.tokens
        brought = exchange.headers.get("authorization", "")
        if tokens and not tokens.accept(brought):
            raise no_token("node agent", brought, http_status=401)

    def _route(self, exchange: HttpExchange) -> SocketTaker | None:
        match exchange.path:
            case ("v1", "groups", group, "openings", opening, "edges", src, dst):
                allow(exchange, "GET")
                request = EdgeRequest.parse(group, opening, src, dst, exchange.query)
                return self._edge(exchange, request)
            case ("v1", "groups", group, "openings", opening, "ops", seq, "results", stamp):
                wanted = ResultRequest.parse(group, opening, seq, stamp)
                serve_result(exchange, self._find_result(wanted), self._stall_timeout)
                return None
            case ("v1", "link") if self._open_link is not None:
                allow(exchange, "GET")
                open_link, link = self._open_link, LinkRequest.parse(exchange.query)
                return self._switch(exchange, LINK_PROTOCOL, lambda: open_link(link))
            case ("v1", "probe"):
                allow(exchange, "GET")
                return self._switch(exchange, PROBE_PROTOCOL, lambda: serve_probe)
            case ("v1", "tensors", tensor_id):
                self._tensors.serve(exchange, tensor_id)
                return None
            case _:
                path = "/" + "/".join(exchange.path)
                raise LocalError(f"the data port has no {path[:200]}", http_status=404)

    def _edge(self, exchange: HttpExchange, request: EdgeRequest) -> SocketTaker:
        return self._switch(exchange, EDGE_PROTOCOL, lambda: self._open_edge(request))

    def _switch(
        self, exchange: HttpExchange, protocol: str, grant: Callable[[], SocketTaker]
    ) -> SocketTaker:
        """Switch the connection to another protocol, unless whoever grants it objects."""
        if not exchange.wants(protocol):
            error = LocalError(f"this needs Upgrade: {protocol}", http_status=426)
            error.details["protocol"] = protocol
            raise error
        if exchange.early or exchange.body_left or "transfer-encoding" in exchange.headers:
            exchange.keep_alive = False  # whatever they are, they are no request
            raise InvalidArgument(f"bytes before {protocol} was granted")
        taker = grant()
        exchange.switch(protocol, timeout=self._stall_timeout)
        return taker


def _hints(error: AllfoldError) -> list[tuple[str, str]]:
    """The headers that HTTP wants along with some statuses."""
    match status_of(error):
        case 401:
            return [("WWW-Authenticate", "Bearer")]
        case 405:
            return [("Allow", error.details.get("allowed", ""))]
        case 416:
            return [("Content-Range", f"bytes */{error.details.get('size', '*')}")]
        case 426:
            return [("Upgrade", error.details.get("protocol", EDGE_PROTOCOL))]
    return []


def _beside(listener: socket.socket, transport: Transport) -> list[socket.socket]:
    """The listener for agents on the same machine, if the port is on loopback."""
    path = transport.shortcut(*listener.getsockname()[:2])
    if path is None:
        return []
    beside = socket.socket(socket.AF_UNIX)
    beside.bind(path)
    return [beside]


def _shutdown(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected, or closed by its thread
        shut_down(sock)
