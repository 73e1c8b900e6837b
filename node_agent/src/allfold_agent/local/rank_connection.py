"""The connection to one local rank: its arena, its groups, its messages."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from typing import Any

from allfold_agent.gpu.device import RankMemory
from allfold_agent.gpu.operands import GpuRange
from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.lane.short_lane import NodeLane
from allfold_agent.runtime.buffers import MappedMemory
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.rank_arena import RankArena, not_in_arena
from allfold_core.errors import AllfoldError, InvalidArgument
from allfold_core.protocol.rank_messages import (
    FENCE_WORD,
    Fence,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    Region,
    pack_json,
)

log = logging.getLogger(__name__)

MAX_SEGMENTS = 4096
# What waits for a rank that does not read. The outcomes of all calls that it may make are less.
MAX_UNSENT_BYTES = 64 << 20


@dataclass(slots=True)
class LocalMembership:
    """One local rank of one group: a session, whose rank number is the epoch's to say.

    Attributes:
        told_ordinal: of the newest epoch that the rank was told of; under the connection's lock.
    """

    session: str
    group: NodeGroup
    told_ordinal: int = 0

    @property
    def epoch(self) -> GroupEpoch | None:
        """The newest epoch in which the session has a rank, which need not be the current one."""
        return self.group.epoch_table.newest_with(self.session)

    def untold_epochs(self, ordinal: int) -> list[GroupEpoch]:
        """Return the untold epochs of the rank up to this one; they count as told from now on.

        It needs all of them, because it may first wait for an op of an epoch before the newest.
        """
        older, self.told_ordinal = self.told_ordinal, ordinal
        return [
            epoch
            for epoch in self.group.epochs.values()
            if older < epoch.ordinal <= ordinal and epoch.has(self.session)
        ]


CallMessage = OpMessage | P2PMessage


@dataclass(slots=True, eq=False)
class DeferredCall:
    """A call that waits for the GPU of its rank.

    Attributes:
        called: when the rank called (monotonic).
        due: when it has to be looked at: as it is late, or once more (monotonic).
    """

    message: CallMessage
    called: float
    due: float = field(init=False)

    def __post_init__(self) -> None:
        self.due = self.called + self.message.timeout


class RankConnection:
    """One process on this machine that is connected to the agent.

    Sending never waits: what the socket does not take is kept, and the local server is asked to
    continue when there is room (``want_write``).

    Attributes:
        no_lane: why the process cannot use the short lane; "" if it can.
        end: is readable once the process has ended; ``None`` where this agent cannot see it.
        is_watched: whether anybody looks at it.
    """

    def __init__(
        self, connected: socket.socket, want_write: Callable[[RankConnection], None]
    ) -> None:
        self.socket = connected
        self.greeted = False
        self.no_lane = ""
        self.memberships: dict[int, LocalMembership] = {}
        self.joining: set[Future[Any]] = set()
        # Calls whose memory is still in use by the GPU of the rank, and those behind them.
        self.deferred: deque[DeferredCall] = deque()
        self.arena = RankArena()
        self._on_gpus: dict[int, RankMemory] = {}
        self._outbox: deque[tuple[bytes, NodeLane | None]] = deque()
        self._unsent_bytes = 0
        self._lock = make_lock("rank")
        self._closed = False
        self._want_write = want_write
        self.pid = _peer_pid(connected)
        self.end = _end_of(self.pid)
        self.is_watched = False

    def add_segment(self, number: int, size: int, descriptor: int) -> None:
        """Map a memfd of the rank's arena; ``InvalidArgument`` if it cannot be used safely."""
        try:
            self.check_number(number)
            self.arena.add(number, size, descriptor)
        finally:
            os.close(descriptor)

    def add_gpu_segment(self, number: int, memory: RankMemory) -> None:
        """Take memory of a GPU that is open already; ``InvalidArgument`` for a used number."""
        self.check_number(number)
        if self._closed:
            raise InvalidArgument("its process is gone")
        self._on_gpus[number] = memory

    def check_number(self, number: int) -> None:
        """``InvalidArgument`` where a segment of this number cannot be taken."""
        taken = len(self.arena) + len(self._on_gpus)
        if number in self.arena or number in self._on_gpus or taken >= MAX_SEGMENTS:
            raise InvalidArgument(
                f"segment {number} is not acceptable: there is one of this number, or too many "
                f"({taken}, of at most {MAX_SEGMENTS})"
            )

    @property
    def arena_bytes(self) -> int:
        """The memory of the host that the rank shares. From any thread."""
        return self.arena.nbytes

    def place(self, region: Region, nbytes: int) -> memoryview | GpuRange:
        """Return a region of the host or of a GPU; ``InvalidArgument`` where there is none."""
        memory = self._on_gpus.get(region.segment) if self._on_gpus else None
        if memory is None or not nbytes:
            return self.memory(region, nbytes)
        if region.offset + nbytes > memory.size:
            raise not_in_arena(region, nbytes)
        return GpuRange(memory, region.offset, nbytes)

    def mapping(self, segment: int) -> MappedMemory:
        """Return a segment of the host's memory; ``InvalidArgument`` where there is none."""
        return self.arena.mapping(segment)

    def has_passed(self, fence: Fence) -> bool:
        """Return True if the GPU has come to a call, so that its memory may be used.

        Raises:
            InvalidArgument: the fence's word is not in the arena.
        """
        if not fence.value:
            return True
        mapping, offset = self.mapping(fence.word.segment), fence.word.offset
        if offset % FENCE_WORD.size or offset + FENCE_WORD.size > len(mapping):
            raise not_in_arena(fence.word, FENCE_WORD.size)
        return fence.is_passed(*FENCE_WORD.unpack_from(mapping.memory, offset))

    def memory(self, region: Region, nbytes: int) -> memoryview:
        """Return the bytes of a region of the host; ``InvalidArgument`` where there is none."""
        return self.arena.memory(region, nbytes)

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as the socket takes it."""
        with self._lock:
            sent = self._send(message)
        if not sent:
            self._want_write(self)

    def send_joined(self, number: int, body: dict[str, Any]) -> None:
        """Answer a rank that is in its group now, and hand it the page of the short lane.

        Args:
            number: what the rank is to call the group.
        """
        membership = self.memberships[number]
        with self._lock:
            lane = self._send_with_page(Message.JOINED, number, membership, body)
            waits = bool(self._outbox)
        if waits:
            self._want_write(self)
        if lane is not None:
            # Without our lock: it takes that of the group, which comes first.
            membership.group.lanes.handed(lane)

    def _send_with_page(
        self, kind: Message, number: int, membership: LocalMembership, body: dict[str, Any]
    ) -> NodeLane | None:
        """Send news of an epoch, with the page of its short lane if it has one."""
        lane = membership.group.lanes.lane_of(body["epoch"])
        if lane is not None and self.no_lane:
            lane.obstacle = f"process {self.pid} cannot use it: {self.no_lane}"
        if lane is None or self.no_lane or membership.session not in lane.sessions:
            self._send(pack_json(kind, body))
            return None
        body["page"] = lane.describe_to(membership.session)
        self._send(pack_json(kind, body), lane)
        # After it is sent: the lane may open once all ranks count as having the page.
        lane.hand_to(membership.session, self, self.arena, number)
        return lane

    def send_outcome(self, outcome: Outcome) -> None:
        """Send the outcome of a call, after all of the epoch that it carries."""
        with self._lock:
            self._tell_epoch_if_new(outcome.group, outcome.epoch)
            sent = self._send(outcome.pack())
        if not sent:
            self._want_write(self)

    def pass_boundary(self, number: int, body: dict[str, Any], epoch: GroupEpoch) -> None:
        """Answer a rank at a boundary: it goes on in this epoch; ``left`` where it is not in it."""
        membership = self.memberships.get(number)
        if membership is None:
            return
        left = not epoch.has(membership.session)
        ordinal = membership.told_ordinal if left else epoch.ordinal
        with self._lock:
            self._tell_epoch_if_new(number, ordinal)
            sent = self._send(pack_json(Message.PASSED, {**body, "epoch": ordinal, "left": left}))
        if not sent:
            self._want_write(self)

    def _tell_epoch_if_new(self, number: int, ordinal: int) -> None:
        """Tell the rank of an epoch, and of those before it, that it was not told of."""
        membership = self.memberships.get(number)
        if membership is not None and ordinal > membership.told_ordinal:
            for epoch in membership.untold_epochs(ordinal):
                view = {"number": number, **epoch.view(membership.session)}
                self._send_with_page(Message.EPOCH, number, membership, view)

    def _send(self, message: bytes, lane: NodeLane | None = None) -> bool:
        """Send or keep a message, with the lock; return False if it waits for room.

        Args:
            lane: whose descriptors go with it.
        """
        # Not past what waits: messages keep their order.
        if self._closed or (not self._outbox and self._try(message, lane)):
            return True
        if self._unsent_bytes + len(message) > MAX_UNSENT_BYTES:
            log.error("process %d is let go: it leaves %d bytes unread", self.pid, MAX_UNSENT_BYTES)
            self._break()
            return True
        self._outbox.append((message, lane))
        self._unsent_bytes += len(message)
        return False

    def _break(self) -> None:
        """Send no more; the listener sees the end of the connection, and closes it."""
        self._outbox.clear()
        self._unsent_bytes = 0
        with suppress(OSError):  # the rank was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def flush(self) -> bool:
        """Send what is kept; return True when all of it is sent."""
        with self._lock:
            while self._outbox and self._try(*self._outbox[0]):
                self._unsent_bytes -= len(self._outbox.popleft()[0])
            return not self._outbox

    @property
    def has_unsent(self) -> bool:
        """True while messages wait for room in the socket."""
        with self._lock:
            return bool(self._outbox)

    @property
    def is_closed(self) -> bool:
        """True once the process is gone."""
        return self._closed

    def close(self) -> None:
        """Forget the rank; its memory is unmapped when the last op has released it."""
        with self._lock:
            self._closed = True
            self._outbox.clear()
        self.deferred.clear()
        self.arena = RankArena()  # what the rank has posted still needs the one that it had
        if self.end is not None:
            self.end.close()
        self._end_socket()

    def _end_socket(self) -> None:
        """After the memory on GPUs: the socket's end tells the rank that it is closed."""
        end: Callable[[], None] = self.socket.close
        for releases in {memory.device.releases for memory in self._on_gpus.values()}:
            end = partial(releases.later, end)
        self._on_gpus.clear()
        end()

    def _try(self, message: bytes, lane: NodeLane | None) -> bool:
        try:
            if lane is None:
                self.socket.send(message, socket.MSG_DONTWAIT)
            else:
                flags = socket.MSG_DONTWAIT
                socket.send_fds(self.socket, [message], lane.descriptors, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            # The listener notices the end of the connection.
            log.debug("process %d is gone: %s", self.pid, error)
        return True


def refuse_request(process: RankConnection, body: dict[str, Any], error: AllfoldError) -> None:
    """Answer a request with an error."""
    request = body.get("request")
    refusal = {**error.to_dict(), "request": request if isinstance(request, int) else None}
    process.send(pack_json(Message.REFUSED, refusal))


def _peer_pid(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


def _end_of(pid: int) -> FileIO | None:
    """The descriptor of a process; ``None`` for one of a container that this one does not see."""
    try:
        return FileIO(os.pidfd_open(pid)) if pid else None
    except OSError as error:
        log.debug("the end of process %d is seen by its socket alone: %s", pid, error)
        return None
