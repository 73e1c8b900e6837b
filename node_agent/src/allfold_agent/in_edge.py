"""The receiving end of an edge: opens it, puts each payload where its sink wants it, acknowledges.

Short frames are read by the reactor, many at once; where a long one comes, the edge's own thread
takes over, until there is nothing to be read for a while. A frame of an op that the local ranks
have not called yet waits, and so do those behind it, in the socket: TCP holds the sender back.
That is all the flow control there is.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Any

import xxhash

from allfold_agent.out_edge import RECONNECT_SECONDS, EdgeCounters, tune
from allfold_agent.reactor import HUNG_UP, READABLE, Reactor
from allfold_agent.sinks import Arriving, Receiver, Sink, SpotT
from allfold_core.errors import AllfoldError, PeerLost, PeerSentIncoherentTensor
from allfold_core.frames import ACK, HEADER_SIZE, FrameError, FrameHeader

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
LOOK_SECONDS = 0.1
_LOOK_AGAIN_SECONDS = 1.0
ACK_BYTES = 1 << 20
ACK_FRAMES = 64
# An acknowledgement costs as much as a frame; the memory that it frees may wait for so long.
_ACK_SECONDS = 0.002
# A longer payload is received by the edge's own thread.
SHORT_BYTES = 256 * 1024
_STAGE_BYTES = 16 * 1024
# How long that thread waits for more before it leaves the edge to the reactor again.
_QUIET_MILLISECONDS = 2
_SCRAP = 256 * 1024
_AT_ONCE = socket.MSG_DONTWAIT
# How much of a payload has to be there before somebody is woken for it: each time costs as much as
# receiving this.
_LOW_WATER = 128 * 1024
# Where the kernel tells how much it lets the peer send: rcv_ssthresh in tcp_info, tcp(7).
_WINDOW = struct.Struct("=64xI")
# After so long the thread of a long payload takes what there is.
_PATIENCE_MILLISECONDS = 100

Dial = Callable[[int], tuple[socket.socket, bytes]]


class InEdge:
    """Everything that this node receives from one other node of a group.

    Args:
        dial: opens the edge from a frame number on: (socket, bytes received already).
        reactor: receives short frames.
    """

    def __init__(
        self,
        source: int,
        epoch: int,
        name: str,
        dial: Dial,
        receiver: Receiver,
        reactor: Reactor,
    ) -> None:
        self.source = source
        self.counters = EdgeCounters()
        self._epoch = epoch
        self._name = name
        self._dial = dial
        self._receiver = receiver
        self._reactor = reactor
        self._expected = 0
        self._unacked_bytes = 0
        self._unacked_frames = 0
        self._ack_is_due = False
        # While the reactor has the edge:
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._filled = 0
        self._arriving: Arriving | None = None
        self._is_lent = False
        self._events = 0
        self._parked = False
        self._returned = Event()
        self._failure: Exception | None = None
        self._early = memoryview(b"")
        self._socket: socket.socket | None = None
        self._readable = select.poll()
        self._low_water = 1
        self._window = 0
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
        self._reactor.call(self._end_if_closed)  # where it waits, it hears of nothing
        if not self._reactor.running:
            self._returned.set()
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
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._low_water = 1
        self._window = 0

    def _receive_all(self) -> None:
        """Until the connection breaks."""
        assert self._socket is not None
        try:
            while not self._closed.is_set():
                self._lend()
                self._receive_long()
        except FrameError as error:
            raise PeerSentIncoherentTensor(f"edge {self._name}: {error}") from error
        except (OSError, EOFError) as error:
            log.info("edge %s broke after frame %d: %s", self._name, self._expected, error)
        finally:
            self._socket.close()

    def _receive_long(self) -> None:
        """Receive frames of any length, until nothing comes for a while."""
        while not self._closed.is_set():
            self._fill(self._header)
            self._frame(FrameHeader.unpack(self._header))
            if not self._early and not self._readable.poll(_QUIET_MILLISECONDS):
                return

    # In the reactor's hands

    def _lend(self) -> None:
        """Leave the edge to the reactor, until a long frame comes or the connection ends."""
        if len(self._early) > len(self._stage):
            return
        self._returned.clear()
        self._reactor.call(lambda: self._guarded(self._take_over))
        while not self._returned.wait(timeout=_LOOK_AGAIN_SECONDS):
            if not self._reactor.running:
                self._closed.wait(timeout=_LOOK_AGAIN_SECONDS)
                raise EOFError("the agent is stopping")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _take_over(self) -> None:
        assert self._socket is not None
        self._filled = len(self._early)
        self._stage[: self._filled] = self._early
        self._early = memoryview(b"")
        self._is_lent = True
        self._serve_for(READABLE)
        self._advance()

    def _serve_for(self, events: int) -> None:
        """Have the reactor wait for these events on the connection, and no others."""
        assert self._socket is not None
        if self._events and events:
            self._reactor.modify(self._socket, events)
        elif events:
            self._reactor.register(self._socket, self._serve, events)
        elif self._events:
            self._reactor.unregister(self._socket)
        self._events = events

    def _end_if_closed(self) -> None:
        if self._closed.is_set() and self._is_lent:
            self._give_back(EOFError("the edge was closed"))

    def _give_back(self, failure: Exception | None = None) -> None:
        self._serve_for(0)
        self._is_lent = False
        if failure is None and self._unacked_frames:
            self._acknowledge()
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.retract(self.source)
        self._early = memoryview(bytes(self._stage[: self._filled]))
        self._filled = 0
        self._parked = False
        self._failure = failure
        self._returned.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong is the business of the edge's thread."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge's thread raises it again
            self._give_back(error)

    def _serve(self, _events: int) -> None:
        self._guarded(self._note_end if self._parked else self._receive_short)

    def _note_end(self) -> None:
        raise EOFError("the peer closed the connection")

    def _receive_short(self) -> None:
        if self._arriving is not None:
            self._receive_more(self._arriving)
            return
        self._filled += self._receive_into(self._stage[self._filled :])
        self._advance()

    def _receive_into(self, view: memoryview, flags: int = _AT_ONCE) -> int:
        """Receive what is there; without flags, wait until something is."""
        assert self._socket is not None
        try:
            count = self._socket.recv_into(view, 0, flags)
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError("the peer closed the connection")
        return count

    def _receive_more(self, arriving: Arriving) -> None:
        """Receive more of a payload that is under way."""
        view = self._stage if arriving.landing is None else arriving.landing.view
        room = view[arriving.received :] if arriving.landing else view[: arriving.missing]
        arriving.received += self._receive_into(room)
        if arriving.missing:
            self._wake_for(arriving.missing)
        else:
            self._wake_at(HEADER_SIZE)
            self._arriving = None
            self._finish(arriving)

    def _advance(self) -> None:
        """Take the frames that have begun to arrive."""
        start = 0
        while self._arriving is None and self._filled - start >= HEADER_SIZE:
            header = FrameHeader.unpack(self._stage[start : start + HEADER_SIZE])
            self._check(header)
            if header.length > SHORT_BYTES:
                self._drop(start)
                self._give_back()
                return
            arriving = self._begin(header)
            if arriving is None:
                break
            start += HEADER_SIZE
            here = self._stage[start : min(start + header.length, self._filled)]
            start += len(here)
            arriving.put(here)
            if arriving.missing:
                self._arriving = arriving
                self._wake_for(arriving.missing)
            else:
                self._finish(arriving)
        self._drop(start)
        if self._arriving is None and not self._parked:
            # What was read of a header already does not make the connection readable again.
            self._wake_at(HEADER_SIZE - self._filled)

    def _drop(self, count: int) -> None:
        """Forget the bytes that were read."""
        self._filled -= count
        if count and self._filled:
            self._stage[: self._filled] = bytes(self._stage[count : count + self._filled])

    def _begin(self, header: FrameHeader) -> Arriving | None:
        """Begin to receive a frame, unless it has to wait: for the local ranks, or for the memory
        it goes to. Then :meth:`resume` tries it again.
        """
        self._parked = True  # before the look, so that what becomes ready meanwhile is not missed
        try:
            sink = self._receiver.sink_for(self.source, header, 0.0)
        except TimeoutError:
            self._serve_for(HUNG_UP)  # a peer that dies now is noticed
            return None
        if sink is not None and not sink.is_ready(self.source):
            # What has arrived of this op is wanted, also of a peer that has left since.
            self._serve_for(0)
            return None
        self._parked = False
        landing = None if sink is None else self._admit(sink, header)
        return Arriving(header, sink, landing)

    def _finish(self, arriving: Arriving) -> None:
        """The payload is there."""
        header, sink, landing = arriving.header, arriving.sink, arriving.landing
        if landing is not None:
            assert sink is not None
            if self._is_damaged(header, landing.view):
                landing.release()
            else:
                sink.received(landing)
        self._count_in(header.length)
        if self._unacked_bytes >= ACK_BYTES or self._unacked_frames >= ACK_FRAMES:
            self._acknowledge()
        elif not self._ack_is_due:
            self._ack_is_due = True
            self._reactor.later(_ACK_SECONDS, self._acknowledge_late)

    def resume(self) -> None:
        """What a frame waits for may be there; from any thread."""
        if self._parked:
            self._reactor.call(self._resume)

    def _resume(self) -> None:
        if not self._parked:
            return
        self._parked = False
        self._guarded(self._go_on)

    def _go_on(self) -> None:
        self._serve_for(READABLE)
        self._advance()

    def _acknowledge_late(self) -> None:
        self._ack_is_due = False
        if self._is_lent and self._unacked_frames:
            self._guarded(self._acknowledge)

    # In the hands of the edge's thread

    def _fill(self, view: memoryview) -> None:
        """Receive exactly ``len(view)`` bytes."""
        assert self._socket is not None
        if self._early and view:
            count = min(len(view), len(self._early))
            view[:count] = self._early[:count]
            self._early = self._early[count:]
            view = view[count:]
        crosses_a_wire = self._socket.family != socket.AF_UNIX
        while view:
            if crosses_a_wire:
                self._wake_for(len(view))
                self._readable.poll(_PATIENCE_MILLISECONDS)
            view = view[self._receive_into(view, _AT_ONCE if crosses_a_wire else 0) :]
        self._wake_at(HEADER_SIZE)

    def _wake_for(self, missing: int) -> None:
        """Have the connection readable when a good part of a payload is there.

        No more than half of what the peer may send without being read, which is not much at first:
        it would wait for us, and we for it.
        """
        assert self._socket is not None
        if missing > HEADER_SIZE and self._socket.family != socket.AF_UNIX:
            if self._window < 2 * _LOW_WATER:  # it grows
                info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size)
                (self._window,) = _WINDOW.unpack(info)
            missing = max(1, min(missing, _LOW_WATER, self._window // 2))
        self._wake_at(missing)

    def _wake_at(self, nbytes: int) -> None:
        """Have the connection readable only when so many bytes are there, or it has ended.

        A link brings a long payload packet by packet. A blocking call would not do: what it has
        taken while it waits does not count any more.
        """
        assert self._socket is not None
        if nbytes != self._low_water and self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def _frame(self, header: FrameHeader) -> None:
        self._check(header)
        sink = self._await_sink(header)
        if sink is None or not self._deliver(sink, header):
            self._discard(header.length)
        self._count_in(header.length)
        if self._unacked_bytes >= ACK_BYTES or sink is None or sink.all_received(self.source):
            self._acknowledge()

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
        landing = self._admit(sink, header)
        if landing is None:
            return False
        try:
            self._fill(landing.view)
        except (OSError, EOFError):
            sink.retract(self.source, landing)
            raise
        if self._is_damaged(header, landing.view):
            landing.release()
        else:
            sink.received(landing)
        return True

    # In either

    def _check(self, header: FrameHeader) -> None:
        if header.epoch != self._epoch or header.number != self._expected:
            raise PeerSentIncoherentTensor(
                f"edge {self._name}: frame {header.number} of epoch {header.epoch}, "
                f"expected frame {self._expected} of epoch {self._epoch}"
            )

    def _admit(self, sink: Sink[SpotT], header: FrameHeader) -> SpotT | None:
        """Where the payload goes, ``None`` where it is not wanted, or cannot be."""
        try:
            return sink.admit(self.source, header)
        except PeerSentIncoherentTensor as error:
            self._refuse(header, error.message)
            return None

    def _is_damaged(self, header: FrameHeader, payload: memoryview) -> bool:
        if header.digest and xxhash.xxh3_64_intdigest(payload) != header.digest:
            where = f"op {header.seq} at element {header.offset}"
            self._refuse(header, f"the payload of {where} is damaged: its digest differs")
            return True
        self.counters.payload_bytes += header.length
        self.counters.frames += 1
        return False

    def _refuse(self, header: FrameHeader, problem: str) -> None:
        error = PeerSentIncoherentTensor(f"edge {self._name}: {problem}")
        self._receiver.incoherent(header.seq, error)

    def _discard(self, length: int) -> None:
        if length and not self._scrap:
            self._scrap = memoryview(bytearray(_SCRAP))
        while length:
            part = self._scrap[: min(length, _SCRAP)]
            self._fill(part)
            length -= len(part)

    def _count_in(self, nbytes: int) -> None:
        self._expected += 1
        self._unacked_bytes += nbytes
        self._unacked_frames += 1

    def _acknowledge(self) -> None:
        """Tell the sender what has arrived, so that it can let go of the memory."""
        assert self._socket is not None
        self._unacked_bytes = self._unacked_frames = 0
        try:
            self._socket.send(ACK.pack(self._expected), socket.MSG_DONTWAIT)
        except BlockingIOError:
            log.debug("edge %s: no room for an acknowledgement; a later one covers it", self._name)
