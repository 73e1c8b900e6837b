"""States that local ranks offer to others, at ``/v1/tensors`` of the data port."""

from __future__ import annotations

import base64
import logging
import math
import re
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, LifoQueue
from time import monotonic

import xxhash

from allfold_agent.http.server import HttpExchange, allow, peer_is_there, transfer_deadline
from allfold_agent.http.socket_io import Headers, send_views
from allfold_agent.runtime.locks import make_condition, make_lock
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, PeerLost, PeerMissing
from allfold_core.protocol.state_blocks import BLOCK_BYTES, StateBlock, spans

# Clients tidy the path segments "." and ".." away.
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]{1,256}")
_RANGE = re.compile(r"bytes=\s*([0-9]{0,19})-([0-9]{0,19})\s*")


def check_id(state_id: str) -> str:
    """Return the id of a state, or raise :class:`InvalidArgument`."""
    if not _ID.fullmatch(state_id):
        raise InvalidArgument(
            f"state id {state_id[:300]!r}: expected 1 to 256 of A-Z a-z 0-9 . _ : -"
        )
    return state_id


def digest_header(content: memoryview) -> str:
    """Return the ``Content-Digest`` (RFC 9530) of bytes: XXH3, which costs next to nothing.

    It finds damage, not forgery: whoever may connect has shown the join token.
    """
    return f"xxh3-64=:{base64.b64encode(xxhash.xxh3_64_digest(content)).decode()}:"


def parse_range(value: str, size: int) -> tuple[int, int] | None:
    """Return start and stop of a ``Range``; ``None`` (all) for one that HTTP lets us ignore.

    Raises:
        LocalError: none of the bytes exist; 416.
    """
    match = _RANGE.fullmatch(value)
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise LocalError(f"no bytes {value[6:]} in {size}", http_status=416, size=size)
    return start, stop


log = logging.getLogger(__name__)
LONGEST_WAIT = 60.0
# The interval at which a wait checks whether its result is still wanted.
_GLANCE = 0.5
_MESSAGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class StateForm:
    """The form of a state: holders of one state have the same one.

    Attributes:
        head: the size of its head in bytes.
        total: the size of its head and its large tensors in bytes.
        layout: a digest of the types, shapes and order of its tensors.
    """

    head: int
    total: int
    layout: str


class Offer:
    """The state of one rank, for as long as its socket is open.

    Args:
        channel: the socket to the rank, over which it is asked for blocks.
        window: memory shared with the rank, a multiple of the block size.
        patience: seconds within which the rank has to deliver a block.
    """

    def __init__(
        self,
        state_id: str,
        description: StateForm,
        channel: socket.socket,
        window: memoryview,
        patience: float = 10.0,
    ) -> None:
        self.state_id = check_id(state_id)
        self.description = description
        self._channel = channel
        self._window = window
        self._asking = make_lock("offer")
        self._slots: LifoQueue[int] = LifoQueue()  # the last one is still in the caches
        for slot in range(len(window) // BLOCK_BYTES):
            self._slots.put(slot)
        channel.settimeout(patience)

    @contextmanager
    def block(self, start: int, stop: int, deadline: float) -> Iterator[memoryview]:
        """Ask the rank to copy a range of at most a block to a slot, which is held until the exit.

        Raises:
            PeerMissing: all slots are in use until the deadline (monotonic).
            PeerLost: the rank has withdrawn the offer, has ended, or does not answer.
        """
        try:
            slot = self._slots.get(timeout=max(0.0, deadline - monotonic()))
        except Empty:
            raise PeerMissing(f"too many wait for blocks of state {self.state_id}") from None
        try:
            with self._asking:
                self._fill(StateBlock(start, stop - start, slot))
            begin = slot * BLOCK_BYTES
            yield self._window[begin : begin + stop - start]
        finally:
            self._slots.put(slot)

    def _fill(self, block: StateBlock) -> None:
        try:
            self._channel.send(block.pack())
            answer = self._channel.recv(_MESSAGE_BYTES)
        except OSError as error:
            self.close()
            raise self._gone(f": {error}") from error
        if not answer:
            raise self._gone("")
        if answer != block.pack():
            self.close()
            raise self._gone(": it does not speak our protocol")

    def _gone(self, why: str) -> PeerLost:
        return PeerLost(f"the rank that offered state {self.state_id} is gone{why}")

    def await_end(self) -> None:
        """Wait until the rank withdraws the offer, or ends."""
        end = select.poll()
        end.register(self._channel, 0)
        end.poll()

    def close(self) -> None:
        """End the offer: the rank notices, and so does :meth:`await_end`."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket. The window is unmapped when the last response has let go of it."""
        self.close()
        with self._asking:
            self._channel.close()


class Offers:
    """The offers of this node by their ids."""

    def __init__(self) -> None:
        self._changed = make_condition("tensors")
        self._offers: dict[str, Offer] = {}

    def add(self, offer: Offer) -> None:
        """Offer a state to others; a new offer takes the place of an old one with its id."""
        with self._changed:
            old = self._offers.pop(offer.state_id, None)
            self._offers[offer.state_id] = offer
            self._changed.notify_all()
        if old is not None:
            old.close()

    def remove(self, offer: Offer) -> None:
        """Forget an offer, unless another has taken its place."""
        with self._changed:
            if self._offers.get(offer.state_id) is offer:
                del self._offers[offer.state_id]

    def get(
        self, state_id: str, wait: float = 0.0, *, wanted: Callable[[], bool] = lambda: True
    ) -> Offer:
        """Return an offer, as soon as there is one.

        Args:
            wait: seconds, at most :data:`LONGEST_WAIT`.
            wanted: ends the wait early; asked now and then, with the lock held.

        Raises:
            PeerMissing: there is none in time; 404.
        """
        deadline = monotonic() + min(wait, LONGEST_WAIT)
        with self._changed:
            while (offer := self._offers.get(check_id(state_id))) is None:
                left = deadline - monotonic()
                if left <= 0 or not wanted():
                    raise missing(state_id)
                self._changed.wait(min(left, _GLANCE))
            return offer


def missing(state_id: str) -> PeerMissing:
    """Return the error of a state that nobody offers here; its HTTP status is 404."""
    return PeerMissing(f"no rank of this node offers state {state_id}", http_status=404)


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
