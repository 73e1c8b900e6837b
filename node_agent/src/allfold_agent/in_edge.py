"""The receiving end of an edge: opens it, puts each payload where its sink wants it, acknowledges.

The thread of an in-edge waits for an op that the local ranks have not called yet; the frames
behind it wait in the socket, and TCP holds the sender back. That is all the flow control there is.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Any, Protocol, TypeVar

import xxhash

from allfold_agent.out_edge import RECONNECT_SECONDS, EdgeCounters, tune
from allfold_core.errors import AllfoldError, PeerLost, PeerSentIncoherentTensor
from allfold_core.frames import ACK, HEADER_SIZE, FrameError, FrameHeader

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
LOOK_SECONDS = 0.1
ACK_BYTES = 1 << 20
_SCRAP = 256 * 1024

Dial = Callable[[int], tuple[socket.socket, bytes]]


class Spot(Protocol):
    """Where the payload of one frame goes."""

    @property
    def view(self) -> memoryview:
        """Exactly as many bytes as the payload has."""

    def release(self) -> None:
        """Let go of the memory; what landed there is worthless."""


SpotT = TypeVar("SpotT", bound=Spot)


class Sink(Protocol[SpotT]):
    """What takes frames in: an op, or the mail of a group."""

    def admit(self, source: int, header: FrameHeader, /) -> SpotT | None:
        """Where the payload goes, ``None`` where it is not wanted any more.

        Raises:
            PeerSentIncoherentTensor: it is not a frame that can come now.
        """

    def retract(self, source: int, landing: SpotT, /) -> None:
        """An admitted frame broke off; it will come again. Lets go of the memory."""

    def received(self, landing: SpotT, /) -> None:
        """The payload is there. Lets go of the memory."""

    def all_received(self, source: int, /) -> bool:
        """Whether nothing more of it will come from a node."""


class Receiver(Protocol):
    """What an in-edge needs of its group."""

    def sink_for(self, source: int, header: FrameHeader, seconds: float, /) -> Sink[Any] | None:
        """Who takes a frame, ``None`` where nobody does; ``TimeoutError`` if nobody does yet."""

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        """The edge is gone for good."""

    def incoherent(self, seq: int, error: AllfoldError, /) -> None:
        """A frame does not fit its op."""


class InEdge:
    """Everything that this node receives from one other node of a group.

    Args:
        dial: opens the edge from a frame number on: (socket, bytes received already).
    """

    def __init__(self, source: int, epoch: int, name: str, dial: Dial, receiver: Receiver) -> None:
        self.source = source
        self.counters = EdgeCounters()
        self._epoch = epoch
        self._name = name
        self._dial = dial
        self._receiver = receiver
        self._expected = 0
        self._unacked_bytes = 0
        self._early = memoryview(b"")
        self._socket: socket.socket | None = None
        self._closed = Event()
        self._header = memoryview(bytearray(HEADER_SIZE))
        self._scrap = memoryview(b"")
        self._thread = Thread(target=self._run, name=f"allfold-receive-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what was not received stays unreceived."""
        self._closed.set()
        connected = self._socket
        if connected is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("edge %s was gone already: %s", self._name, error)
        self._thread.join(timeout=2.0)

    # Connection

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._connect()
                self._receive_all()
        except AllfoldError as error:
            if not self._closed.is_set():
                self._receiver.edge_lost(self.source, error)
        except Exception as error:
            log.exception("edge %s failed", self._name)
            self._receiver.edge_lost(self.source, PeerLost(f"edge {self._name} failed: {error}"))
        finally:
            if self._socket is not None:
                self._socket.close()

    def _connect(self) -> None:
        """Open the edge, trying again while the peer may only be restarting its end."""
        deadline = monotonic() + RECONNECT_SECONDS
        while True:
            try:
                connected, early = self._dial(self._expected)
                break
            except PeerLost:
                if self._closed.wait(RETRY_SECONDS) or monotonic() > deadline:
                    raise
        tune(connected)
        self._early = memoryview(early)
        self._socket = connected

    def _receive_all(self) -> None:
        assert self._socket is not None
        try:
            while not self._closed.is_set():
                self._fill(self._header)
                self._frame(FrameHeader.unpack(self._header))
        except FrameError as error:
            raise PeerSentIncoherentTensor(f"edge {self._name}: {error}") from error
        except (OSError, EOFError) as error:
            log.info("edge %s broke after frame %d: %s", self._name, self._expected, error)
        finally:
            self._socket.close()

    def _fill(self, view: memoryview) -> None:
        """Receive exactly ``len(view)`` bytes."""
        assert self._socket is not None
        if self._early and view:
            count = min(len(view), len(self._early))
            view[:count] = self._early[:count]
            self._early = self._early[count:]
            view = view[count:]
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the peer closed the connection")
            view = view[count:]

    # Frames

    def _frame(self, header: FrameHeader) -> None:
        if header.epoch != self._epoch or header.number != self._expected:
            raise PeerSentIncoherentTensor(
                f"edge {self._name}: frame {header.number} of epoch {header.epoch}, "
                f"expected frame {self._expected} of epoch {self._epoch}"
            )
        sink = self._await_sink(header)
        if sink is None or not self._deliver(sink, header):
            self._discard(header.length)
        self._acknowledge(header.length, sink is None or sink.all_received(self.source))

    def _await_sink(self, header: FrameHeader) -> Sink[Any] | None:
        """Who takes a frame, once the local ranks have called its op; the peer may die then."""
        while True:
            try:
                return self._receiver.sink_for(self.source, header, LOOK_SECONDS)
            except TimeoutError:
                if self._peer_hung_up():
                    raise EOFError("the peer closed the connection") from None

    def _peer_hung_up(self) -> bool:
        """Whether nothing will come any more after what has arrived."""
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _deliver(self, sink: Sink[Any], header: FrameHeader) -> bool:
        """Receive the payload; false where it must be thrown away."""
        try:
            landing = sink.admit(self.source, header)
        except PeerSentIncoherentTensor as error:
            self._refuse(header, error.message)
            return False
        if landing is None:
            return False
        try:
            self._fill(landing.view)
        except (OSError, EOFError):
            sink.retract(self.source, landing)
            raise
        if header.digest and xxhash.xxh3_64_intdigest(landing.view) != header.digest:
            landing.release()
            self._refuse(
                header,
                f"the payload of op {header.seq} at element {header.offset} is damaged: "
                "its digest differs",
            )
            return True
        self._count(header.length)
        sink.received(landing)
        return True

    def _refuse(self, header: FrameHeader, problem: str) -> None:
        error = PeerSentIncoherentTensor(f"edge {self._name}: {problem}")
        self._receiver.incoherent(header.seq, error)

    def _count(self, nbytes: int) -> None:
        self.counters.payload_bytes += nbytes
        self.counters.frames += 1

    def _discard(self, length: int) -> None:
        if length and not self._scrap:
            self._scrap = memoryview(bytearray(_SCRAP))
        while length:
            part = self._scrap[: min(length, _SCRAP)]
            self._fill(part)
            length -= len(part)

    def _acknowledge(self, nbytes: int, op_is_complete: bool) -> None:
        """Now and then tell the sender what has arrived, so that it can let go of the memory."""
        assert self._socket is not None
        self._expected += 1
        self._unacked_bytes += nbytes
        if self._unacked_bytes < ACK_BYTES and not op_is_complete:
            return
        self._unacked_bytes = 0
        try:
            self._socket.send(ACK.pack(self._expected), socket.MSG_DONTWAIT)
        except BlockingIOError:
            log.debug("edge %s: no room for an acknowledgement; a later one covers it", self._name)
