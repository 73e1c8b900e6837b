"""Pulling a state from several ranks at once, into the memory of one of this node."""

from __future__ import annotations

import json
import logging
import select
import socket
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, LifoQueue
from time import monotonic

import h11
import numpy as np

from allfold_agent.http.transport import Transport
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import start_thread
from allfold_agent.tensors.source import Source, SourceConnection
from allfold_agent.tensors.work import PullWork, Span
from allfold_core.errors import (
    AllfoldError,
    LocalError,
    PeerLost,
    PeerMissing,
    ServiceError,
)
from allfold_core.protocol.state_blocks import BLOCK_BYTES, StateBlock, TransferMessage, spans

log = logging.getLogger(__name__)

ACTIVE_SOURCES = 4
CONNECTIONS = 2
# A source that fails so often in a row is given up, after pauses of so many seconds.
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.1
# After so many seconds without a block, another source is started as well.
_QUIET_SECONDS = 1.0
_LARGEST_HEAD = 1 << 30
_MESSAGE_BYTES = 64
_OVER = -1


class Pull:
    """One pull: threads with connections to a few sources; the others are held in reserve.

    Args:
        sources: the ranks that offer the state.
        channel: the socket to the rank, over which it is told of received blocks.
        window: memory shared with the rank, a multiple of the block size.
        timeout: seconds for the whole pull.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        transport: Transport,
        channel: socket.socket,
        window: memoryview,
        timeout: float,
    ) -> None:
        self._transport = transport
        self._channel = channel
        self._window = window
        self._timeout = timeout
        self._deadline = monotonic() + timeout
        self._work = PullWork(self._deadline)
        self._slots: LifoQueue[int] = LifoQueue()  # the last one is still in the caches
        for slot in range(len(window) // BLOCK_BYTES):
            self._slots.put(slot)
        self._reserve = deque(sources)
        self._threads: Counter[Source] = Counter()
        self._problems: dict[Source, Exception] = {}
        self._connections: set[SourceConnection] = set()
        self._lock = make_lock("pull sources")
        self._sending = make_lock("pull channel")
        self._delivered = 0
        self._came_from: Counter[int] = Counter()

    def run(self) -> None:
        """Pull, and reuse the slots that the rank releases, until it closes its socket."""
        try:
            for _ in range(min(ACTIVE_SOURCES, len(self._reserve))):
                self._start_next()
            while data := self._receive():
                self._slots.put(StateBlock.unpack(data).slot)
        except (OSError, ValueError) as error:
            log.info("the rank of a pull is gone: %s", error)
        except ServiceError as error:
            self._end(error)
        finally:
            self._stop()

    def _receive(self) -> bytes:
        """Return the next message of the rank; start one more source whenever no block arrives."""
        quiet = select.poll()
        quiet.register(self._channel, select.POLLIN)
        while not quiet.poll(_QUIET_SECONDS * 1000):
            if not self._slots.empty():  # else it is the rank that takes its time
                self._start_next()
        return self._channel.recv(_MESSAGE_BYTES)

    # Sources

    def _start_next(self) -> None:
        """Start to pull from one more source."""
        with self._lock:
            if not self._reserve or self._work.has_ended:
                return
            source = self._reserve.popleft()
            self._threads[source] = CONNECTIONS
        for number in range(CONNECTIONS):
            start_thread(partial(self._pull_from, source), f"allfold-pull-{source.rank}-{number}")

    def _pull_from(self, source: Source) -> None:
        """Fetch from a source until the pull is over or the source has failed. Runs in a thread."""
        introduced, failures = False, 0
        while not self._work.has_ended:
            before = self._came_from[source.rank]
            try:
                self._converse(source, waits=not introduced)
                break
            except (AllfoldError, OSError, h11.RemoteProtocolError) as error:
                if self._work.has_ended:
                    break
                log.info("state from %s: %s", source, error)
                self._problems[source] = error
                failures = 1 if self._came_from[source.rank] > before else failures + 1
                final = isinstance(error, (LocalError, PeerLost))
                if final or failures >= _ATTEMPTS or monotonic() >= self._deadline:
                    break
            except Exception as error:
                log.exception("the pull of a state failed")
                self._problems[source] = error
                break
            introduced = introduced or self._work.description is not None
            self._work.pause(_PAUSE_SECONDS)
        self._left(source)

    def _left(self, source: Source) -> None:
        """Go on with another source after the end of a thread, or fail where there is none.

        Also fails if the deadline has passed.
        """
        with self._lock:
            self._threads[source] -= 1
            if self._work.has_ended or self._threads[source]:
                return
            del self._threads[source]
            left, reserve = len(self._threads), len(self._reserve)
        if reserve and monotonic() < self._deadline:
            self._start_next()
        elif not left:
            self._end(self._failure())

    def _failure(self) -> AllfoldError:
        description = self._work.description
        missing = "nobody has told its size"
        if description is not None:
            missing = f"{description.total - self._delivered} of {description.total} bytes missing"
        told = "; ".join(f"{source}: {error}" for source, error in self._problems.items())
        late = monotonic() >= self._deadline
        kind = PeerMissing if late else PeerLost
        within = f" within {self._timeout:g} s" if late else ""
        return kind(
            f"the state did not come{within}, {missing}. Asked: {told or 'nobody'}",
            ranks=sorted(source.rank for source in self._problems),
        )

    def _converse(self, source: Source, *, waits: bool) -> None:
        """Fetch ranges over one connection until none is left."""
        connection = SourceConnection(source, self._transport, self._deadline)
        try:
            with self._lock:
                self._connections.add(connection)
            self._work.introduce(source, connection.describe(waits=waits))
            while (span := self._work.next(source)) is not None:
                try:
                    self._fetch(connection, span)
                except BaseException:
                    self._work.give_back(span, source)
                    raise
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    # Blocks

    def _fetch(self, connection: SourceConnection, span: Span) -> None:
        description, (start, stop) = self._work.description, span
        assert description is not None
        if start < description.head:
            self._fetch_head(connection, span)
            return
        slot = self._take_slot()
        into = self._slot(slot, stop - start)
        try:
            connection.fetch(description, start, into)
        except BaseException:
            self._slots.put(slot)
            raise
        if self._work.finish(span):
            self._deliver(StateBlock(start, stop - start, slot), connection.source)
        else:
            self._slots.put(slot)

    def _fetch_head(self, connection: SourceConnection, span: Span) -> None:
        """Fetch the head, keep it here until it is complete, then hand it over and open the rest.

        The heads of two sources differ, so that parts of one are of no use with parts of the other.
        """
        description = self._work.description
        assert description is not None
        if description.head > _LARGEST_HEAD:
            raise LocalError(f"a head of {description.head} bytes is not acceptable")
        head = np.empty(description.head, np.uint8).data
        for start, stop in spans(*span):
            connection.fetch(description, start, head[start:stop])
        if not self._work.finish(span):
            return
        self._tell(TransferMessage.READY, {"head": description.head, "total": description.total})
        for start, stop in spans(*span):
            slot = self._take_slot()
            self._slot(slot, stop - start)[:] = head[start:stop]
            self._deliver(StateBlock(start, stop - start, slot), connection.source)
        self._work.add_large_tensors()

    def _slot(self, slot: int, nbytes: int) -> memoryview:
        return self._window[slot * BLOCK_BYTES : slot * BLOCK_BYTES + nbytes]

    def _take_slot(self) -> int:
        """Return a free slot, after the rank has released one; raises ``TimeoutError``."""
        try:
            slot = self._slots.get(timeout=max(0.0, self._deadline - monotonic()))
        except Empty:
            raise TimeoutError("the rank does not take what has come") from None
        if slot == _OVER:
            self._slots.put(_OVER)  # for the next thread
            raise ConnectionAbortedError("the pull is over")
        return slot

    def _deliver(self, block: StateBlock, source: Source) -> None:
        """Tell the rank of a block, and after the last one that the pull is done."""
        with self._sending:
            self._send(block.pack())
            self._delivered += block.nbytes
            self._came_from[source.rank] += block.nbytes
            delivered = self._delivered
        assert self._work.description is not None
        if delivered == self._work.description.total:
            self._end(None)

    # Its end

    def _end(self, error: AllfoldError | None) -> None:
        if not self._work.end():
            return
        if error is None:
            self._tell(TransferMessage.DONE, {"bytes_from": dict(self._came_from)})
        else:
            self._tell(TransferMessage.FAILED, error.to_dict())
        self._stop()

    def _stop(self) -> None:
        """Tell all threads to end soon."""
        self._work.end()
        self._slots.put(_OVER)
        with self._lock:
            for connection in self._connections:
                connection.interrupt()

    def _tell(self, kind: TransferMessage, body: dict[str, object]) -> None:
        with self._sending:
            self._send(bytes([kind]) + json.dumps(body).encode())

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # the rank is gone, which the thread that reads notices
            self._channel.send(message)
