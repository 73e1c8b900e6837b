"""The agent's data port: an HTTP/1.1 server on blocking sockets, one thread per connection.

Tensors are received straight into their memory and sent straight from it; edges begin as a
request and then have their connection to themselves.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic
from urllib.parse import quote

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError
from allfold_core.frames import EDGE_PROTOCOL

from .http_wire import (
    BadRequest,
    Exchange,
    Headers,
    await_delivery,
    check_token,
    close_gently,
    peer_is_there,
    read_request,
    refuse_blindly,
    shortcut,
    status_of,
    transfer_deadline,
)
from .tensors import (
    CHUNK,
    DEFAULT_TTL,
    LONGEST_WAIT,
    ExposedTensor,
    TensorSpec,
    TensorStore,
    check_digest,
    check_id,
    digest_header,
    missing,
    parse_digest,
    parse_range,
)

log = logging.getLogger(__name__)

SocketTaker = Callable[[socket.socket], None]
# How long a client may take to say that it has got a download, before silence counts as that.
DELIVERY_GRACE = 0.5
# How long a client waits at least for a download that others claim: until it is known whether
# they have got it. A client that died and comes back at once must not find its own place taken.
CLAIM_WAIT = 2.0
_ACCEPT_POLL = 1.0
_REFUSE_LINGER = 0.2


@dataclass(frozen=True, slots=True)
class EdgeRequest:
    """The directed link that a peer asks for, and the first of its frames that it has not got."""

    group: str
    epoch: int
    src: int
    dst: int
    from_frame: int = 0

    @property
    def target(self) -> str:
        """The request target that :meth:`parse` reads."""
        group = quote(self.group, safe="")
        edge = f"/v1/groups/{group}/epochs/{self.epoch}/edges/{self.src}/{self.dst}"
        return f"{edge}?from_frame={self.from_frame}"

    @classmethod
    def parse(
        cls, group: str, epoch: str, src: str, dst: str, query: dict[str, str]
    ) -> EdgeRequest:
        """The request of a target's parts; :class:`InvalidArgument` names the bad one."""
        if not 0 < len(group) <= 256:
            raise InvalidArgument("a group's name has 1 to 256 characters", group=group[:256])
        if unknown := sorted(query.keys() - {"from_frame"}):
            raise InvalidArgument(f"unknown parameters of an edge: {', '.join(unknown)}")
        request = cls(
            group,
            # The widths of the frame header's fields.
            _number("epoch", epoch, 2**32),
            _number("src", src, 2**31),
            _number("dst", dst, 2**31),
            _number("from_frame", query.get("from_frame", "0"), 2**64),
        )
        if request.src == request.dst:
            raise InvalidArgument(f"an edge from node {src} to itself", group=group)
        return request


def _number(name: str, text: str, limit: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < limit):
        raise InvalidArgument(f"{name} is {text[:40]!r}, expected a number below {limit}")
    return int(text)


