"""One op on this node: the calls of the local ranks, and the state of its run."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, time
from typing import Protocol

import torch
import xxhash

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.compiler import Compiled
from allfold_agent.compilation.op_spec import OpSpec
from allfold_agent.compilation.task_graph import chunks
from allfold_agent.execution.executor import Executor
from allfold_agent.execution.op_receiver import OpReceiver
from allfold_agent.gpu.operands import GpuOperands, GpuRange, HostRange, Place
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.mapping import MappedMemory
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import AllfoldError
from allfold_core.operations import Fingerprint
from allfold_core.schedules.parts import Part, Piece
from allfold_core.schedules.schedule import Slice
from allfold_core.verdict import unmatched_pair
from allfold_core.wire.local_wire import OpMessage, Outcome, Region

log = logging.getLogger(__name__)

# Below this many bytes, over all local ranks, a hand-over to the workers costs more than the work.
INLINE_FOLD_BYTES = 128 * 1024
CHUNK_BYTES = 256 * 1024
STALL_SECONDS = 0.2

OnPiece = Callable[[Part, int, int], None]


class RankEndpoint(Protocol):
    """The connection to one rank, as an op needs it."""

    def place(self, region: Region, nbytes: int) -> torch.Tensor | GpuRange:
        """Return the raw bytes of a region of the rank's arena, or their range on a GPU."""

    def memory(self, region: Region, nbytes: int) -> torch.Tensor:
        """Return the raw bytes of a region in the host's memory."""

    def mapping(self, segment: int) -> MappedMemory:
        """Return the mapping of a segment of the arena in the host's memory."""

    def send_outcome(self, outcome: Outcome) -> None:
        """Send the rank the outcome of a call, without waiting."""


@dataclass(slots=True)
class Arrival:
    """One local rank's call; ``source`` and ``target`` are raw bytes in its arena, or on a GPU.

    It counts from ``at``, when its data were there; its timeout from when it was ``called``.
    """

    rank: int
    connection: RankEndpoint
    group_number: int
    message: OpMessage
    spec: OpSpec
    source: torch.Tensor | GpuRange
    target: torch.Tensor | GpuRange
    at: float
    called: float

    def source_place(self) -> Place:
        """The place of the input, for a GPU."""
        return self._place(self.source, self.message.source)

    def target_place(self) -> Place:
        """The place of the result, for a GPU."""
        return self._place(self.target, self.message.target)

    def _place(self, memory: torch.Tensor | GpuRange, region: Region) -> Place:
        if isinstance(memory, GpuRange):
            return memory
        mapping = self.connection.mapping(region.segment) if memory.nbytes else None
        return HostRange(mapping, region.offset, memory.nbytes)


