"""The connections of the short lane to one other node: whole frames, in both directions.

Each node dials the other, as for other edges: what it receives comes on the connection that it has
opened. Nothing is sent again: if a connection breaks, the nodes agree to do the ops in the long
lane.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from time import monotonic

from allfold_agent.edges.connections import EdgeCounters
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.groups.lane.incoming import FrameSink, LaneIn, Payloads
from allfold_agent.groups.lane.outgoing import LaneOut
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.errors import PeerLost

log = logging.getLogger(__name__)

OnChange = Callable[[], None]


class LaneLink:
    """The lane's frames to and from one node. In the lane's thread.

    Args:
        node: the other one.
        thread: the lane's.
        sink: takes the frames that come.
        payloads: memory for those.
        on_broken: told when a connection has ended.

    Attributes:
        outgoing: the connection on which it sends, if there is one.
        incoming: that on which it receives.
        rate: at which payloads come.
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
        self.rate = LinkRate()
        self.outgoing: LaneOut | None = None
        self.incoming: LaneIn | None = None
        self._thread = thread
        self._sink = sink
        self._payloads = payloads
        self._on_broken = on_broken
        self._broke_at: dict[str, float] = {}

    @property
    def is_whole(self) -> bool:
        """True if frames can go both ways."""
        return self.outgoing is not None and self.incoming is not None

    @property
    def has_sent(self) -> bool:
        """True unless something waits for room in the connection."""
        return self.outgoing is None or self.outgoing.has_sent

    @property
    def sending(self) -> socket.socket | None:
        """The connection on which it sends, if there is one. From any thread."""
        outgoing = self.outgoing
        return None if outgoing is None else outgoing.socket

    def take_out(self, connected: socket.socket) -> None:
        """Send on this connection, which the other node has opened."""
        self._drop_out()
        self._note_end("to")
        self.outgoing = LaneOut(connected, self._thread, self.sent, self._lose_out)

    def take_in(self, connected: socket.socket, early: bytes) -> None:
        """Receive on this connection, which this node has opened."""
        self._drop_in()
        self._note_end("from")
        self.incoming = LaneIn(
            self.node,
            connected,
            self._thread,
            self._sink,
            self._payloads,
            self.received,
            self.rate,
            self._lose_in,
        )
        self.incoming.start(early)

    def let_go(self) -> None:
        """Use no memory any more that others have given, or will: it is theirs again."""
        for each in (self.outgoing, self.incoming):
            if each is not None:
                each.let_go()

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

    def _lose_out(self, error: Exception) -> None:
        self._note_break("to", error)
        self._drop_out()
        self._on_broken()

    def _lose_in(self, error: Exception) -> None:
        self._note_break("from", error)
        self._drop_in()
        self._on_broken()

    def _drop_out(self) -> None:
        outgoing, self.outgoing = self.outgoing, None
        if outgoing is not None:
            outgoing.close()

    def _drop_in(self) -> None:
        incoming, self.incoming = self.incoming, None
        if incoming is not None:
            incoming.close()


class LaneDoor:
    """The end at which another node opens a connection of the short lane."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection; returns its taker."""
        if from_frame:
            raise PeerLost("the short lane sends nothing again")
        return self._take