class DataServer:
    """Serves the data port of one agent.

    Args:
        listener: bound to the port's address; belongs to the server from now on.
        token: what a client has to show as ``Authorization: Bearer``; ``None`` lets all in.
        open_edge: decides on an edge. It raises an :class:`AllfoldError` to refuse it (the peer
            gets that error), or returns the function that takes the connection over once the peer
            has been told. It must not reserve anything: the peer may be gone before that.
        tensors: what ``/v1/tensors`` shows.
        max_connections: connections served at a time, edges that were handed over not counted;
            more get ``503``.
        idle_timeout: how long a connection may be without a request.
        stall_timeout: how long a peer may keep us waiting inside a request or response.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str | None,
        open_edge: Callable[[EdgeRequest], SocketTaker],
        tensors: TensorStore,
        max_connections: int = 256,
        idle_timeout: float = 60.0,
        stall_timeout: float = 30.0,
    ) -> None:
        self._token = None if token is None else check_token(token).encode()
        self._listeners = [listener, *_beside(listener)]
        self._open_edge = open_edge
        self._max_connections = max_connections
        self._idle_timeout = idle_timeout
        self._stall_timeout = stall_timeout
        self._closed = Event()
        self._tensors = _TensorRoutes(tensors, stall_timeout)
        self._lock = Lock()
        self._connections: dict[socket.socket, Thread] = {}
        self._acceptors = [
            Thread(target=self._accept, args=(each,), name="allfold-data-accept", daemon=True)
            for each in self._listeners
        ]

    def start(self) -> None:
        """Begin to accept connections."""
        for listener, acceptor in zip(self._listeners, self._acceptors, strict=True):
            listener.listen(128)
            listener.settimeout(_ACCEPT_POLL)
            acceptor.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop accepting, break the connections that were not handed over, wait for the threads."""
        deadline = monotonic() + timeout
        self._closed.set()
        for listener in self._listeners:
            _wake(listener)
        for listener, acceptor in zip(self._listeners, self._acceptors, strict=True):
            if acceptor.ident is not None:
                acceptor.join(max(0.0, deadline - monotonic()))
            listener.close()
        with self._lock:
            connections = dict(self._connections)
        for sock in connections:
            _shutdown(sock)
        for thread in connections.values():
            thread.join(max(0.0, deadline - monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed.is_set():
                    # Most likely out of file descriptors: others will be closed, keep serving.
                    log.warning("cannot accept a connection to the data port: %s", error)
                    self._closed.wait(0.1)
                continue
            if self._closed.is_set():
                sock.close()
            else:
                self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        thread = Thread(target=self._serve, args=(sock,), name="allfold-data", daemon=True)
        with self._lock:
            full = len(self._connections) >= self._max_connections
            if not full:
                self._connections[sock] = thread
        if full:
            self._turn_away(sock)
            return
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: this client's loss, not the port's end
            log.warning("cannot serve a connection to the data port: %s", error)
            with self._lock:
                del self._connections[sock]
            sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        error = ServiceError(
            f"the data port already serves {self._max_connections} connections",
            limit=self._max_connections,
        )
        try:
            refuse_blindly(sock, error, timeout=_REFUSE_LINGER)
        except OSError:
            sock.close()
        else:
            close_gently(sock, _REFUSE_LINGER)

    def _serve(self, sock: socket.socket) -> None:
        """A connection's thread: requests, until the peer is done or one takes the socket over."""
        taker: SocketTaker | None = None
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            taker = self._converse(sock)
        except BadRequest as error:
            self._refuse_bytes(sock, error)
        except OSError as error:
            log.info("a connection to the data port broke: %s", error)
        finally:
            with self._lock:
                del self._connections[sock]
            if taker is None:
                sock.close()
        if taker is not None:
            self._hand_over(sock, taker)

    def _hand_over(self, sock: socket.socket, taker: SocketTaker) -> None:
        sock.settimeout(None)
        try:
            taker(sock)
        except Exception:  # its peer will reopen the edge; this port must live on
            log.exception("an edge could not take its connection")
            sock.close()

    def _refuse_bytes(self, sock: socket.socket, error: BadRequest) -> None:
        refusal = LocalError(f"not a request: {error}", http_status=error.status)
        try:
            refuse_blindly(sock, refusal, timeout=self._stall_timeout)
        except OSError:
            return
        close_gently(sock)

    def _converse(self, sock: socket.socket) -> SocketTaker | None:
        early = b""
        while not self._closed.is_set():
            timeouts = {"idle": self._idle_timeout, "timeout": self._stall_timeout}
            exchange = read_request(sock, early, **timeouts)
            if exchange is None:
                return None
            taker = self._answer(exchange)
            if taker is not None:
                return taker
            if not exchange.keep_alive:
                close_gently(sock)
                return None
            early = exchange.early
        return None

    def _answer(self, exchange: Exchange) -> SocketTaker | None:
        try:
            self._authorize(exchange)
            return self._route(exchange)
        except AllfoldError as error:
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

    def _authorize(self, exchange: Exchange) -> None:
        if self._token is None:
            return
        scheme, _, shown = exchange.headers.get("authorization", "").partition(" ")
        fits = hmac.compare_digest(shown.strip().encode("latin-1"), self._token)
        if not (fits and scheme.lower() == "bearer"):
            raise LocalError("the join token is missing or wrong", http_status=401)

    def _route(self, exchange: Exchange) -> SocketTaker | None:
        match exchange.path:
            case ("v1", "groups", group, "epochs", epoch, "edges", src, dst):
                _allow(exchange, "GET")
                request = EdgeRequest.parse(group, epoch, src, dst, exchange.query)
                return self._edge(exchange, request)
            case ("v1", "tensors", tensor_id):
                self._tensors.serve(exchange, tensor_id)
                return None
            case _:
                path = "/" + "/".join(exchange.path)
                raise LocalError(f"the data port has no {path[:200]}", http_status=404)

    def _edge(self, exchange: Exchange, request: EdgeRequest) -> SocketTaker:
        if not exchange.wants(EDGE_PROTOCOL):
            raise LocalError(f"an edge needs Upgrade: {EDGE_PROTOCOL}", http_status=426)
        if exchange.early or exchange.body_left:
            exchange.keep_alive = False  # whatever they are, they are no request
            raise InvalidArgument("bytes before the edge was granted")
        taker = self._open_edge(request)
        exchange.switch(EDGE_PROTOCOL, timeout=self._stall_timeout)
        return taker


class _TensorRoutes:
    """``/v1/tensors``: PUT exposes a tensor, GET and HEAD show it, DELETE drops it.

    A GET counts towards ``max_downloads`` when its response ends with the tensor's last byte and
    was delivered. So a download that broke and was resumed with ``Range`` counts once, however
    often it was resumed; one that is fetched in several ranges counts with the range that holds
    the last byte, which is therefore to be fetched last.
    """

    def __init__(self, store: TensorStore, stall_timeout: float) -> None:
        self._store = store
        self._stall = stall_timeout

    def serve(self, exchange: Exchange, tensor_id: str) -> None:
        _allow(exchange, "GET", "HEAD", "PUT", "DELETE")
        check_id(tensor_id)
        if exchange.method == "PUT":
            self._put(exchange, tensor_id)
        elif exchange.method == "DELETE":
            self._delete(exchange, tensor_id)
        else:
            self._get(exchange, tensor_id)

    def _respond(
        self, exchange: Exchange, status: int, headers: Headers, body: bytes | memoryview = b""
    ) -> None:
        deadline = transfer_deadline(len(body), self._stall)
        exchange.respond(status, headers, body, stall=self._stall, deadline=deadline)

    def _delete(self, exchange: Exchange, tensor_id: str) -> None:
        _parameters(exchange)
        if not self._store.delete(tensor_id):
            raise missing(tensor_id, "is not exposed")
        self._respond(exchange, 204, [])

    def _put(self, exchange: Exchange, tensor_id: str) -> None:
        query = _parameters(exchange, "dtype", "shape", "max_downloads", "ttl")
        if not {"dtype", "shape"} <= query.keys():
            raise InvalidArgument("PUT needs ?dtype= and &shape=, as in ?dtype=float32&shape=2,3")
        spec = TensorSpec.parse(query["dtype"], query["shape"])
        _check_body(exchange, spec)
        limit = (
            _number("max_downloads", query["max_downloads"], 2**31)
            if "max_downloads" in query
            else None
        )
        ttl = _seconds("ttl", query.get("ttl", str(DEFAULT_TTL)))
        digest = parse_digest(exchange.headers.get("content-digest", ""))
        with self._store.draft(tensor_id, spec, max_downloads=limit, ttl=ttl) as draft:
            got = self._receive(exchange, tensor_id, draft.view, hashed=digest is not None)
            if digest is not None:
                check_digest(tensor_id, digest, got, http_status=400)
            draft.expose(digest)
        self._respond(exchange, 201, [("Location", f"/v1/tensors/{tensor_id}")])

    def _receive(
        self, exchange: Exchange, tensor_id: str, view: memoryview, *, hashed: bool
    ) -> bytes:
        deadline = transfer_deadline(len(view), self._stall)
        digest = hashlib.sha256()
        received = 0
        try:
            while received < len(view):
                part = view[received : received + CHUNK]
                count = exchange.receive_body(part, stall=self._stall, deadline=deadline)
                if hashed:  # now, while the bytes are still in the cache
                    digest.update(part[:count])
                received += count
        except OSError as error:
            size = len(view)
            log.warning(
                "tensor %s broke off after %d of %d bytes: %s", tensor_id, received, size, error
            )
            raise
        return digest.digest()

    def _get(self, exchange: Exchange, tensor_id: str) -> None:
        query = _parameters(exchange, "wait")
        wait = _seconds("wait", query.get("wait", "0"))
        give_up = monotonic() + min(wait, LONGEST_WAIT)

        def wanted() -> bool:
            # False as well when the server is closed, which shuts the socket down.
            return peer_is_there(exchange.sock)

        tensor = self._store.get(tensor_id, wait, wanted=wanted)
        span = _requested_span(exchange, tensor)
        start, stop = span or (0, len(tensor.view))
        counts = exchange.method == "GET" and stop == len(tensor.view)
        left = max(CLAIM_WAIT, give_up - monotonic())
        with self._store.reading(tensor, counts=counts, wait=left, wanted=wanted) as reading:
            headers = _describe(exchange, tensor, span)
            self._respond(exchange, 206 if span else 200, headers, tensor.view[start:stop])
            if counts and tensor.max_downloads is not None:
                self._await_delivery(exchange)
            reading.complete = True

    def _await_delivery(self, exchange: Exchange) -> None:
        grace = 0.0 if exchange.early else DELIVERY_GRACE
        await_delivery(exchange.sock, grace=grace, deadline=monotonic() + self._stall)


def _allow(exchange: Exchange, *methods: str) -> None:
    if exchange.method not in methods:
        allowed = ", ".join(methods)
        message = f"{exchange.method} is not possible here, only {allowed}"
        raise LocalError(message, http_status=405, allowed=allowed)


def _parameters(exchange: Exchange, *names: str) -> dict[str, str]:
    """The request's parameters. An unknown one is an error: it may be a misspelled limit."""
    if unknown := sorted(exchange.query.keys() - set(names)):
        known = ", ".join(names) or "none"
        raise InvalidArgument(f"unknown parameters {', '.join(unknown)[:200]}; there are: {known}")
    return exchange.query


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(f"{name} is {text[:40]!r}, expected seconds from 0")
    return seconds


def _check_body(exchange: Exchange, spec: TensorSpec) -> None:
    """Refuse a body that does not fit, before memory is taken for it."""
    headers = exchange.headers
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise LocalError("a tensor's body needs a Content-Length", http_status=411)
    for name in ("content-range", "content-encoding"):
        if name in headers:
            raise InvalidArgument(f"a tensor comes as it is and at once, without {name}")
    if exchange.body_left != spec.nbytes:
        size = exchange.body_left
        raise InvalidArgument(f"{spec} has {spec.nbytes} bytes, Content-Length is {size}")


def _etag(tensor: ExposedTensor) -> str:
    return f'"{tensor.digest.hex()}"'


def _requested_span(exchange: Exchange, tensor: ExposedTensor) -> tuple[int, int] | None:
    """The bytes that the request's ``Range`` names, ``None`` for all of them."""
    headers = exchange.headers
    if exchange.method != "GET" or "range" not in headers:
        return None
    if "if-range" in headers and headers["if-range"] != _etag(tensor):
        return None
    return parse_range(headers["range"], len(tensor.view))


def _describe(
    exchange: Exchange, tensor: ExposedTensor, span: tuple[int, int] | None
) -> list[tuple[str, str]]:
    start, stop = span or (0, len(tensor.view))
    headers = [
        ("Content-Type", "application/octet-stream"),
        ("Content-Length", str(stop - start)),
        ("Accept-Ranges", "bytes"),
        ("X-Allfold-Dtype", tensor.spec.dtype.label),
        ("X-Allfold-Shape", tensor.spec.shape_text),
        ("ETag", _etag(tensor)),
        ("Repr-Digest", digest_header(tensor.digest)),
    ]
    if span:
        headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{len(tensor.view)}"))
    elif exchange.method == "GET":
        # By RFC 9530 this is the digest of the content of this very message, unlike Repr-Digest.
        headers.append(("Content-Digest", digest_header(tensor.digest)))
    return headers


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
            return [("Upgrade", EDGE_PROTOCOL)]
    return []


def _beside(listener: socket.socket) -> list[socket.socket]:
    """The listener for agents on the same machine, if the port is on loopback."""
    path = shortcut(*listener.getsockname()[:2])
    if path is None:
        return []
    beside = socket.socket(socket.AF_UNIX)
    beside.bind(path)
    return [beside]


def _wake(listener: socket.socket) -> None:
    """End the accept that may wait on a listener."""
    if listener.family != socket.AF_UNIX:
        _shutdown(listener)
        return
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(listener.getsockname())
        except OSError as error:
            log.debug("nobody waits beside the data port: %s", error)


def _shutdown(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected, or closed by its thread
        sock.shutdown(socket.SHUT_RDWR)
