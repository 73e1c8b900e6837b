"""One op as this node sees it: which local ranks have called it, and how it is run."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from time import monotonic, time
from typing import Protocol

import torch
import xxhash

from allfold_agent.compiling import Compiled
from allfold_agent.contracts import Contract
from allfold_agent.dataflow import chunks
from allfold_agent.exchange import Exchange
from allfold_agent.gpu.job import GpuJob, GpuRange, HostRange, Place
from allfold_agent.job import Job
from allfold_agent.mapped import Mapped
from allfold_agent.workers import WorkerPool
from allfold_core.errors import AllfoldError
from allfold_core.local_wire import OpMessage, Region
from allfold_core.operations import Fingerprint
from allfold_core.parts import Part, Piece
from allfold_core.schedule import Slice
from allfold_core.verdict import unmatched_pair

log = logging.getLogger(__name__)

# Below this many bytes, over all local ranks, a hand-over to the workers costs more than the work.
INLINE_BYTES = 128 * 1024
CHUNK_BYTES = 256 * 1024
STALL_SECONDS = 0.2

Work = Callable[[Part, int, int], None]


class RankConnection(Protocol):
    """What an op needs of the connection to one rank."""

    def place(self, region: Region, nbytes: int) -> torch.Tensor | GpuRange:
        """A region of the rank's arena: its raw bytes, or where they are on a GPU."""

    def memory(self, region: Region, nbytes: int) -> torch.Tensor:
        """The raw bytes of a region in the host's memory."""

    def mapping(self, segment: int) -> Mapped:
        """What a segment of the arena in the host's memory is."""

    def send(self, message: bytes) -> None:
        """Send a message to the rank, without waiting."""


@dataclass(slots=True)
class Arrival:
    """One local rank's call; ``source`` and ``target`` are raw bytes in its arena, or on a GPU.

    It counts from ``at``, when its data were there; its timeout from when it was ``called``.
    """

    rank: int
    connection: RankConnection
    group_number: int
    message: OpMessage
    contract: Contract
    source: torch.Tensor | GpuRange
    target: torch.Tensor | GpuRange
    at: float
    called: float

    def source_place(self) -> Place:
        """Where the input is, for a GPU."""
        return self._place(self.source, self.message.source)

    def target_place(self) -> Place:
        """Where the result goes, for a GPU."""
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
        arrivals: by rank.
        compiled: what ops of this contract do here, once the op runs.
        job: what is to be computed here, once the op runs.
        on_gpu: whether any of the ranks that have called has its memory on a GPU.
        gpu_job: the part of it that GPUs compute, where ranks have memory there.
        exchange: what moves data to and from other nodes, where there are any.
        running: every local rank has called, with equal fingerprints.
        ended: the outcome is settled on this node.
        stalled_since: when it was first seen to be next, and yet not done.
        patience: how long it may stall until it is looked into (again).
        timeout: the shortest deadline of the ranks that have called, in seconds.
    """

    seq: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    compiled: Compiled | None = None
    job: Job | None = None
    on_gpu: bool = False
    gpu_job: GpuJob | None = None
    exchange: Exchange | None = None
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
    _contract: Contract | None = field(init=False, default=None, repr=False)

    @property
    def contract(self) -> Contract:
        """That of the first rank that called."""
        assert self._contract is not None
        return self._contract

    @property
    def fingerprint(self) -> Fingerprint:
        """That of the first rank that called."""
        return self.contract.fingerprint

    def add(self, arrival: Arrival) -> None:
        """Record a rank's call; the shortest timeout of all counts, from the first call on."""
        self.arrivals[arrival.rank] = arrival
        if isinstance(arrival.source, GpuRange) or isinstance(arrival.target, GpuRange):
            self.on_gpu = True
        if self._contract is None:
            self._contract = arrival.contract
        self.timeout = min(self.timeout, arrival.message.timeout)
        self.first_call = min(self.first_call, arrival.called)
        self.next_deadline = self.first_call + self.timeout

    def agrees(self) -> bool:
        """Whether the calls of the local ranks so far fit together."""
        contract = self.contract
        if not contract.is_exchange:
            # Equal fingerprints have the same contract, but after very many others a new one.
            return all(
                each.contract is contract or each.contract.packed == contract.packed
                for each in self.arrivals.values()
            )
        prints = {rank: each.contract.fingerprint for rank, each in self.arrivals.items()}
        same = len({each.common for each in prints.values()}) == 1
        return same and unmatched_pair(prints) is None

    def digest(self, givers: Sequence[int], takers: Sequence[int]) -> int:
        """What two nodes compare before data moves: the same at both if their ranks agree.

        Args:
            givers: the ranks of the sending node.
            takers: the ranks of the receiving node.
        """
        contract = self.contract
        if not contract.is_exchange:
            return contract.digest
        rows = struct.pack(f"<{len(givers) * len(takers)}Q", *self._rows(givers, takers))
        return xxhash.xxh3_64_intdigest(contract.fingerprint.common.pack() + rows)

    def _rows(self, givers: Sequence[int], takers: Sequence[int]) -> Iterator[int]:
        """What each giver sends to each taker, as far as one side is here."""
        for giver in givers:
            for taker in takers:
                if giver in self.arrivals:
                    yield self.arrivals[giver].contract.fingerprint.sent()[taker]
                else:
                    yield self.arrivals[taker].contract.fingerprint.received()[giver]


Done = Callable[[Exception | None], None]


class ChunkedWork:
    """Independent work on many pieces, shared by the workers.

    Args:
        work: called once for every piece: with a part, and the range of it.
        done: called once, by whoever finishes the last piece, with what went wrong.
    """

    def __init__(self, pieces: Sequence[Piece], work: Work, done: Done) -> None:
        self._pieces = pieces
        self._work = work
        self._done = done
        self._next = count()  # its next() is atomic
        self._finished = 0
        self._error: Exception | None = None
        self._lock = Lock()

    def start(self, workers: WorkerPool) -> None:
        """Let the workers at it; each takes pieces until there are no more."""
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


def _attempt(work: Work, piece: Piece) -> Exception | None:
    """Do a piece; what went wrong, which is the ranks' to hear."""
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
    work: Work,
    done: Done,
) -> None:
    """Do ``work(part, start, stop)`` on all elements, then ``done(error)``; here if it is quick.

    Args:
        wholes: what is cut into pieces.
        nbytes: how much memory the work has to touch.
    """
    if nbytes <= INLINE_BYTES:
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
    ChunkedWork(pieces, work, done).start(workers)
