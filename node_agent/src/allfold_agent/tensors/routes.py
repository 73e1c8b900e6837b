"""``/v1/tensors`` of the data port: requests and responses over a :class:`TensorStore`."""

from __future__ import annotations

import hashlib
import logging
import math
from time import monotonic

from allfold_agent.http.server import (
    HttpExchange,
    allow,
    await_delivery,
    peer_is_there,
    transfer_deadline,
    whole_number,
)
from allfold_agent.http.wire import Headers
from allfold_agent.tensors.spec import (
    CHUNK,
    TensorSpec,
    check_digest,
    check_id,
    digest_header,
    parse_digest,
    parse_range,
)
from allfold_agent.tensors.store import (
    DEFAULT_TTL,
    LONGEST_WAIT,
    ExposedTensor,
    TensorStore,
    missing,
)
from allfold_core.errors import InvalidArgument, LocalError

log = logging.getLogger(__name__)
# How long a client may take to say that it has got a download, before silence counts as that.
DELIVERY_GRACE = 0.5
# How long a client waits at least for a download that others claim: until it is known whether
# they have got it. A client that died and comes back at once must not find its own place taken.
CLAIM_WAIT = 2.0


class TensorRoutes:
    """``/v1/tensors``: PUT exposes a tensor, GET and HEAD show it, DELETE drops it.

    A GET counts towards ``max_downloads`` when its response ends with the tensor's last byte and
    was delivered. So a download that broke and was resumed with ``Range`` counts once, however
    often it was resumed; one that is fetched in several ranges counts with the range that holds
    the last byte, which is therefore to be fetched last.
    """

    def __init__(self, store: TensorStore, stall_timeout: float) -> None:
        self._store = store
        self._stall = stall_timeout

    def serve(self, exchange: HttpExchange, tensor_id: str) -> None:
        allow(exchange, "GET", "HEAD", "PUT", "DELETE")
        check_id(tensor_id)
        if exchange.method == "PUT":
            self._put(exchange, tensor_id)
        elif exchange.method == "DELETE":
            self._delete(exchange, tensor_id)
        else:
            self._get(exchange, tensor_id)

    def _respond(
        self, exchange: HttpExchange, status: int, headers: Headers, body: bytes | memoryview = b""
    ) -> None:
        deadline = transfer_deadline(len(body), self._stall)
        exchange.respond(status, headers, body, stall=self._stall, deadline=deadline)

    def _delete(self, exchange: HttpExchange, tensor_id: str) -> None:
        _parameters(exchange)
        if not self._store.delete(tensor_id):
            raise missing(tensor_id, "is not exposed")
        self._respond(exchange, 204, [])

    def _put(self, exchange: HttpExchange, tensor_id: str) -> None:
        query = _parameters(exchange, "dtype", "shape", "max_downloads", "ttl")
        if not {"dtype", "shape"} <= query.keys():
            raise InvalidArgument("PUT needs ?dtype= and &shape=, as in ?dtype=float32&shape=2,3")
        spec = TensorSpec.parse(query["dtype"], query["shape"])
        _check_body(exchange, spec)
        limit = (
            whole_number("max_downloads", query["max_downloads"], 2**31)
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
        self, exchange: HttpExchange, tensor_id: str, view: memoryview, *, hashed: bool
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

    def _get(self, exchange: HttpExchange, tensor_id: str) -> None:
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

    def _await_delivery(self, exchange: HttpExchange) -> None:
        grace = 0.0 if exchange.early else DELIVERY_GRACE
        await_delivery(exchange.sock, grace=grace, deadline=monotonic() + self._stall)


def _parameters(exchange: HttpExchange, *names: str) -> dict[str, str]:
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


def _check_body(exchange: HttpExchange, spec: TensorSpec) -> None:
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


def _requested_span(exchange: HttpExchange, tensor: ExposedTensor) -> tuple[int, int] | None:
    """The bytes that the request's ``Range`` names, ``None`` for all of them."""
    headers = exchange.headers
    if exchange.method != "GET" or "range" not in headers:
        return None
    if "if-range" in headers and headers["if-range"] != _etag(tensor):
        return None
    return parse_range(headers["range"], len(tensor.view))


def _describe(
    exchange: HttpExchange, tensor: ExposedTensor, span: tuple[int, int] | None
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
