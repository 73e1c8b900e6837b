"""The frames of an in-edge: received as they come, each payload straight into its landing.

Nothing here waits. A frame of an op that the local ranks have not called yet parks the edge, and
so does one whose place is still in use: it stays in the socket, and so do the frames behind it,
until :meth:`IncomingFrames.resume`. TCP holds the sender back; there is no other flow control.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress

import xxhash

from allfold_agent.edges.connections import EdgeCounters, InConnection
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.receivers import Arriving, FrameLanding, NotYet, Receiver, Sink
from allfold_agent.runtime.buffers import copy_bytes
from allfold_agent.runtime.reactor import HUNG_UP, READABLE, Reactor
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.protocol.frames import HEADER_SIZE, RANGE_SIZE, FrameHeader, FrameType

log = logging.getLogger(__name__)

# An acknowledgement costs as much as a frame; the memory that it frees may wait for so long.
_ACK_BYTES = 1 << 20
_ACK_FRAMES = 64
_ACK_SECONDS = 0.002
_STAGE_BYTES = 16 * 1024
# After so much it is the turn of the other edges.
_TURN_BYTES = 1 << 20


class DamagedPayload(ValueError):
    """The payload of a frame is not the one whose digest its header has."""


class IncomingFrames:
    """The receiving end of an edge, over all its connections. In the reactor's thread.

    Args:
        source: the name of the peer's node.
        name: of the edge, for messages.
        receiver: knows the sinks of frames; told of those that do not fit.
        reactor: whose thread it is.
        on_end: told of what ended the connection, which is closed by then.

    Attributes:
        expected: the number of the next frame.
        rate: at which payloads come.
    """

    def __init__(
        self,
        source: str,
        name: str,
        receiver: Receiver,
        reactor: Reactor,
        on_end: Callable[[Exception], None],
    ) -> None:
        self.counters = EdgeCounters()
        self.rate = LinkRate()
        self.expected = 0
        self._source = source
        self._name = name
        self._receiver = receiver
        self._reactor = reactor
        self._on_end = on_end
        self._connection: InConnection | None = None
        self._last_heard = float("-inf")  # of the connections before
        self._stage = memoryview(b"")
        self._filled = 0
        self._arriving: Arriving | None = None
        self._left = 0  # bytes of this turn
        self._goes_on = False  # with what is in the stage, in a turn that will come
        self._events = 0
        self._parked = False
        self._unacked_bytes = self._unacked_frames = 0
        self._ack_is_due = False

    # The connection

    def open(self, connected: socket.socket, early: bytes, *, takes_files: bool) -> None:
        """Receive on a connection.

        Args:
            early: what was received with its opening.
            takes_files: let a sender on this machine pass files, instead of what is in them.
        """
        self._guarded(lambda: self._open(connected, early, takes_files))

    def _open(self, connected: socket.socket, early: bytes, takes_files: bool) -> None:
        connection = self._connection = InConnection(connected)
        self._unacked_bytes = self._unacked_frames = 0
        self._stage = memoryview(bytearray(max(_STAGE_BYTES, len(early))))
        self._stage[: len(early)] = early
        self._filled = len(early)
        if takes_files and not connection.crosses_a_wire:
            self._acknowledge()  # nothing new: the sender may pass files now
        self._serve_for(READABLE)
        self._begin_turn()

    def close(self) -> None:
        """End the connection, if there is one; what was not received stays unreceived."""
        connection = self._connection
        if connection is None:
            return
        if self._unacked_frames:
            with suppress(OSError):  # it has ended
                self._acknowledge()  # the sender may be waiting for this to go
        if self._reactor.running:
            self._serve_for(0)
        self._events = 0
        # In this order: another thread that finds no connection looks there.
        self._last_heard = connection.last_heard
        self._connection = None
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.retract()
        self._parked = self._goes_on = False
        connection.close()

    @property
    def last_heard(self) -> float:
        """The time of the last byte from the peer (monotonic); ``-inf`` if there was none."""
        connection = self._connection
        return self._last_heard if connection is None else connection.last_heard

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge decides what becomes of it
            self.close()
            self._on_end(error)

    def _serve_for(self, events: int) -> None:
        """Register the connection with the reactor for these events, and no others."""
        assert self._connection is not None
        connected = self._connection.socket
        if self._events and events:
            self._reactor.modify(connected, events)
        elif events:
            self._reactor.register(connected, self._serve, events)
        elif self._events:
            self._reactor.unregister(connected)
        self._events = events

    # Turns

    def _serve(self, _events: int) -> None:
        self._guarded(self._note_end if self._parked else self._take_turn)

    def _note_end(self) -> None:
        raise EOFError("the peer closed the connection")

    def _take_turn(self) -> None:
        """Receive what is there, up to the end of the turn."""
        if self._goes_on:
            return  # with what came before this; the reactor tells of this again
        self._left = _TURN_BYTES
        while self._left > 0 and self._receive():
            continue

    def _begin_turn(self) -> None:
        """Take the frames in the stage, whose bytes do not make the connection readable again."""
        self._left = _TURN_BYTES
        self._advance()

    def _go_on(self) -> None:
        if self._goes_on:
            self._goes_on = False
            self._guarded(self._begin_turn)

    def resume(self) -> None:
        """Try a waiting frame again; from any thread."""
        if self._parked:
            self._reactor.call(self._resume)

    def _resume(self) -> None:
        if self._parked:
            self._parked = False
            self._guarded(self._leave_park)

    def _leave_park(self) -> None:
        self._serve_for(READABLE)
        self._begin_turn()

    # Bytes

    def _receive(self) -> bool:
        """Receive once; return True if there is probably more."""
        connection = self._connection
        if connection is None:
            return False
        if self._arriving is not None:
            return self._receive_payload(connection, self._arriving)
        count = connection.receive_into(self._stage[self._filled :])
        self._filled += count
        self._advance()
        # What was sent in one go is there, unless a link brings it packet by packet.
        return self._arriving is not None and not connection.crosses_a_wire

    def _receive_payload(self, connection: InConnection, arriving: Arriving) -> bool:
        """Receive more of a payload; without a landing into the stage, to be forgotten."""
        if arriving.landing is None:
            room = self._stage[: arriving.missing]
        else:
            room = arriving.landing.view[arriving.received :]
        count = connection.receive_into(room[: self._left])
        arriving.received += count
        self._left -= count
        if arriving.missing:
            connection.wake_for(arriving.missing)
        else:
            connection.wake_at(HEADER_SIZE)
            self._arriving = None
            self.rate.end()
            self._finish(arriving)
        return count > 0

    def _advance(self) -> None:
        """Take the frames that have begun to arrive."""
        start = 0
        while self._filled - start >= HEADER_SIZE:
            if self._left <= 0:
                self._goes_on = True
                self._reactor.call(self._go_on)
                break
            size = self._take_frame(self._stage[start : self._filled])
            start += size
            if not size or self._arriving is not None:
                break
        self._drop(start)
        if self._arriving is None and not self._parked and self._connection is not None:
            # What was read of a header already does not make the connection readable again.
            self._connection.wake_at(max(1, HEADER_SIZE - self._filled))

    def _take_frame(self, here: memoryview) -> int:
        """Begin with the frame at the beginning of what is here; finish it where all of it is.

        Returns:
            The number of bytes of it that were here; 0 where it has to wait.
        """
        connection = self._connection
        assert connection is not None
        header = FrameHeader.unpack(here[:HEADER_SIZE])
        self._check(header)
        shared, size = None, HEADER_SIZE
        if header.type is FrameType.SHARED:
            size += RANGE_SIZE
            if len(here) < size:
                return 0
            header, payload = connection.shared(header, here[HEADER_SIZE:size])
            shared = payload
        arriving = self._begin(header, shared)
        if arriving is None:
            return 0
        if shared is None:
            begun = here[size : size + header.length]
            size += len(begun)
            arriving.put(begun)
            self._left -= len(begun)
        else:
            self._left -= header.length
        if arriving.missing:
            self._arriving = arriving
            self.rate.begin(arriving.missing, crosses_a_wire=connection.crosses_a_wire)
            connection.wake_for(arriving.missing)
        else:
            self._finish(arriving)
        return size

    def _drop(self, count: int) -> None:
        """Forget the bytes that were read."""
        self._filled -= count
        if count and self._filled:
            self._stage[: self._filled] = bytes(self._stage[count : count + self._filled])

    # Frames

    def _check(self, header: FrameHeader) -> None:
        """Raise :class:`PeerSentIncoherentTensor` where it is not the next frame of the edge."""
        if header.number != self.expected:
            raise PeerSentIncoherentTensor(
                f"edge {self._name}: frame {header.number}, expected frame {self.expected}"
            )

    def _begin(self, header: FrameHeader, shared: memoryview | None) -> Arriving | None:
        """Begin to receive a frame, unless it has to wait: for the local ranks, or for the memory
        it goes to. Then :meth:`resume` tries it again.
        """
        self._parked = True  # before the look, so that what becomes ready meanwhile is not missed
        try:
            sink = self._receiver.sink_for(self._source, header)
        except NotYet:
            self._serve_for(HUNG_UP)  # a peer that dies now is noticed
            return None
        if sink is not None and not sink.is_ready():
            # What has arrived of this op is wanted, also of a peer that has left since.
            self._serve_for(0)
            return None
        self._parked = False
        landing = None if sink is None else self._admit(sink, header, shared)
        return Arriving(header, sink, landing, shared=shared)

    def _admit(
        self, sink: Sink[FrameLanding], header: FrameHeader, shared: memoryview | None
    ) -> FrameLanding | None:
        """Return the landing of a payload, ``None`` where it is not wanted or does not fit.

        Args:
            shared: the payload, where it lies in memory of the sender.
        """
        try:
            landing = sink.admit(header, shared)
        except PeerSentIncoherentTensor as error:
            refusal = PeerSentIncoherentTensor(f"edge {self._name}: {error.message}")
            self._receiver.incoherent(header, refusal)
            return None
        if shared is not None and landing is not None and len(landing.view):
            copy_bytes(landing.view, shared)
        return landing

    def _finish(self, arriving: Arriving) -> None:
        """Deliver a payload that is complete."""
        header, sink, landing = arriving.header, arriving.sink, arriving.landing
        if landing is not None:
            assert sink is not None
            try:
                self._verify(header, landing.view)
            except DamagedPayload:
                arriving.retract()
                raise
            sink.received(landing)
        self.count_in(header.length, scrapped=landing is None)
        if self._unacked_bytes >= _ACK_BYTES or self._unacked_frames >= _ACK_FRAMES:
            self._acknowledge()
        else:
            self._acknowledge_soon()

    def _verify(self, header: FrameHeader, payload: memoryview) -> None:
        """Compare a payload with its digest and count it; :class:`DamagedPayload` if they differ.

        Nothing is compared where the header has no digest.
        """
        if header.digest and xxhash.xxh3_64_intdigest(payload) != header.digest:
            raise DamagedPayload(f"the payload of frame {header.number} is damaged")
        self.counters.payload_bytes += header.length
        self.counters.frames += 1

    def count_in(self, nbytes: int, *, scrapped: bool) -> None:
        """Note that the expected frame was delivered, or thrown away because nobody wants it."""
        if scrapped:
            self.counters.scrapped_frames += 1
        self.expected += 1
        self._unacked_bytes += nbytes
        self._unacked_frames += 1

    # Acknowledgements

    def _acknowledge_soon(self) -> None:
        if not self._ack_is_due:
            self._ack_is_due = True
            self._reactor.later(_ACK_SECONDS, self._acknowledge_late)

    def _acknowledge_late(self) -> None:
        self._ack_is_due = False
        if self._connection is not None and self._unacked_frames:
            self._guarded(self._acknowledge)

    def _acknowledge(self) -> None:
        """Tell the sender what has arrived, so that it can let go of the memory."""
        connection = self._connection
        if connection is None:
            return
        if connection.acknowledge(self.expected):
            self._unacked_bytes = self._unacked_frames = 0
            return
        log.debug("edge %s: no room for an acknowledgement; a later one covers it", self._name)
        self._acknowledge_soon()
