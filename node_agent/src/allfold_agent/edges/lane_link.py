"""The connections of the short lane to one other node: whole frames, in both directions.

Each node dials the other, as for other edges: what it receives comes on the connection that it has
opened. Nothing is sent again: if a connection breaks, the nodes agree to do the ops in the long
lane.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic
from typing import Protocol

import xxhash

from allfold_agent.edges.connections import EdgeCounters, tune
from allfold_agent.edges.outgoing import SentFiles, SharedMemory
from allfold_agent.edges.received_files import MissingFile, ReceivedFiles
from allfold_agent.runtime.lane_thread import READABLE, WRITABLE, LaneThread
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import (
    HEADER_SIZE,
    RANGE_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
    SharedRange,
)

log = logging.getLogger(__name__)

LONGEST_PAYLOAD = 512 * 1024
"""Of a frame: short against the caches, long against what it takes to send one."""

# The longest frame that is copied out of the stage; others come to their memory at once.
_STAGE_BYTES = HEADER_SIZE + 64 * 1024
_MOST_PIECES_AT_ONCE = 64
_MOST_IDLE = 32

# What is shorter is sent itself, to a node on this machine as well.
_SHARED_BYTES = 32 * 1024
_TAKES_FILES = b"f"
_RIGHTS_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_CLOSE_ON_EXEC = socket.MSG_CMSG_CLOEXEC
_DESCRIPTOR = struct.Struct("i")

Payload = memoryview | bytearray
FilePlace = tuple[SharedMemory, int]
"""A file, and where something begins in it."""
Unsent = tuple[memoryview, int]
"""Bytes, and a descriptor that goes with the first of them; -1 for none."""
OnChange = Callable[[], None]


class FrameSink(Protocol):
    """Takes the frames that come."""

    def destination(self, node: str, header: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of a frame; ``None`` for any other."""

    def take(self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        """Take in a frame; with ``is_there`` it has come to its :meth:`destination`."""


class Payloads:
    """Memory for long payloads; what was used last is used next, as the caches have it.

    Attributes:
        files_come: False once a frame of a node on this machine came without the file that it is
            in: something between the two passes bytes alone.
    """

    def __init__(self) -> None:
        self._idle: list[bytearray] = []
        self.files_come = True

    def take(self, nbytes: int) -> memoryview:
        """Return memory of a size, until it is given back."""
        memory = self._idle.pop() if self._idle else bytearray(LONGEST_PAYLOAD)
        return memoryview(memory)[:nbytes]

    def give_back(self, payload: Payload) -> None:
        """Take a payload back, if it is of this memory."""
        memory = payload.obj if isinstance(payload, memoryview) else None
        if not isinstance(memory, bytearray) or len(memory) != LONGEST_PAYLOAD:
            return
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(memory)


class Incoming:
    """A long frame that is on its way.

    Attributes:
        is_there: the payload comes to where the sink wants it.
        got: the bytes that have come.
    """

    __slots__ = ("got", "header", "is_there", "payload")

    def __init__(self, header: FrameHeader, payload: memoryview, *, is_there: bool) -> None:
        self.header = header
        self.payload = payload
        self.is_there = is_there
        self.got = 0


class LaneLink:
    """The lane's frames to and from one node. In the lane's thread.

    Args:
        node: the other one.
        thread: the lane's.
        sink: takes the frames that come.
        payloads: memory for those.
        on_broken: told when a connection has ended.
    """

    def __init__(
        self,
        node: str,
        thread: LaneThread,
        sink: FrameSink,
        payloads: Payloads,
        on_broken: OnChange,
    ) -> None:
        self.node = node
        self.sent, self.received = EdgeCounters(), EdgeCounters()
        self._thread = thread
        self._sink = sink
        self._payloads = payloads
        self._on_broken = on_broken
        self._broke_at: dict[str, float] = {}
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._unsent: deque[Unsent] = deque()
        self._sent_files: SentFiles | None = None  # where the other node takes files
        self._files = ReceivedFiles()
        self._stage = bytearray(_STAGE_BYTES)
        self._view = memoryview(self._stage)
        self._filled = 0
        self._incoming: Incoming | None = None
        self._number = 0

    @property
    def is_whole(self) -> bool:
        """True if frames can go both ways."""
        return self._out is not None and self._in is not None

    @property
    def sending(self) -> socket.socket | None:
        """The connection on which it sends, if there is one. From any thread."""
        return self._out

    def take_out(self, connected: socket.socket) -> None:
        """Send on this connection, which the other node has opened."""
        self._drop_out()
        self._note_end("to")
        tune(connected)
        connected.setblocking(False)
        self._out, self._number = connected, 0
        self._thread.register(connected.fileno(), self._serve_out)

    def take_in(self, connected: socket.socket, early: bytes) -> None:
        """Receive on this connection, which this node has opened."""
        self._drop_in()
        self._note_end("from")
        tune(connected)
        connected.setblocking(False)
        self._in, self._filled = connected, len(early)
        self._view[: len(early)] = early
        self._thread.register(connected.fileno(), self._serve_in)
        try:
            if self._payloads.files_come and not crosses_a_wire(connected):
                connected.send(_TAKES_FILES)
            self._take_frames()
        except (OSError, FrameError) as error:
            self._lose_in(error)

    def close(self) -> None:
        """End the connections."""
        self._drop_out()
        self._drop_in()

    def _note_break(self, direction: str, error: Exception) -> None:
        log.info("the short lane %s node %s broke: %s", direction, self.node, error)
        self._broke_at[direction] = monotonic()

    def _note_end(self, direction: str) -> None:
        """Log that the lane is there again, if it was broken in this direction."""
        began = self._broke_at.pop(direction, None)
        if began is not None:
            seconds = monotonic() - began
            log.info(
                "the short lane %s node %s is back, after %.1f s", direction, self.node, seconds
            )

    # Sending

    @property
    def has_sent(self) -> bool:
        """True unless something waits for room in the connection."""
        return not self._unsent

    def send(
        self,
        seq: int,
        stamp: int,
        fingerprint: int,
        behind: int,
        start: int,
        payload: Payload,
        place: FilePlace | None = None,
        kind: FrameType = FrameType.DATA,
    ) -> None:
        """Send a frame; what the socket does not take at once follows as soon as it does.

        Its memory is in use until :attr:`has_sent`, or :meth:`let_go`.

        Args:
            place: where a node on this machine may read the payload, until it has the op's result.
        """
        out = self._out
        if out is None:
            return
        nbytes = len(payload)
        self.sent.frames += 1
        self.sent.payload_bytes += nbytes
        digest, descriptor = 0, -1
        files = self._sent_files
        if place is not None and files is not None and _is_shared(place, nbytes):
            kind = FrameType.SHARED
            payload, descriptor = _range_of(files, *place, nbytes)
        elif crosses_a_wire(out):
            digest = xxhash.xxh3_64_intdigest(payload)
        number, self._number = self._number, self._number + 1
        header = FrameHeader(
            kind, stamp, number, seq, start, len(payload), fingerprint, digest, behind
        ).pack()
        if self._unsent:
            self._unsent += ((memoryview(header), descriptor), (memoryview(payload), -1))
            return
        try:
            sent = out.sendmsg((header, payload), _rights(descriptor))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose_out(error)
            return
        if sent < HEADER_SIZE + len(payload):
            self._unsent += ((memoryview(header), descriptor), (memoryview(payload), -1))
            self._drop_sent(sent)
            self._thread.modify(out.fileno(), READABLE | WRITABLE)

    def let_go(self) -> None:
        """Use no memory any more that others have given, or will: it is theirs again."""
        self._unsent = deque((memoryview(bytes(each)), file) for each, file in self._unsent)
        incoming = self._incoming
        if incoming is not None and incoming.is_there:
            incoming.payload = self._payloads.take(incoming.header.length)
            incoming.is_there = False

    def _drop_sent(self, count: int) -> None:
        unsent = self._unsent
        while unsent and count >= len(unsent[0][0]):
            count -= len(unsent.popleft()[0])
        if count:
            unsent[0] = unsent[0][0][count:], -1

    def _send_unsent(self, out: socket.socket) -> None:
        """Send what waits, up to the next descriptor, which begins a message of its own."""
        unsent = self._unsent
        descriptor, pieces = unsent[0][1], [unsent[0][0]]
        for piece, file in islice(unsent, 1, _MOST_PIECES_AT_ONCE):
            if file >= 0:
                break
            pieces.append(piece)
        self._drop_sent(out.sendmsg(pieces, _rights(descriptor)))

    def _serve_out(self, events: int) -> None:
        out = self._out
        if out is None:
            return
        try:
            if events & WRITABLE and self._unsent:
                self._send_unsent(out)
                if not self._unsent:
                    self._thread.modify(out.fileno(), READABLE)
            if events & ~WRITABLE:
                said = out.recv(1)
                if not said:
                    raise EOFError("the peer has closed the connection")
                if said == _TAKES_FILES and not crosses_a_wire(out):
                    self._sent_files = SentFiles()
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._lose_out(error)

    def _lose_out(self, error: Exception) -> None:
        self._note_break("to", error)
        self._drop_out()
        self._on_broken()

    def _drop_out(self) -> None:
        if self._out is not None:
            self._thread.unregister(self._out.fileno())
            self._out.close()
        self._out = None
        self._unsent.clear()
        self._sent_files = None

    # Receiving

    def _serve_in(self, _events: int) -> None:
        connected = self._in
        if connected is None:
            return
        try:
            if self._incoming is None:
                self._filled += self._received_with_files(connected)
                self._take_frames()
            # Behind the stage: what is there already of a long frame need not wait for its turn.
            while (incoming := self._incoming) is not None:
                incoming.got += _received(connected, incoming.payload[incoming.got :])
                self._take_if_whole(incoming)
        except BlockingIOError:
            return
        except (OSError, EOFError, FrameError) as error:
            self._lose_in(error)

    def _lose_in(self, error: Exception) -> None:
        self._note_break("from", error)
        self._drop_in()
        self._on_broken()

    def _received_with_files(self, connected: socket.socket) -> int:
        room = self._view[self._filled :]
        if crosses_a_wire(connected):
            return _received(connected, room)
        count, rights, _, _ = connected.recvmsg_into([room], _RIGHTS_BYTES, _CLOSE_ON_EXEC)
        for _, _, data in rights:
            self._files.add([each for (each,) in _DESCRIPTOR.iter_unpack(data)])
        if not count:
            raise EOFError("the peer has closed the connection")
        return count

    def _take_frames(self) -> None:
        """Take the frames that are in the stage; the last may be a long one that goes on."""
        start = 0
        while self._incoming is None and self._filled - start >= HEADER_SIZE:
            header = FrameHeader.unpack(self._view[start : start + HEADER_SIZE])
            end = start + HEADER_SIZE + header.length
            if end > self._filled:
                if end - start <= _STAGE_BYTES:
                    break
                start = self._begin_long(header, start + HEADER_SIZE)
                continue
            payload = self._stage[start + HEADER_SIZE : end]
            start = end
            self._take(header, payload, is_there=False)
        if start:
            rest = self._filled - start
            self._view[:rest] = self._stage[start : self._filled]
            self._filled = rest

    def _begin_long(self, header: FrameHeader, start: int) -> int:
        """Begin with a frame whose payload begins in the stage; returns where the stage ends."""
        if header.length > LONGEST_PAYLOAD:
            raise FrameError(f"a frame of {header.length} bytes in the short lane")
        wanted = self._sink.destination(self.node, header)
        payload = self._payloads.take(header.length) if wanted is None else wanted
        incoming = Incoming(header, payload, is_there=wanted is not None)
        incoming.got = self._filled - start
        payload[: incoming.got] = self._view[start : self._filled]
        self._incoming = incoming
        return self._filled

    def _take_if_whole(self, incoming: Incoming) -> None:
        if incoming.got == incoming.header.length:
            self._incoming = None
            self._take(incoming.header, incoming.payload, is_there=incoming.is_there)

    def _take(self, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        if header.type is FrameType.SHARED:
            header, payload = self._shared(header, payload)
        elif header.digest and xxhash.xxh3_64_intdigest(payload) != header.digest:
            raise FrameError(f"the payload of frame {header.number} is damaged")
        self.received.frames += 1
        self.received.payload_bytes += header.length
        self._sink.take(self.node, header, payload, is_there=is_there)

    def _shared(self, header: FrameHeader, payload: Payload) -> tuple[FrameHeader, Payload]:
        """Return the frame that one stands for whose payload lies in memory of the sender."""
        if header.length != RANGE_SIZE:
            raise FrameError(f"frame {header.number} cannot have its payload in shared memory")
        found = SharedRange.unpack(payload)
        try:
            memory = self._files.memory(header.number, found)
        except MissingFile:
            self._payloads.files_come = False
            raise
        return header._replace(type=FrameType.DATA, length=found.nbytes), memory.numpy().data

    def _drop_in(self) -> None:
        if self._in is not None:
            self._thread.unregister(self._in.fileno())
            self._in.close()
        self._in, self._filled, self._incoming = None, 0, None
        self._files.close()
        self._files = ReceivedFiles()


def _is_shared(place: FilePlace, nbytes: int) -> bool:
    """Return True if a payload is long enough to be read in its file, and there is one."""
    return nbytes >= _SHARED_BYTES and place[0].file is not None


def _range_of(
    files: SentFiles, memory: SharedMemory, start: int, nbytes: int
) -> tuple[bytearray, int]:
    """Say where a payload lies; returns that, and the descriptor that has to go with it, or -1."""
    slot = files.slot_of(memory)
    found = SharedRange(files.next_slot if slot is None else slot, slot is None, start, nbytes)
    if slot is not None:
        return bytearray(found.pack()), -1
    assert memory.file is not None
    files.add(memory)
    return bytearray(found.pack()), memory.file


def _rights(descriptor: int) -> list[tuple[int, int, bytes]]:
    if descriptor < 0:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(descriptor))]


def _received(connected: socket.socket, view: memoryview) -> int:
    count = connected.recv_into(view)
    if not count:
        raise EOFError("the peer has closed the connection")
    return count


class LaneDoor:
    """The end at which another node opens a connection of the short lane."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection; returns its taker."""
        if from_frame:
            raise PeerLost("the short lane sends nothing again")
        return self._take
