"""One op on this node: the calls of the local ranks, and the state of its run."""

from __future__ import annotations

import logging
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, Protocol

import xxhash

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.compiler import Compiled
from allfold_agent.compilation.op_spec import OpSpec
from allfold_agent.compilation.task_graph import chunks
from allfold_agent.execution.executor import Executor
from allfold_agent.execution.op_edges import OpReceiver
from allfold_agent.gpu.operands import GpuOperands, GpuRange, HostRange, Nowhere, Place
from allfold_agent.runtime.buffers import Buffer, MappedMemory
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import AllfoldError
from allfold_core.operations import Fingerprint
from allfold_core.protocol.rank_messages import OpMessage, Outcome, Region
from allfold_core.schedules.parts import Part, Piece
from allfold_core.schedules.schedule import Slice
from allfold_core.survival.records import Stamp
from allfold_core.verdict import unmatched_pair

log = logging.getLogger(__name__)

# Below this many bytes, over all local ranks, a hand-over to the workers, who then compete with the
# other threads for the interpreter, costs more than the work.
INLINE_FOLD_BYTES = 1024 * 1024
CHUNK_BYTES = 256 * 1024

OnPiece = Callable[[Part, int, int], None]


class RankEndpoint(Protocol):
    """The connection to one rank, as an op needs it."""

    def place(self, region: Region, nbytes: int) -> memoryview | GpuRange:
        """Return the raw bytes of a region of the rank's arena, or their range on a GPU."""

    def memory(self, region: Region, nbytes: int) -> memoryview:
        """Return the raw bytes of a region in the host's memory."""

    def mapping(self, segment: int) -> MappedMemory:
        """Return the mapping of a segment of the arena in the host's memory."""

    def send_outcome(self, outcome: Outcome) -> None:
        """Send the rank the outcome of a call, without waiting."""

    def send(self, message: bytes) -> None:
        """Send the rank a message, without waiting."""


@dataclass(slots=True)
class Arrival:
    """One local rank's call; ``source`` and ``target`` are raw bytes in its arena, or on a GPU.

    Of a rank that is dead they are nobody's.
    It counts from ``at``, when its data were there; its timeout from when it was ``called``.
    """

    rank: int
    connection: RankEndpoint
    group_number: int
    message: OpMessage
    spec: OpSpec
    source: memoryview | GpuRange | Nowhere
    target: memoryview | GpuRange | Nowhere
    at: float
    called: float

    def source_place(self) -> Place:
        """The place of the input, for a GPU."""
        return self._place(self.source, self.message.source)

    def target_place(self) -> Place:
        """The place of the result, for a GPU."""
        return self._place(self.target, self.message.target)

    def _place(self, memory: memoryview | GpuRange | Nowhere, region: Region) -> Place:
        if not isinstance(memory, memoryview):
            return memory
        mapping = self.connection.mapping(region.segment) if memory.nbytes else None
        return HostRange(mapping, region.offset, memory.nbytes)


