"""The sending end of a connection: of an edge, and of the short lane."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic

import xxhash

from allfold_agent.edges.connections import tune
from allfold_agent.edges.outgoing import FilePlace, SentFiles, SharedMemory, rights
from allfold_agent.runtime.event_loop import HUNG_UP, READABLE, WRITABLE, EventLoop
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_agent.traffic.line import Sender
from allfold_core.protocol.frames import ACK, RANGE_SIZE, FrameHeader, FrameType

# The longest frame of the short lane. A Unix socket may take much more several times more slowly.
_AT_ONCE_BYTES = 520 * 1024
_MOST_PIECES = 64
_WITHOUT_END = 1 << 62
_ACKS_AT_ONCE = ACK.size * 512

Bytes = memoryview | bytearray | bytes


class OutConnection:
    """The sending end of one connection; one thread at a time writes on it. Nothing waits.

    Args:
        connected: an open connection to the receiver.
        from_frame: the first frame that the receiver has not got.
        loop: watches it.
        serve: called in the loop's thread with itself, and events: when it has ended, when the
            receiver's word is there or what :meth:`listen` is for, or, after :meth:`await_room`,
            once when there is room.
        sender: has it paced, if it crosses a wire; ``None``: it is not.

    Attributes:
        socket: the connection.
        last_heard: when the last acknowledgement was read (monotonic).
        crosses_a_wire: True unless the two ends know that they are on one machine.
        takes_files: True once the receiver has said that it takes what comes with a frame, by an
            acknowledgement of nothing new.
        awaits_word: True until it is known whether it does.
        waits: True while it awaits room or its turn, or that word. For its user, who holds a lock.
        unsent: the bytes that wait for room, each with the file that goes with the first of them,
            which is kept open until then. For whoever writes.
    """

    def __init__(
        self,
        connected: socket.socket,
        from_frame: int,
        loop: EventLoop,
        serve: Callable[[OutConnection, int], None],
        sender: Sender | None = None,
    ) -> None:
        tune(connected)
        self.socket = connected
        self.last_heard = monotonic()  # the peer has dialled
        self.crosses_a_wire = crosses_a_wire(connected)
        self.takes_files = False
        self.awaits_word = not self.crosses_a_wire
        self._from_frame = from_frame
        self._files = SentFiles()
        self.unsent: deque[tuple[memoryview, SharedMemory | None]] = deque()
        self._ack_rest = b""
        self._loop = loop
        self._serve = serve
        self._is_served = False
        self._polled = 0
        self._awaits_room = self._listens = self._awaits_turn = False
        self._flow = None if sender is None else sender.open(connected)
        self._is_held = False  # by the pacer, not by the kernel
        self.waits = self.awaits_word
        loop.call(self._register)

    # In the loop's thread, in the order of the calls

    def _register(self) -> None:
        self._polled = HUNG_UP
        self._loop.register(self.socket, self._served, HUNG_UP)
        self._is_served = True
        self._poll()

    def _poll(self) -> None:
        """Wait for what is awaited. Each acknowledgement by itself is not worth being woken."""
        events = HUNG_UP
        if self.awaits_word or self._listens:
            events |= READABLE
        if self._awaits_room:
            events |= WRITABLE
        if self._is_served and events != self._polled:
            self._loop.modify(self.socket, events)
            self._polled = events

    def _served(self, events: int) -> None:
        if events & WRITABLE:
            self._awaits_room = False
        self._serve(self, events)
        self._poll()

    def ignore(self) -> None:
        """Serve it no more: it tells of its end again and again."""
        if self._is_served:
            self._is_served = False
            self._loop.unregister(self.socket)

    def _close(self) -> None:
        if self._loop.running:
            self.ignore()
        self.socket.close()

    # From any thread

    def await_room(self) -> None:
        """Have the connection served when it takes bytes again, or when its turn has come."""
        self.waits = True
        if self._is_held and self._flow is not None:
            if not self._awaits_turn:
                self._awaits_turn = True
                self._flow.later(lambda: self._loop.call(self._take_turn))
        elif not self._awaits_room:
            self._awaits_room = True
            self._loop.call(self._poll)

    def _take_turn(self) -> None:
        self._awaits_turn = False
        if self._is_served:
            self._served(WRITABLE)

    def listen(self) -> None:
        """Have the connection served for each acknowledgement from now on."""
        self._listens = True
        self._loop.call(self._poll)

    def shut_down(self) -> None:
        """End the connection; ``OSError`` if it has ended."""
        self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, soon; nobody writes on it any more."""
        if self._flow is not None:
            self._flow.close()
        if self._loop.running:
            self._loop.call(self._close)
        else:
            self._close()

    # Frames, for one thread at a time

    def digest(self, payload: Bytes) -> int:
        """Return what the header of a frame says of its payload.

        Between two processes of one machine there is nothing that could damage it.
        """
        return xxhash.xxh3_64_intdigest(payload) if self.crosses_a_wire else 0

    def write(
        self,
        head: FrameHeader,
        payload: Bytes,
        place: FilePlace | None = None,
        most: int = _WITHOUT_END,
    ) -> int:
        """Write what the socket takes of a frame, but not much over a bound. The rest waits.

        The payload is in use until nothing is :attr:`unsent`, or :meth:`let_go`.

        Args:
            place: where a receiver on this machine may read it, instead of being sent it.

        Returns:
            The number of bytes that are written; 0 where others wait already, before it.

        Raises:
            OSError: the connection broke or was dropped.
        """
        file = None
        if place is not None and self.takes_files and place[0].file is not None:
            found, file = self._files.pass_range(*place, head.length)
            head = head._replace(type=FrameType.SHARED, length=RANGE_SIZE)
            payload = found.pack()
        header = head.pack()
        size, others_wait = len(header) + len(payload), bool(self.unsent)
        is_paced = self._flow is not None and self._flow.is_paced
        if others_wait or size > _AT_ONCE_BYTES or is_paced:
            self.unsent += ((memoryview(header), file), (memoryview(payload), None))
            return 0 if others_wait else self.go_on(most)
        passed = () if file is None else rights(file)
        try:
            written = self.socket.sendmsg((header, payload), passed, socket.MSG_DONTWAIT)
        except BlockingIOError:
            written = 0
        if written < size:
            self.unsent += ((memoryview(header), file), (memoryview(payload), None))
            self._drop(written)
        return written

    def go_on(self, most: int = _WITHOUT_END) -> int:
        """Write what waits, as :meth:`write` does."""
        flow, written, self._is_held = self._flow, 0, False
        while self.unsent and written < most:
            allowed = _AT_ONCE_BYTES
            is_paced = flow is not None and flow.is_paced
            if flow is not None and is_paced:
                allowed = flow.ask(min(allowed, sum(len(each) for each, _ in self.unsent)))
                self._is_held = not allowed
                if self._is_held:
                    break
            count = self._write_some(allowed)
            written += count
            if flow is not None and is_paced:
                flow.give_back(allowed - count)
            if not count:
                break
        return written

    def _write_some(self, most: int) -> int:
        """Write up to a bound of what waits; 0 where there is no room."""
        pieces, file = self._next_pieces(most)
        passed = () if file is None else rights(file)
        try:
            count = self.socket.sendmsg(pieces, passed, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        self._drop(count)
        return count

    def let_go(self) -> None:
        """Use no memory any more that others have given: it is theirs again."""
        self.unsent = deque((memoryview(bytes(each)), file) for each, file in self.unsent)

    def _next_pieces(self, most: int) -> tuple[list[memoryview], SharedMemory | None]:
        """What is written next, up to the next file, which begins a message of its own."""
        first, file = self.unsent[0]
        pieces, left = [first[:most]], most - len(first)
        for piece, other in islice(self.unsent, 1, _MOST_PIECES):
            if other is not None or left <= 0:
                break
            pieces.append(piece[:left])
            left -= len(piece)
        return pieces, file

    def _drop(self, count: int) -> None:
        """Forget bytes that are written, and the file that went with the first of them."""
        unsent = self.unsent
        while unsent and count >= len(unsent[0][0]):
            count -= len(unsent.popleft()[0])
        if count:
            unsent[0] = unsent[0][0][count:], None

    # What the receiver says

    def read_ack(self) -> int | None:
        """Read what the receiver has acknowledged, without waiting.

        Returns:
            The number of the frame that it expects next, ``None`` where it is not complete yet.

        Raises:
            BlockingIOError: there is nothing to be read.
            OSError: the connection has ended.
        """
        data = self.socket.recv(_ACKS_AT_ONCE, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        self.last_heard = monotonic()
        data = self._ack_rest + data
        whole = len(data) - len(data) % ACK.size
        self._ack_rest = data[whole:]
        if not whole:
            return None
        if self.awaits_word:
            self.awaits_word = False
            self.takes_files = ACK.unpack_from(data)[0] == self._from_frame
        expected: int = ACK.unpack_from(data, whole - ACK.size)[0]
        return expected
