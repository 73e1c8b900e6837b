"""The connections of the short lane to one other node, one for each direction.

Each node dials the other, as for other edges: what it receives comes on the connection that it has
opened. Nothing is sent again: if a connection breaks, the nodes agree to do the ops in the long
lane.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Protocol

from allfold_agent.edges.connections import EdgeCounters, InConnection
from allfold_agent.edges.frame_reader import FrameReader
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.out_connection import OutConnection
from allfold_agent.edges.outgoing import FilePlace
from allfold_agent.edges.received_files import MissingFile
from allfold_agent.groups.lane.payloads import LONGEST_PAYLOAD, Payload, Payloads
from allfold_agent.runtime.lane_thread import WRITABLE, LaneThread
from allfold_agent.traffic.line import Sender
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import FrameError, FrameHeader, FrameType

log = logging.getLogger(__name__)

# What is shorter is sent itself, to a node on this machine as well.
_SHARED_BYTES = 32 * 1024
_STAGE_BYTES = 64 * 1024


class FrameSink(Protocol):
    """Takes the frames that come."""

    def destination(self, node: str, header: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of a frame; ``None`` for any other."""

    def take(self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        """Take in a frame; with ``is_there`` it has come to its :meth:`destination`."""


class LaneLink:
    """The lane's frames to and from one node. In the lane's thread.

    Args:
        node: the other one.
        thread: the lane's.
        sink: takes the frames that come.
        payloads: memory for those.
        on_broken: told when a connection has ended.
        sender: has what it sends paced; ``None``: it is not.

    Attributes:
        outgoing: the connection on which it sends, if there is one.
        reader: of that on which it receives.
        rate: at which payloads come.
    """

    def __init__(
        self,
        node: str,
        thread: LaneThread,
        sink: FrameSink,
        payloads: Payloads,
        on_broken: Callable[[], None],
        sender: Sender | None = None,
    ) -> None:
        self.node = node
        self.sent, self.received = EdgeCounters(), EdgeCounters()
        self.rate = LinkRate()
        self.outgoing: OutConnection | None = None
        self.reader: FrameReader | None = None
        self._incoming: InConnection | None = None
        self._thread = thread
        self._sink = sink
        self._payloads = payloads
        self._on_broken = on_broken
        self._sender = sender
        self._number = 0  # of the next frame that it sends
        self._comes_there = False  # the long payload on its way, to where the sink wants it

    @property
    def is_whole(self) -> bool:
        """True if frames can go both ways."""
        return self.outgoing is not None and self.reader is not None

    @property
    def has_sent(self) -> bool:
        """True unless something waits for room in the connection."""
        return self.outgoing is None or not self.outgoing.unsent

    @property
    def sending(self) -> socket.socket | None:
        """The connection on which it sends, if there is one. From any thread."""
        outgoing = self.outgoing
        return None if outgoing is None else outgoing.socket

    def let_go(self) -> None:
        """Use no memory any more that others have given, or will: it is theirs again."""
        if self.outgoing is not None:
            self.outgoing.let_go()
        reader = self.reader
        if reader is not None and reader.header is not None and self._comes_there:
            reader.memory = self._payloads.take(reader.header.length)
            self._comes_there = False

    def close(self) -> None:
        """End the connections."""
        self._drop_out()
        self._drop_in()

    # Sending

    def take_out(self, connected: socket.socket) -> None:
        """Send on this connection, which the other node has opened."""
        self._drop_out()
        self._number = 0
        self.outgoing = OutConnection(connected, 0, self._thread, self._serve_out, self._sender)

    def _drop_out(self) -> None:
        outgoing, self.outgoing = self.outgoing, None
        if outgoing is not None:
            outgoing.close()

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
        outgoing, nbytes = self.outgoing, len(payload)
        if outgoing is None:
            return
        self.sent.add(nbytes)
        digest, number = outgoing.digest(payload), self._number
        self._number = number + 1
        header = FrameHeader(kind, stamp, number, seq, start, nbytes, fingerprint, digest, behind)
        try:
            outgoing.write(header, payload, place if nbytes >= _SHARED_BYTES else None)
        except OSError as error:
            self._lose_out(error)
        else:
            if outgoing.unsent:
                outgoing.await_room()

    def _serve_out(self, outgoing: OutConnection, events: int) -> None:
        if outgoing is not self.outgoing:
            outgoing.ignore()
            return
        try:
            outgoing.go_on()
            if outgoing.unsent:
                outgoing.await_room()
            if events & ~WRITABLE:
                outgoing.read_ack()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose_out(error)

    def _lose_out(self, error: Exception) -> None:
        log.info("the short lane to node %s broke: %s", self.node, error)
        self._drop_out()
        self._on_broken()

    # Receiving

    def take_in(self, connected: socket.socket, early: bytes) -> None:
        """Receive on this connection, which this node has opened."""
        self._drop_in()
        incoming = self._incoming = InConnection(connected)
        reader = self.reader = FrameReader(incoming, self, self.rate, _STAGE_BYTES, early)
        self._thread.register(connected, self._serve_in)
        try:
            if self._payloads.files_come and not incoming.crosses_a_wire:
                incoming.acknowledge(0)  # nothing new: the sender may pass files now
            reader.advance()
        except (OSError, FrameError) as error:
            self._lose_in(error)

    def _drop_in(self) -> None:
        incoming, self._incoming, self.reader = self._incoming, None, None
        if incoming is not None:
            self._thread.unregister(incoming.socket)
            incoming.close()

    def _serve_in(self, _events: int) -> None:
        reader = self.reader
        assert reader is not None
        try:
            reader.receive()
        except (OSError, EOFError, FrameError) as error:
            self._lose_in(error)

    def _lose_in(self, error: Exception) -> None:
        if isinstance(error, MissingFile):
            self._payloads.files_come = False
        log.info("the short lane from node %s broke: %s", self.node, error)
        self._drop_in()
        self._on_broken()

    def take(self, header: FrameHeader, payload: memoryview, *, is_shared: bool) -> bool:
        """Take a frame that is whole; none has to wait."""
        self.received.add(header.length)
        content = payload if is_shared else bytearray(payload)
        self._sink.take(self.node, header, content, is_there=False)
        return True

    def begin(self, header: FrameHeader) -> memoryview:
        """Return the memory for a long payload."""
        if header.length > LONGEST_PAYLOAD:
            raise FrameError(f"a frame of {header.length} bytes in the short lane")
        wanted = self._sink.destination(self.node, header)
        self._comes_there = wanted is not None
        return self._payloads.take(header.length) if wanted is None else wanted

    def finish(self, header: FrameHeader, memory: memoryview) -> None:
        """Take a frame whose payload has come to that memory."""
        self.received.add(header.length)
        self._sink.take(self.node, header, memory, is_there=self._comes_there)


class LaneDoor:
    """The end at which another node opens a connection of the short lane."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection; returns its taker."""
        if from_frame:
            raise PeerLost("the short lane sends nothing again")
        return self._take