@dataclass(slots=True)
class Op:
    """One op on this node: the calls of the local ranks, and its attempt in one epoch.

    Attributes:
        calls: by session, of all local ranks that have called; in the numbers of their views.
        stamp: of the epoch in which it runs, or would run if it began now.
        packed_stamp: the same, as frames have it.
        ordinal: the number of that epoch for the ranks.
        participants: how many ranks that epoch has, on all nodes.
        boundary: the boundary that it has announced; 0 for none.
        ranks: the local ranks of that epoch.
        arrivals: by rank of that epoch, the calls of those who have called.
        spec: that of the first of them; before there is one, of the first rank that has called.
        uniform: they are all alike, without a closer look.
        compiled: the tasks of ops of this spec on this node, once the op runs.
        operands: the memory that is computed with here, once the op runs.
        on_gpu: True if a rank that has called has its memory on a GPU.
        gpu_operands: the memory that GPUs compute with, where ranks have memory there.
        executor: moves data to and from other nodes, where there are any.
        result: what was got from another node that had the result already, or in the short lane.
        is_fetched: it was got from another node, so others can use it, too.
        receivers: by the name of the node, what it gets from each that sends to it.
        running: an attempt is under way, or has ended with a result.
        leaving: an attempt that was given up may still write to the memory of ranks.
        next_step: what is done as soon as none does.
        ended: the outcome is settled on this node.
        doubted: the nodes were asked to judge it, because its calls differ.
        timeout: the shortest deadline of the ranks that have called, in seconds.
        extension: for how many seconds the deadline has stood still.
        first_arrival: when the first call was taken in; these times are monotonic, 0.0 for not yet.
        began_at: when its latest attempt began.
        exchanged_at: when the last task of that was done; stays 0.0 on a single node.
        settled_at: when it was decided that its result is handed out.
    """

    seq: int
    stamp: Stamp
    packed_stamp: int
    ordinal: int
    participants: int
    ranks: tuple[int, ...]
    boundary: int = 0
    calls: dict[str, Arrival] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    spec: OpSpec = field(init=False)
    uniform: bool = False
    compiled: Compiled | None = None
    operands: Operands | None = None
    on_gpu: bool = False
    gpu_operands: GpuOperands | None = None
    executor: Executor | None = None
    result: Buffer | None = None
    is_fetched: bool = False
    receivers: dict[str, OpReceiver] = field(default_factory=dict)
    strategy: str = ""
    running: bool = False
    leaving: bool = False
    next_step: Callable[[], None] | None = None
    ended: bool = False
    doubted: bool = False
    error: AllfoldError | None = None
    first_arrival: float = field(default_factory=monotonic)
    began_at: float = 0.0
    exchanged_at: float = 0.0
    settled_at: float = 0.0
    first_call: float = float("inf")
    timeout: float = field(init=False, default=float("inf"))
    extension: float = field(init=False, default=0.0)
    next_deadline: float = field(init=False, default=float("inf"))

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the op's spec."""
        return self.spec.fingerprint

    def add(self, session: str, arrival: Arrival, translated: Arrival | None) -> None:
        """Record a rank's call; the shortest timeout of all counts, from the first call on.

        Args:
            translated: the same in the numbers of the op's epoch; ``None`` where it has none there.
        """
        if translated is not None:
            spec = translated.spec
            if not self.arrivals:
                self.spec = spec
                self.uniform = not spec.is_exchange
            elif spec is not self.spec:
                self.uniform = False
            self.arrivals[translated.rank] = translated
        elif not self.calls:
            self.spec = arrival.spec
        if not self.calls:
            self.first_arrival = arrival.at
        self.calls[session] = arrival
        if type(arrival.source) is GpuRange or type(arrival.target) is GpuRange:
            self.on_gpu = True
        timeout, called = arrival.message.timeout, arrival.called
        if timeout < self.timeout or called < self.first_call:
            self.timeout = min(timeout, self.timeout)
            self.first_call = min(called, self.first_call)
            self.next_deadline = self.deadline

    @property
    def deadline(self) -> float:
        """The time at which the op fails for lack of ranks that have not called (monotonic)."""
        return self.first_call + self.timeout + self.extension

    def extend(self, seconds: float) -> None:
        """Give it more time, as nothing could be decided meanwhile."""
        self.extension += seconds
        self.next_deadline += seconds

    def enter(self, arrivals: dict[int, Arrival]) -> None:
        """Take the calls in the numbers of another epoch."""
        self.arrivals, self.uniform = arrivals, False
        for first in (arrivals or self.calls).values():
            self.spec = first.spec
            break

    def forget_attempt(self) -> None:
        """The attempt was given up; its calls stay."""
        self.compiled = self.operands = self.gpu_operands = self.executor = None
        self.receivers = {}
        self.running = False

    def agrees(self) -> bool:
        """Return True if the calls of the local ranks, those made until now, fit together."""
        if self.uniform:
            return True
        spec = self.spec
        if not spec.is_exchange:
            for each in self.arrivals.values():
                # Equal fingerprints have the same spec, but after very many others a new one.
                if each.spec is not spec and each.spec.common != spec.common:
                    return False
            return True
        prints = {rank: each.spec.fingerprint for rank, each in self.arrivals.items()}
        same = len({each.common for each in prints.values()}) == 1
        return same and unmatched_pair(prints) is None

    @property
    def weights(self) -> tuple[float, ...]:
        """Those of a weighted mean, by rank, once they are known; else none."""
        weights = self.operands.weights if self.operands is not None else None
        return weights.of_ranks if weights is not None else ()

    @property
    def sent_bytes(self) -> int:
        """The payload that this node has sent to others for it."""
        return self.executor.sent_bytes if self.executor is not None else 0

    def report(self, arrival: Arrival) -> dict[str, Any] | None:
        """Return what a rank is told of a weighted mean that is done, in JSON; else ``None``."""
        weights = self.weights
        if not weights:
            return None
        packed = struct.pack(f"<{len(weights)}d", *weights)
        called = arrival.message
        return {
            # Its number in the epoch of the op, which may be a later one than that of its call.
            "rank": next(r for r, each in self.arrivals.items() if each.message is called),
            "weights": b64encode(packed).decode(),
            "bytes": self.sent_bytes,
            "seconds": self.settled_at - arrival.called,
        }

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


class OpOutcomes(Protocol):
    """Decides on the outcome of ops: the group."""

    def completed(self, seq: int, stamp: Stamp, floor: int) -> None:
        """Note that an attempt is done, and that ops up to ``floor`` are final on all nodes."""

    def end(self, op: Op, error: Exception | None) -> None:
        """End an op whose results are written to the local ranks, or could not be."""

    def cannot_run(self, seq: int, error: Exception, stamp: Stamp) -> None:
        """Fail an attempt of which this node cannot do its part."""


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
        """Give it to the workers; each takes pieces until there are no more."""
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
