"""``/v1/tensors`` of the data port: the states that the ranks of this node offer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from allfold_agent.http.server import HttpExchange, allow, peer_is_there, transfer_deadline
from allfold_agent.http.wire import Headers, send_views
from allfold_agent.tensors.offers import Offer, Offers
from allfold_agent.tensors.span import digest_header, parse_range
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError
from allfold_core.wire.state_wire import BLOCK_BYTES, spans


class TensorRoutes:
    """``/v1/tensors/{id}``: GET returns a state or a range of it, HEAD its form.

    A range of at most a block comes with its digest; of more, clients compute none before they
    have it all, so they ask for one block after the other.
    """

    def __init__(self, offers: Offers, stall_timeout: float) -> None:
        self._offers = offers
        self._stall = stall_timeout

    def serve(self, exchange: HttpExchange, state_id: str) -> None:
        allow(exchange, "GET", "HEAD")
        offer = self._offers.get(
            state_id, _wait(exchange), wanted=lambda: peer_is_there(exchange.sock)
        )
        _check_layout(exchange, offer)
        span = _requested_span(exchange, offer.description.total)
        start, stop = span or (0, offer.description.total)
        headers = _describe(offer, span)
        if exchange.method == "HEAD":
            self._respond(exchange, 200, [*headers, ("Content-Length", str(stop))], b"")
        elif stop - start <= BLOCK_BYTES:
            with self._block(offer, start, stop) as content:
                headers.append(("Content-Digest", digest_header(content)))
                self._respond(exchange, 206 if span else 200, headers, content)
        else:
            length = ("Content-Length", str(stop - start))
            self._respond(exchange, 206 if span else 200, [*headers, length], b"")
            self._stream(exchange, offer, start, stop)

    @contextmanager
    def _block(self, offer: Offer, start: int, stop: int) -> Iterator[memoryview]:
        if start == stop:  # a state of no bytes
            yield memoryview(b"")
            return
        with offer.block(start, stop, monotonic() + self._stall) as content:
            yield content

    def _stream(self, exchange: HttpExchange, offer: Offer, start: int, stop: int) -> None:
        deadline = transfer_deadline(stop - start, self._stall)
        try:
            for first, last in spans(start, stop):
                with self._block(offer, first, last) as content:
                    send_views(exchange.sock, content, stall=self._stall, deadline=deadline)
        except AllfoldError as error:  # too late to answer with it
            raise ConnectionAbortedError(error.message) from error

    def _respond(
        self, exchange: HttpExchange, status: int, headers: Headers, body: bytes | memoryview
    ) -> None:
        deadline = transfer_deadline(len(body), self._stall)
        exchange.respond(status, headers, body, stall=self._stall, deadline=deadline)


def _wait(exchange: HttpExchange) -> float:
    """Return the seconds that the client waits for the state to be offered."""
    if unknown := sorted(exchange.query.keys() - {"wait"}):
        raise InvalidArgument(f"unknown parameters {', '.join(unknown)[:200]}; there is: wait")
    text = exchange.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(f"wait is {text[:40]!r}, expected seconds from 0")
    return seconds


def _check_layout(exchange: HttpExchange, offer: Offer) -> None:
    """Refuse a request for a block of a state of another form: 412."""
    wanted = exchange.headers.get("if-match")
    if wanted is not None and wanted != _etag(offer):
        raise LocalError(
            f"state {offer.state_id} has layout {_etag(offer)}, not {wanted[:80]}", http_status=412
        )


def _etag(offer: Offer) -> str:
    return f'"{offer.description.layout}"'


def _requested_span(exchange: HttpExchange, total: int) -> tuple[int, int] | None:
    """The bytes that the request's ``Range`` names, ``None`` for all of them."""
    if exchange.method != "GET" or "range" not in exchange.headers:
        return None
    return parse_range(exchange.headers["range"], total)


def _describe(offer: Offer, span: tuple[int, int] | None) -> list[tuple[str, str]]:
    description = offer.description
    headers = [
        ("Content-Type", "application/octet-stream"),
        ("Accept-Ranges", "bytes"),
        ("ETag", _etag(offer)),
        ("X-Allfold-Head", str(description.head)),
    ]
    if span:
        headers.append(
            ("Content-Range", f"bytes {span[0]}-{span[1] - 1}/{description.total}"),
        )
    return headers
