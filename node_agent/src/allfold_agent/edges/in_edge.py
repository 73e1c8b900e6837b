"""The receiving end of an edge: opens it, delivers each payload to its sink, acknowledges.

Short frames are read by the reactor, many at once; where a long one comes, the edge's own thread
takes over, until there is nothing to be read for a while. A frame of an op that the local ranks
have not called yet waits in the socket, and so do the frames behind it: TCP holds the sender back.
There is no other flow control.
"""

from __future__ import annotations

import logging
import socket
from threading import Event

from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.incoming import DamagedPayload, IncomingFrames, LinkRate
from allfold_agent.edges.long_frames import LongFrames
from allfold_agent.edges.opening import Dial, EdgeOpener
from allfold_agent.edges.received_files import MissingFile
from allfold_agent.edges.receivers import Receiver
from allfold_agent.edges.short_frames import ShortFrames
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.protocol.frames import FrameError

log = logging.getLogger(__name__)


class InEdge:
    """Everything that this node receives from one other node of a group.

    Args:
        source: the name of that node.
        name: of the edge, for messages.
        dial: opens the edge from a frame number on: (socket, bytes received already).
        receiver: what it delivers to.
        reactor: receives short frames.

    Raises:
        ServiceError: no thread can be started for it.
    """

    def __init__(
        self,
        source: str,
        name: str,
        dial: Dial,
        receiver: Receiver,
        reactor: Reactor,
    ) -> None:
        self.source = source
        self._name = name
        self._receiver = receiver
        self._closed = Event()
        self._opener = EdgeOpener(name, dial, self._closed)
        self._connection: InConnection | None = None
        self._takes_files = True
        self._frames = IncomingFrames(source, name, receiver)
        self._short = ShortFrames(self._frames, receiver, reactor, self._closed)
        self._long = LongFrames(self._frames, receiver, self._closed)
        self.counters = self._frames.counters
        self._thread = start_thread(self._run, f"allfold-receive-{name}")

    @property
    def received(self) -> int:
        """The number of frames that have arrived."""
        return self._frames.expected

    @property
    def last_heard(self) -> float:
        """The time of the last byte from the peer (monotonic); ``-inf`` if there was none."""
        connection = self._connection
        return float("-inf") if connection is None else connection.last_heard

    @property
    def rate(self) -> LinkRate:
        """The rate at which the peer sends, measured on long payloads."""
        return self._frames.rate

    def resume(self) -> None:
        """Try a waiting frame again; from any thread."""
        self._short.resume()

    def close(self) -> None:
        """End the thread; what was not received stays unreceived."""
        self._closed.set()
        connection = self._connection
        if connection is not None:
            try:
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("edge %s was gone already: %s", self._name, error)
        self._short.close()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._receive_all(*self._opener.open(self._frames.expected))
        except AllfoldError as error:
            if not self._closed.is_set():
                self._receiver.edge_lost(self.source, error)
        except Exception as error:
            log.exception("edge %s failed", self._name)
            self._receiver.edge_lost(self.source, PeerLost(f"edge {self._name} failed: {error}"))

    def _receive_all(self, connected: socket.socket, early: bytes) -> None:
        """Receive until the connection breaks, which it may have done already."""
        frames = self._frames
        try:
            connection = self._connection = InConnection(connected, early, self._closed)
            frames.opened()
            if self._takes_files and not connection.crosses_a_wire:
                frames.acknowledge(connection)  # nothing new: the sender may pass files now
            while not self._closed.is_set():
                self._short.receive(connection)
                self._long.receive(connection)
        except MissingFile as error:
            log.warning("edge %s takes payloads in its connection: %s", self._name, error)
            self._takes_files = False
        except (FrameError, DamagedPayload) as error:
            self._opener.note_damage(frames.expected, error)
        except (OSError, EOFError) as error:
            # Mostly the end of the group. Else it is opened again, or reported as lost.
            log.debug("edge %s ended after frame %d: %s", self._name, frames.expected, error)
        finally:
            connected.close()
            if self._connection is not None:
                self._connection.files.close()