@dataclass(slots=True)
class Op:
    """One op on this node.

    Attributes:
        epoch: the number of the epoch in which it runs.
        ranks: the local ranks of that epoch, all of which must call it.
        stamp: of that epoch: which attempt of the op this is.
        ordinal: the number of that epoch for the ranks.
        participants: how many ranks that epoch has, on all nodes.
        arrivals: by rank.
        compiled: the tasks of ops of this spec on this node, once the op runs.
        operands: the memory that is computed with here, once the op runs.
        on_gpu: True if a rank that has called has its memory on a GPU.
        gpu_operands: the memory that GPUs compute with, where ranks have memory there.
        executor: moves data to and from other nodes, where there are any.
        receivers: by the name of the node, what it gets from each that sends to it.
        running: every local rank has called, with equal fingerprints.
        ended: the outcome is settled on this node.
        stalled_since: when it was first seen to be next, and yet not done.
        patience: how long it may stall until it is looked into (again).
        timeout: the shortest deadline of the ranks that have called, in seconds.
    """

    seq: int
    epoch: int
    ranks: tuple[int, ...]
    stamp: int
    ordinal: int = 0
    participants: int = 0
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    compiled: Compiled | None = None
    operands: Operands | None = None
    on_gpu: bool = False
    gpu_operands: GpuOperands | None = None
    executor: Executor | None = None
    receivers: dict[str, OpReceiver] = field(default_factory=dict)
    strategy: str = ""
    running: bool = False
    ended: bool = False
    error: AllfoldError | None = None
    started_at: float = field(default_factory=time)
    first_arrival: float = field(default_factory=monotonic)
    first_call: float = float("inf")
    stalled_since: float = 0.0
    patience: float = STALL_SECONDS
    timeout: float = field(init=False, default=float("inf"))
    next_deadline: float = field(init=False, default=float("inf"))
    _spec: OpSpec | None = field(init=False, default=None, repr=False)

    @property
    def spec(self) -> OpSpec:
        """That of the first rank that called."""
        assert self._spec is not None
        return self._spec

    @property
    def fingerprint(self) -> Fingerprint:
        """That of the first rank that called."""
        return self.spec.fingerprint

    def add(self, arrival: Arrival) -> None:
        """Record a rank's call; the shortest timeout of all counts, from the first call on."""
        self.arrivals[arrival.rank] = arrival
        if isinstance(arrival.source, GpuRange) or isinstance(arrival.target, GpuRange):
            self.on_gpu = True
        if self._spec is None:
            self._spec = arrival.spec
        self.timeout = min(self.timeout, arrival.message.timeout)
        self.first_call = min(self.first_call, arrival.called)
        self.next_deadline = self.first_call + self.timeout

    @property
    def is_complete(self) -> bool:
        """Return True when every local rank has called."""
        return len(self.arrivals) == len(self.ranks)

    def has_stalled(self, now: float) -> bool:
        """Return True if the op could be done but is not, after a time that doubles each time."""
        if not self.running and self.agrees():
            return False  # it waits for local ranks
        self.stalled_since = self.stalled_since or now
        if now < self.stalled_since + self.patience:
            return False
        self.patience *= 2
        return True

    def agrees(self) -> bool:
        """Return True if the calls of the local ranks, those made until now, fit together."""
        spec = self.spec
        if not spec.is_exchange:
            # Equal fingerprints have the same spec, but after very many others a new one.
            return all(
                each.spec is spec or each.spec.packed == spec.packed
                for each in self.arrivals.values()
            )
        prints = {rank: each.spec.fingerprint for rank, each in self.arrivals.items()}
        same = len({each.common for each in prints.values()}) == 1
        return same and unmatched_pair(prints) is None

    def digest(self, givers: Sequence[int], takers: Sequence[int]) -> int:
        """Return what two nodes compare before data moves: equal if their ranks agree.

        Args:
            givers: the ranks of the sending node.
            takers: the ranks of the receiving node.
        """
        spec = self.spec
        if not spec.is_exchange:
            return spec.digest
        rows = struct.pack(f"<{len(givers) * len(takers)}Q", *self._rows(givers, takers))
        return xxhash.xxh3_64_intdigest(spec.fingerprint.common.pack() + rows)

    def _rows(self, givers: Sequence[int], takers: Sequence[int]) -> Iterator[int]:
        """Yield what each giver sends to each taker, if one side is on this node."""
        for giver in givers:
            for taker in takers:
                if giver in self.arrivals:
                    yield self.arrivals[giver].spec.fingerprint.sent()[taker]
                else:
                    yield self.arrivals[taker].spec.fingerprint.received()[giver]


Done = Callable[[Exception | None], None]


class ChunkedRun:
    """Independent work on many pieces, shared by the workers.

    Args:
        work: called once for every piece: with a part, and the range of it.
        done: called once, by the thread that finishes the last piece, with the error if any.
    """

    def __init__(self, pieces: Sequence[Piece], work: OnPiece, done: Done) -> None:
        self._pieces = pieces
        self._work = work
        self._done = done
        self._next = count()  # its next() is atomic
        self._finished = 0
        self._error: Exception | None = None
        self._lock = make_lock("pieces")

    def start(self, workers: WorkerPool) -> None:
        """Have the workers run it; each takes pieces until there are no more."""
        for _ in range(min(workers.count, len(self._pieces))):
            workers.submit(self._run)

    def _run(self) -> None:
        finished = 0
        while (index := next(self._next)) < len(self._pieces):
            if self._error is None:
                self._error = _attempt(self._work, self._pieces[index])
            finished += 1
        with self._lock:
            self._finished += finished
            last = finished and self._finished == len(self._pieces)
        if last:
            self._done(self._error)


def _attempt(work: OnPiece, piece: Piece) -> Exception | None:
    """Do a piece; return the error, if any, which the ranks are sent."""
    _, start, stop = piece
    try:
        work(*piece)
    except Exception as error:
        log.exception("an op failed in its elements %d to %d", start, stop)
        return error
    return None


def over_pieces(
    wholes: Sequence[Piece],
    itemsize: int,
    nbytes: int,
    workers: WorkerPool,
    work: OnPiece,
    done: Done,
) -> None:
    """Do ``work(part, start, stop)`` on all elements, then ``done(error)``; here if it is quick.

    Args:
        wholes: are cut into pieces.
        nbytes: how much memory the work has to touch.
    """
    if nbytes <= INLINE_FOLD_BYTES:
        error = None
        for whole in wholes:
            error = _attempt(work, whole) or error
        done(error)
        return
    size = max(1, CHUNK_BYTES // itemsize)
    pieces = [
        (part, *bounds)
        for part, start, stop in wholes
        for bounds in chunks(Slice(start, stop), size)
    ]
    ChunkedRun(pieces, work, done).start(workers)
