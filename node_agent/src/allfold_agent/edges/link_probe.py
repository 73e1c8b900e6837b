"""The measurement of the link to another agent.

It is made once, when an agent has registered; and for ``allfold doctor``, then with few bytes: a
job may be running. It uses a connection like those of edges, including the shortcut between agents
of one machine. First it times some round trips of one byte, then the other side sends zeros for a
moment. A connection begins slowly and gets faster with each round trip, so a long link is watched
for longer.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from time import monotonic, perf_counter

from allfold_agent.http import client as http_client
from allfold_agent.http.transport import Transport
from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import PeerLost

log = logging.getLogger(__name__)

PROBE_PROTOCOL = "allfold-probe/1"
PROBE_TARGET = "/v1/probe"

_PING, _BULK, _SHORT_BULK = b"p", b"b", b"s"
_ROUND_TRIPS = 8
_ROUND_TRIPS_SECONDS = 0.2
_BULK_BYTES = 16 << 20
_SHORT_BULK_BYTES = 1 << 20
_BYTES = {_BULK: _BULK_BYTES, _SHORT_BULK: _SHORT_BULK_BYTES}
_BULK_SECONDS = 0.5
_BULK_ROUND_TRIPS = 12
_LONGEST_BULK_SECONDS = 1.5
_PIECE_BYTES = 256 * 1024
# How long one measurement may take, all in all; at the side that serves it, from its turn on.
_PATIENCE = 3.0
# Two that measure at once would each see half of what there is.
_one_at_a_time = make_lock("probe")


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The speed of a link, one direction at a time.

    Attributes:
        latency: seconds from sending a byte to having it at the other end, the least that was seen.
        bandwidth: bytes per second, after the connection has come up to speed.
    """

    latency: float
    bandwidth: float


def worse(one: MeasuredLink | None, other: MeasuredLink) -> MeasuredLink:
    """Return the higher latency and the lower bandwidth of two links."""
    if one is None:
        return other
    return MeasuredLink(max(one.latency, other.latency), min(one.bandwidth, other.bandwidth))


def serve_probe(connected: socket.socket) -> None:
    """Answer one peer that measures; the connection is closed in the end."""
    with connected:
        if not _one_at_a_time.acquire(timeout=_PATIENCE):
            log.debug("too many peers want to measure at once")
            return
        clock = _Patience()
        try:
            while (asked := clock.lend(connected).recv(1)) == _PING:
                clock.lend(connected).sendall(_PING)
            zeros = bytes(_PIECE_BYTES)
            for _ in range(_BYTES.get(asked, 0) // _PIECE_BYTES):
                clock.lend(connected).sendall(zeros)
        except OSError as error:
            log.debug("a peer has measured enough: %s", error)
        finally:
            _one_at_a_time.release()


def measure(transport: Transport, address: str, *, short: bool = False) -> MeasuredLink:
    """Measure the link from the agent at a data address to this one.

    Takes a fraction of a second, on long links about two.

    Args:
        short: have 1 MiB sent, not 16. On a long or very fast link the bandwidth then comes out too
            low, as the connection has not come up to speed.

    Raises:
        AllfoldError: the agent cannot be reached, does not know the protocol, or does not keep to
            it. After 3 s at the latest, beside the time in which a name is looked up.
    """
    clock = _Patience()
    connected, early = http_client.upgrade(
        transport, address, PROBE_TARGET, PROBE_PROTOCOL, clock.seconds()
    )
    with connected:
        try:
            if early:
                raise ConnectionAbortedError("bytes before a question")
            latency = _latency(connected, clock)
        except OSError as error:
            raise _broken_off(address, error) from error
        try:
            return MeasuredLink(latency, _bandwidth(connected, clock, latency, short=short))
        except TimeoutError as error:
            raise _broken_off(address, error, stalled=True) from error
        except OSError as error:
            raise _broken_off(address, error) from error


def _broken_off(address: str, error: OSError, *, stalled: bool = False) -> PeerLost:
    """The error of a measurement; ``stalled``: single bytes went both ways, and many did not."""
    message = f"{address} broke off a probe: {error}"
    return PeerLost(message, address=address, stalled=stalled)


class _Patience:
    """One deadline for all waits of a measurement."""

    def __init__(self) -> None:
        self._deadline = monotonic() + _PATIENCE

    def seconds(self) -> float:
        """Return what is left; ``TimeoutError`` if nothing is."""
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError(f"it takes longer than {_PATIENCE:g} s")
        return left

    def lend(self, connected: socket.socket) -> socket.socket:
        """The connection, which waits no longer than until the deadline."""
        connected.settimeout(self.seconds())
        return connected


def _latency(connected: socket.socket, clock: _Patience) -> float:
    """Half of the shortest round trip, of several where they are short."""
    _round_trip(connected, clock)  # answered when it is our turn
    trips = [_round_trip(connected, clock)]
    while len(trips) < _ROUND_TRIPS and sum(trips) < _ROUND_TRIPS_SECONDS:
        trips.append(_round_trip(connected, clock))
    return min(trips) / 2


def _round_trip(connected: socket.socket, clock: _Patience) -> float:
    began = perf_counter()
    clock.lend(connected).sendall(_PING)
    if clock.lend(connected).recv(1) != _PING:
        raise ConnectionAbortedError("a question was not answered")
    return perf_counter() - began


def _bandwidth(connected: socket.socket, clock: _Patience, latency: float, *, short: bool) -> float:
    """The rate of the second half of what comes; the first brings the connection up to speed."""
    asked = _SHORT_BULK if short else _BULK
    scrap = memoryview(bytearray(_PIECE_BYTES))
    seconds = max(_BULK_SECONDS, _BULK_ROUND_TRIPS * 2 * latency)
    began = perf_counter()
    enough = began + min(seconds, _LONGEST_BULK_SECONDS)
    arrived = [(began, 0)]
    clock.lend(connected).sendall(asked)
    while arrived[-1][1] < _BYTES[asked] and arrived[-1][0] < enough:
        count = clock.lend(connected).recv_into(scrap)
        if count == 0:
            raise ConnectionAbortedError("the connection was closed")
        arrived.append((perf_counter(), arrived[-1][1] + count))
    end, total = arrived[-1]
    middle, before = next(each for each in arrived if 2 * each[1] >= total)
    if end <= middle:  # all of it came at once
        middle, before = arrived[0]
    return (total - before) / max(end - middle, 1e-9)
