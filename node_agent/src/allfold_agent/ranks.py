"""The connection to one local rank: its arena, its groups, its messages."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from allfold_agent.gpu.device import RankMemory
from allfold_agent.gpu.job import GpuRange
from allfold_agent.group import Group
from allfold_agent.mapped import Mapped
from allfold_core.errors import InvalidArgument
from allfold_core.local_wire import FENCE_WORD, Fence, OpMessage, PairMessage, Region

log = logging.getLogger(__name__)

MAX_SEGMENTS = 4096
_REMEMBERED = 1024


@dataclass(slots=True)
class Membership:
    """One rank's seat in one group."""

    rank: int
    session: str
    group: Group


Call = OpMessage | PairMessage


@dataclass(slots=True, eq=False)
class HeldCall:
    """A call that waits for the GPU of its rank.

    Attributes:
        called: when the rank called (monotonic).
        due: when somebody has to see to it: as it is late, or again.
    """

    message: Call
    called: float
    due: float = field(init=False)

    def __post_init__(self) -> None:
        self.due = self.called + self.message.timeout


class RankProcess:
    """One process on this machine that is connected to the agent.

    Sending never waits: what the socket does not take is kept, and the hub is asked to continue
    when there is room (``want_write``).
    """

    def __init__(self, connected: socket.socket, want_write: Callable[[RankProcess], None]) -> None:
        self.socket = connected
        self.greeted = False
        self.memberships: dict[int, Membership] = {}
        self.joining: set[Future[Group]] = set()
        # Calls whose memory is still in use by the GPU of the rank, and those behind them.
        self.held: deque[HeldCall] = deque()
        self._segments: dict[int, torch.Tensor] = {}
        self._mappings: dict[int, Mapped] = {}
        self._on_gpus: dict[int, RankMemory] = {}
        self._views: dict[tuple[Region, int], torch.Tensor] = {}
        self._outbox: deque[bytes] = deque()
        self._lock = Lock()
        self._closed = False
        self._want_write = want_write
        self.pid = _peer_pid(connected)

    def add_segment(self, number: int, size: int, descriptor: int) -> None:
        """Map a memfd of the rank's arena; ``InvalidArgument`` if it is not what it says."""
        try:
            self.check_number(number)
            actual = os.fstat(descriptor).st_size
            if actual < size:
                raise InvalidArgument(
                    f"segment {number} of {size} bytes is not acceptable: the file has {actual}"
                )
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                # Whoever cuts memory that others have mapped kills them with SIGBUS.
                raise InvalidArgument(f"segment {number} is not sealed against being cut")
            memory = mmap.mmap(descriptor, size)
            self._segments[number] = torch.frombuffer(memory, dtype=torch.uint8)
            self._mappings[number] = Mapped(memory)
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
        held = len(self._segments) + len(self._on_gpus)
        if number in self._segments or number in self._on_gpus or held >= MAX_SEGMENTS:
            raise InvalidArgument(
                f"segment {number} is not acceptable: there is one of this number, or too many "
                f"({held}, of at most {MAX_SEGMENTS})"
            )

    def place(self, region: Region, nbytes: int) -> torch.Tensor | GpuRange:
        """A region, wherever it is; ``InvalidArgument`` where there is none."""
        memory = self._on_gpus.get(region.segment) if self._on_gpus else None
        if memory is None or not nbytes:
            return self.memory(region, nbytes)
        if region.offset + nbytes > memory.size:
            raise _not_in_arena(region, nbytes)
        return GpuRange(memory, region.offset, nbytes)

    def mapping(self, segment: int) -> Mapped:
        """What a segment in the host's memory is; ``InvalidArgument`` where there is none."""
        if segment not in self._mappings:
            raise InvalidArgument(f"this rank has no segment {segment} in the host's memory")
        return self._mappings[segment]

    def has_passed(self, fence: Fence) -> bool:
        """Whether a call may go on, because what its memory waits for is done.

        Raises:
            InvalidArgument: the fence's word is not in the arena.
        """
        if not fence.value:
            return True
        mapping, offset = self.mapping(fence.word.segment), fence.word.offset
        if offset % FENCE_WORD.size or offset + FENCE_WORD.size > len(mapping):
            raise _not_in_arena(fence.word, FENCE_WORD.size)
        return fence.is_passed(*FENCE_WORD.unpack_from(mapping.memory, offset))

    def memory(self, region: Region, nbytes: int) -> torch.Tensor:
        """The raw bytes of a region of the host; ``InvalidArgument`` where there are none."""
        view = self._views.get((region, nbytes))
        if view is None:
            if len(self._views) >= _REMEMBERED:
                self._views.clear()
            view = self._views[region, nbytes] = self._view(region, nbytes)
        return view

    def _view(self, region: Region, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        segment = self._segments.get(region.segment)
        if segment is None or region.offset + nbytes > len(segment):
            raise _not_in_arena(region, nbytes)
        return segment[region.offset : region.offset + nbytes]

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as the socket takes it."""
        with self._lock:
            if self._closed:
                return
            if not self._outbox and self._try(message):
                return
            self._outbox.append(message)
        self._want_write(self)

    def flush(self) -> bool:
        """Send what is kept; true when all of it is gone."""
        with self._lock:
            while self._outbox and self._try(self._outbox[0]):
                self._outbox.popleft()
            return not self._outbox

    @property
    def has_unsent(self) -> bool:
        """Whether messages are kept."""
        with self._lock:
            return bool(self._outbox)

    @property
    def is_closed(self) -> bool:
        """Whether the process is gone."""
        return self._closed

    def close(self) -> None:
        """Forget the rank; its memory goes when the last op lets go of it."""
        with self._lock:
            self._closed = True
            self._outbox.clear()
        self.held.clear()
        self._segments.clear()
        self._mappings.clear()
        self._views.clear()
        self._end_socket()

    def _end_socket(self) -> None:
        """After the memory on GPUs: the socket's end tells the rank that it is closed."""
        end: Callable[[], None] = self.socket.close
        for releases in {memory.device.releases for memory in self._on_gpus.values()}:
            end = partial(releases.later, end)
        self._on_gpus.clear()
        end()

    def _try(self, message: bytes) -> bool:
        try:
            self.socket.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            # The hub sees the end of the connection and does what there is to do.
            log.debug("process %d is gone: %s", self.pid, error)
        return True


def _not_in_arena(region: Region, nbytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"{nbytes} bytes at {region.offset} of segment {region.segment} do not lie in this rank's "
        "arena"
    )


def _peer_pid(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")
