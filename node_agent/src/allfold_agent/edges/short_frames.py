"""The reactor's part of an in-edge: short frames, until the edge's own thread gets it back."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import torch

from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.incoming import ACK_BYTES, ACK_FRAMES, DamagedPayload, IncomingFrames
from allfold_agent.edges.receivers import Arriving, Receiver
from allfold_agent.runtime.reactor import HUNG_UP, READABLE, Reactor
from allfold_core.protocol.frames import HEADER_SIZE, RANGE_SIZE, FrameHeader, FrameType

_LOOK_AGAIN_SECONDS = 1.0
# An acknowledgement costs as much as a frame; the memory that it frees may wait for so long.
_ACK_SECONDS = 0.002
# A longer payload is received by the edge's own thread.
_SHORT_BYTES = 256 * 1024
# To read one in memory of the sender takes less time, and there is nothing to be waited for.
SHORT_SHARED_BYTES = 1024 * 1024
_STAGE_BYTES = 16 * 1024


class ShortFrames:
    """Receives short frames in the reactor's thread, between :meth:`receive` and its return.

    The edge's thread waits meanwhile, so one thread at a time uses the connection. A frame that has
    to wait parks the edge: the reactor does not read on until :meth:`resume`.

    Args:
        frames: what has arrived on the edge so far.
        receiver: knows the sinks of frames.
        reactor: the thread that receives.
        closed: set when the edge is wanted no more.
    """

    _connection: InConnection  # of the last call of receive; nothing uses it before

    def __init__(
        self, frames: IncomingFrames, receiver: Receiver, reactor: Reactor, closed: Event
    ) -> None:
        self._source = frames.source
        self._frames = frames
        self._receiver = receiver
        self._reactor = reactor
        self._closed = closed
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._filled = 0
        self._arriving: Arriving | None = None
        self._ack_is_due = False
        self._events = 0
        self._parked = False
        # The hand-over
        self._is_lent = False
        self._returned = Event()
        self._failure: Exception | None = None

    # What the edge calls

    def receive(self, connection: InConnection) -> None:
        """Leave a connection to the reactor, until a long frame comes or the connection ends.

        Raises:
            Exception: what ended the connection; ``EOFError`` also where the agent is stopping.
        """
        if len(connection.early) > len(self._stage):
            return
        self._connection = connection
        self._returned.clear()
        self._reactor.call(lambda: self._guarded(self._take_over))
        while not self._returned.wait(timeout=_LOOK_AGAIN_SECONDS):
            if not self._reactor.running:
                self._closed.wait(timeout=_LOOK_AGAIN_SECONDS)
                raise EOFError("the agent is stopping")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def resume(self) -> None:
        """Try a waiting frame again; from any thread."""
        if self._parked:
            self._reactor.call(self._resume)

    def close(self) -> None:
        """End :meth:`receive`, after the edge was closed; from any thread."""
        self._reactor.call(self._end_if_closed)  # a parked edge does not notice it by itself
        if not self._reactor.running:
            self._returned.set()

    # The hand-over, in the reactor's thread

    def _take_over(self) -> None:
        connection = self._connection
        self._filled = len(connection.early)
        self._stage[: self._filled] = connection.early
        connection.early = memoryview(b"")
        self._is_lent = True
        self._serve_for(READABLE)
        self._advance()

    def _give_back(self, failure: Exception | None = None) -> None:
        self._serve_for(0)
        self._is_lent = False
        if failure is None and self._frames.unacked_frames:
            self._frames.acknowledge(self._connection)
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.retract()
        self._connection.early = memoryview(bytes(self._stage[: self._filled]))
        self._filled = 0
        self._parked = False
        self._failure = failure
        self._returned.set()

    def _end_if_closed(self) -> None:
        if self._closed.is_set() and self._is_lent:
            self._give_back(EOFError("the edge was closed"))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run something; the edge's thread raises the exception that it ended with."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge's thread raises it again
            self._give_back(error)

    def _serve_for(self, events: int) -> None:
        """Register the connection with the reactor for these events, and no others."""
        if self._events and events:
            self._reactor.modify(self._connection.socket, events)
        elif events:
            self._reactor.register(self._connection.socket, self._serve, events)
        elif self._events:
            self._reactor.unregister(self._connection.socket)
        self._events = events

    # A frame that waits

    def _resume(self) -> None:
        if not self._parked:
            return
        self._parked = False
        self._guarded(self._go_on)

    def _go_on(self) -> None:
        self._serve_for(READABLE)
        self._advance()

    def _note_end(self) -> None:
        raise EOFError("the peer closed the connection")

    # Frames

    def _serve(self, _events: int) -> None:
        self._guarded(self._note_end if self._parked else self._receive)

    def _receive(self) -> None:
        if self._arriving is not None:
            self._receive_more(self._arriving)
            return
        connection = self._connection
        self._filled += connection.receive_into(self._stage[self._filled :])
        self._advance()
        if self._arriving is not None and not connection.crosses_a_wire:
            self._receive_more(self._arriving)  # it is there, as it was sent in one go

    def _receive_more(self, arriving: Arriving) -> None:
        """Receive more of a payload that is under way."""
        connection = self._connection
        view = self._stage if arriving.landing is None else arriving.landing.view
        room = view[arriving.received :] if arriving.landing else view[: arriving.missing]
        arriving.received += connection.receive_into(room)
        if arriving.missing:
            connection.wake_for(arriving.missing)
        else:
            connection.wake_at(HEADER_SIZE)
            self._arriving = None
            self._frames.rate.end()
            self._finish(arriving)

    def _advance(self) -> None:
        """Take the frames that have begun to arrive."""
        start = 0
        while self._arriving is None and self._filled - start >= HEADER_SIZE:
            header = FrameHeader.unpack(self._stage[start : start + HEADER_SIZE])
            self._frames.check(header)
            shared, size = None, HEADER_SIZE
            if header.type is FrameType.SHARED:
                size += RANGE_SIZE
                if self._filled - start < size:
                    break
                place = self._stage[start + HEADER_SIZE : start + size]
                header, shared = self._connection.shared(header, place)
            if header.length > (_SHORT_BYTES if shared is None else SHORT_SHARED_BYTES):
                self._drop(start)
                self._give_back()
                return
            arriving = self._begin(header, shared)
            if arriving is None:
                break
            start += size
            if shared is None:
                here = self._stage[start : min(start + header.length, self._filled)]
                start += len(here)
                arriving.put(here)
            if arriving.missing:
                self._arriving = arriving
                self._frames.rate.begin(
                    arriving.missing, crosses_a_wire=self._connection.crosses_a_wire
                )
                self._connection.wake_for(arriving.missing)
            else:
                self._finish(arriving)
        self._drop(start)
        if self._arriving is None and not self._parked:
            # What was read of a header already does not make the connection readable again.
            self._connection.wake_at(HEADER_SIZE - self._filled)

    def _drop(self, count: int) -> None:
        """Forget the bytes that were read."""
        self._filled -= count
        if count and self._filled:
            self._stage[: self._filled] = bytes(self._stage[count : count + self._filled])

    def _begin(self, header: FrameHeader, shared: torch.Tensor | None) -> Arriving | None:
        """Begin to receive a frame, unless it has to wait: for the local ranks, or for the memory
        it goes to. Then :meth:`resume` tries it again.
        """
        self._parked = True  # before the look, so that what becomes ready meanwhile is not missed
        try:
            sink = self._receiver.sink_for(self._source, header, 0.0)
        except TimeoutError:
            self._serve_for(HUNG_UP)  # a peer that dies now is noticed
            return None
        if sink is not None and not sink.is_ready():
            # What has arrived of this op is wanted, also of a peer that has left since.
            self._serve_for(0)
            return None
        self._parked = False
        landing = None if sink is None else self._frames.admit(sink, header, shared)
        return Arriving(header, sink, landing, shared=shared)

    def _finish(self, arriving: Arriving) -> None:
        """Deliver a payload that is complete."""
        frames = self._frames
        header, sink, landing = arriving.header, arriving.sink, arriving.landing
        if landing is not None:
            assert sink is not None
            try:
                frames.verify(header, landing.view)
            except DamagedPayload:
                arriving.retract()
                raise
            sink.received(landing)
        frames.count_in(header.length, scrapped=landing is None)
        if frames.unacked_bytes >= ACK_BYTES or frames.unacked_frames >= ACK_FRAMES:
            frames.acknowledge(self._connection)
        elif not self._ack_is_due:
            self._ack_is_due = True
            self._reactor.later(_ACK_SECONDS, self._acknowledge_late)

    def _acknowledge_late(self) -> None:
        self._ack_is_due = False
        if self._is_lent and self._frames.unacked_frames:
            self._guarded(self._acknowledge)

    def _acknowledge(self) -> None:
        self._frames.acknowledge(self._connection)
