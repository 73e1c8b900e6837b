"""Both ends of connections of the short lane, in one process."""

from __future__ import annotations

import socket
from collections.abc import Callable

import xxhash

from allfold_agent.edges.frame_reader import FrameReader
from allfold_agent.edges.out_connection import OutConnection
from allfold_agent.edges.outgoing import FilePlace
from allfold_agent.groups.lane.link import LaneLink
from allfold_agent.groups.lane.payloads import Payload, Payloads
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.traffic.line import Sender
from allfold_core.protocol.frames import FrameHeader, FrameType
from tests.node_agent.in_lane import in_thread

STAMP, FINGERPRINT = 7 << 40, 1234

MakePair = Callable[[], tuple[socket.socket, socket.socket]]


class End:
    """A link, and what it has told.

    Attributes:
        frames: those that have come.
        there: by op, the memory for the payloads of its frames.
        came_there: the ops whose frames have come to that memory.
        broken: how many of its connections have ended.
    """

    def __init__(
        self, thread: LaneThread, name: str = "there", sender: Sender | None = None
    ) -> None:
        self.thread = thread
        self.frames: list[tuple[str, FrameHeader, bytes]] = []
        self.there: dict[int, bytearray] = {}
        self.came_there: list[int] = []
        self.broken = 0
        self.memory = Payloads()
        self.link = LaneLink(name, thread, self, self.memory, self._break, sender)

    def destination(self, _node: str, header: FrameHeader) -> memoryview | None:
        found = self.there.get(header.seq)
        return None if found is None else memoryview(found)

    def take(self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        if is_there:
            self.came_there.append(header.seq)
        self.frames.append((node, header, bytes(payload)))

    def _break(self) -> None:
        self.broken += 1

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.frames]

    @property
    def sending(self) -> OutConnection:
        assert self.link.outgoing is not None
        return self.link.outgoing

    @property
    def receiving(self) -> FrameReader:
        assert self.link.reader is not None
        return self.link.reader

    def take_out(self, connected: socket.socket) -> None:
        in_thread(self.thread, lambda: self.link.take_out(connected))

    def take_in(self, connected: socket.socket, early: bytes = b"") -> None:
        in_thread(self.thread, lambda: self.link.take_in(connected, early))

    def send(self, *payloads: bytes | bytearray | memoryview) -> None:
        def send() -> None:
            for seq, payload in enumerate(payloads):
                memory = memoryview(payload)
                self.link.send(seq, STAMP, FINGERPRINT, seq % 3, 10 * seq, memory)

        in_thread(self.thread, send)

    def send_from(self, place: FilePlace, payload: bytes | bytearray, seq: int = 0) -> None:
        """Send a payload that a node on this machine may read in a file."""
        memory = memoryview(payload)
        in_thread(self.thread, lambda: self.link.send(seq, STAMP, FINGERPRINT, 0, 0, memory, place))

    def has_broken(self) -> bool:
        """Return True if a connection has ended, once the thread has done all that it can."""
        return in_thread(self.thread, lambda: self.broken > 0)


def joined(thread: LaneThread, pair: MakePair) -> tuple[End, End]:
    """A sender and a receiver with one connection between them."""
    near, far = pair()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    receiver.take_in(far)
    return sender, receiver


def frame(
    payload: bytes,
    number: int = 0,
    digest: int | None = None,
    kind: FrameType = FrameType.DATA,
    length: int | None = None,
) -> bytes:
    """Return a frame as bytes.

    Args:
        length: that the header says; ``None`` for that of the payload.
    """
    if digest is None:
        digest = xxhash.xxh3_64_intdigest(payload)
    said = len(payload) if length is None else length
    header = FrameHeader(kind, STAMP, number, number, 0, said, FINGERPRINT, digest, 0)
    return header.pack() + payload
