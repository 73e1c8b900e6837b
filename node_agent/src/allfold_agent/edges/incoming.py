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

from allfold_agent.edges.connections import EdgeCounters, InConnection
from allfold_agent.edges.frame_reader import NOWHERE, FrameReader
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.receivers import FrameLanding, NotYet, Receiver, Sink
from allfold_agent.runtime.buffers import copy_bytes
from allfold_agent.runtime.reactor import HUNG_UP, READABLE, Reactor
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.protocol.frames import FrameHeader

log = logging.getLogger(__name__)

# An acknowledgement costs as much as a frame; the memory that it frees may wait for so long.
_ACK_BYTES = 1 << 20
_ACK_FRAMES = 64
_ACK_SECONDS = 0.002
_STAGE_BYTES = 16 * 1024
# After so much in memory of the sender it is the turn of the other edges.
_TURN_BYTES = 1 << 20


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
        self._reader: FrameReader | None = None
        # Of the frame that is being received:
        self._sink: Sink[FrameLanding] | None = None
        self._landing: FrameLanding | None = None
        self._left = 0  # bytes of shared memory in this turn
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
        self._reader = FrameReader(connection, self, self.rate, _STAGE_BYTES, early)
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
        sink, landing = self._sink, self._landing
        self._reader = self._sink = self._landing = None
        if sink is not None and landing is not None:
            sink.retract(landing)  # it comes again
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
        if not self._goes_on:  # with what came before this; the reactor tells of this again
            self._have_turn(FrameReader.receive)

    def _begin_turn(self) -> None:
        """Take the frames in the stage, whose bytes do not make the connection readable again."""
        self._have_turn(FrameReader.advance)

    def _have_turn(self, read: Callable[[FrameReader], None]) -> None:
        self._left = _TURN_BYTES
        connection, reader = self._connection, self._reader
        if connection is not None and reader is not None:
            read(reader)
            if not self._parked:
                connection.wake_for(reader.missing)

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

    # Frames

    def take(self, header: FrameHeader, payload: memoryview, *, is_shared: bool) -> bool:
        """Take a frame that is whole, unless it has to wait."""
        if not self._admit(header, payload if is_shared else None):
            return False
        view = NOWHERE if self._landing is None else self._landing.view
        if is_shared:
            self._left -= header.length
            if view:  # it may be long: others go on meanwhile
                copy_bytes(view, payload)
        elif view:
            view[:] = payload
        self.finish(header, payload)
        return True

    def begin(self, header: FrameHeader) -> memoryview | None:
        """Return the landing of a long payload, unless it has to wait."""
        if not self._admit(header, None):
            return None
        return NOWHERE if self._landing is None else self._landing.view

    def finish(self, header: FrameHeader, _payload: memoryview) -> None:
        """Deliver a payload that is complete."""
        sink, landing = self._sink, self._landing
        self._sink = self._landing = None
        if sink is not None and landing is not None:
            sink.received(landing)
            self.counters.add(header.length)
        self.count_in(header.length, scrapped=landing is None)
        if self._unacked_bytes >= _ACK_BYTES or self._unacked_frames >= _ACK_FRAMES:
            self._acknowledge()
        else:
            self._acknowledge_soon()

    def _admit(self, header: FrameHeader, shared: memoryview | None) -> bool:
        """Find the landing of the next frame; ``None`` where it is not wanted or does not fit.

        Args:
            shared: the payload, where it lies in memory of the sender.

        Returns:
            False where the frame has to wait: for its turn; or for the local ranks, or for the
            memory it goes to, until :meth:`resume`.
        """
        if self._left <= 0:
            self._goes_on = True
            self._reactor.call(self._go_on)
            return False
        if header.number != self.expected:
            raise PeerSentIncoherentTensor(
                f"edge {self._name}: frame {header.number}, expected frame {self.expected}"
            )
        self._parked = True  # before the look, so that what becomes ready meanwhile is not missed
        try:
            sink = self._receiver.sink_for(self._source, header)
        except NotYet:
            self._serve_for(HUNG_UP)  # a peer that dies now is noticed
            return False
        if sink is not None and not sink.is_ready():
            # What has arrived of this op is wanted, also of a peer that has left since.
            self._serve_for(0)
            return False
        self._parked = False
        if sink is not None:
            try:
                self._landing = sink.admit(header, shared)
            except PeerSentIncoherentTensor as error:
                refusal = PeerSentIncoherentTensor(f"edge {self._name}: {error.message}")
                self._receiver.incoherent(header, refusal)
        self._sink = sink
        return True

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
