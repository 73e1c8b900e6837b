"""One op as this node sees it: which local ranks have called it, and how it is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from time import monotonic, time
from typing import Protocol

import torch

from allfold_agent.exchange import Exchange
from allfold_agent.folding import Arithmetic, contributes, receives_result
from allfold_agent.workers import WorkerPool
from allfold_core.errors import AllfoldError
from allfold_core.local_wire import OpMessage, Region
from allfold_core.operations import Fingerprint

log = logging.getLogger(__name__)

# Below this many bytes, over all local ranks, a hand-over to the workers costs more than the work.
INLINE_BYTES = 128 * 1024
CHUNK_BYTES = 256 * 1024
STALL_SECONDS = 0.2


class RankConnection(Protocol):
    """What an op needs of the connection to one rank."""

    def memory(self, region: Region, nbytes: int) -> torch.Tensor:
        """The raw bytes of a region of the rank's arena."""

    def send(self, message: bytes) -> None:
        """Send a message to the rank, without waiting."""


@dataclass(slots=True)
class Arrival:
    """One local rank's call; ``source`` and ``target`` are the raw bytes in its arena."""

    rank: int
    connection: RankConnection
    group_number: int
    message: OpMessage
    fingerprint: Fingerprint
    source: torch.Tensor
    target: torch.Tensor
    at: float


@dataclass(slots=True)
class Op:
    """One op on this node.

    Attributes:
        arrivals: by rank.
        exchange: what moves data to and from other nodes, once the op runs.
        running: every local rank has called, with equal fingerprints.
        ended: the outcome is settled on this node.
        stalled_since: when it was first seen to be next, and yet not done.
        patience: how long it may stall until it is looked into (again).
    """

    seq: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    exchange: Exchange | None = None
    strategy: str = ""
    digest: int = 0
    running: bool = False
    ended: bool = False
    error: AllfoldError | None = None
    started_at: float = field(default_factory=time)
    first_arrival: float = field(default_factory=monotonic)
    stalled_since: float = 0.0
    patience: float = STALL_SECONDS
    next_deadline: float = field(init=False, default=float("inf"))

    @property
    def fingerprint(self) -> Fingerprint:
        """That of the first rank that called."""
        return next(iter(self.arrivals.values())).fingerprint

    @property
    def timeout(self) -> float:
        """The shortest deadline of the ranks that have called, in seconds."""
        return min(arrival.message.timeout for arrival in self.arrivals.values())

    def add(self, arrival: Arrival) -> None:
        """Record a rank's call; the shortest timeout of all counts, from the first call on."""
        self.arrivals[arrival.rank] = arrival
        self.next_deadline = self.first_arrival + self.timeout

    def agrees(self) -> bool:
        """Whether all local ranks that have called asked for the same."""
        return len({arrival.message.fingerprint for arrival in self.arrivals.values()}) == 1

    def sources(self, arithmetic: Arithmetic) -> list[torch.Tensor]:
        """The contributing inputs, in rank order."""
        return [
            arrival.source.view(arithmetic.dtype)
            for rank, arrival in sorted(self.arrivals.items())
            if contributes(arrival.fingerprint, rank)
        ]

    def targets(self, arithmetic: Arithmetic) -> list[torch.Tensor]:
        """The outputs that get the result, in rank order."""
        return [
            arrival.target.view(arithmetic.dtype)
            for rank, arrival in sorted(self.arrivals.items())
            if receives_result(arrival.fingerprint, rank)
        ]


Done = Callable[[Exception | None], None]


class ChunkedWork:
    """Independent work on all chunks of a range, shared by the workers.

    Args:
        work: called with (start, stop), in elements, once for every chunk.
        done: called once, by whoever finishes the last chunk, with what went wrong.
    """

    def __init__(
        self, numel: int, chunk: int, work: Callable[[int, int], None], done: Done
    ) -> None:
        self._numel = numel
        self._chunk = chunk
        self._work = work
        self._done = done
        self._total = -(-numel // chunk)
        self._next = count()  # its next() is atomic
        self._finished = 0
        self._error: Exception | None = None
        self._lock = Lock()

    def start(self, workers: WorkerPool) -> None:
        """Let the workers at it; each takes chunks until there are no more."""
        for _ in range(min(workers.count, self._total)):
            workers.submit(self._run)

    def _run(self) -> None:
        finished = 0
        while (index := next(self._next)) < self._total:
            start = index * self._chunk
            if self._error is None:
                self._error = _attempt(self._work, start, min(start + self._chunk, self._numel))
            finished += 1
        with self._lock:
            self._finished += finished
            last = finished and self._finished == self._total
        if last:
            self._done(self._error)


def _attempt(work: Callable[[int, int], None], start: int, stop: int) -> Exception | None:
    """Do a chunk; what went wrong, which is the ranks' to hear."""
    try:
        work(start, stop)
    except Exception as error:
        log.exception("an op failed in its elements %d to %d", start, stop)
        return error
    return None


def over_chunks(
    numel: int,
    itemsize: int,
    copies: int,
    workers: WorkerPool,
    work: Callable[[int, int], None],
    done: Done,
) -> None:
    """Do ``work(start, stop)`` on all elements, here if that is quick, then ``done(error)``.

    ``copies`` says how many tensors of ``numel`` elements the work touches.
    """
    if numel * itemsize * copies <= INLINE_BYTES:
        done(_attempt(work, 0, numel) if numel else None)
        return
    ChunkedWork(numel, max(1, CHUNK_BYTES // itemsize), work, done).start(workers)


def fold_locally(
    arithmetic: Arithmetic,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    start: int,
    stop: int,
) -> None:
    """Fold one chunk of all local ranks into their outputs, where there is no other node.

    The first output holds the running fold, so that a chunk is read and written in cache. It may
    be the first rank's input (an op in place): every input is read before its own output is
    written, and no other input is that memory.
    """
    outputs = [target[start:stop] for target in targets]
    inputs = [source[start:stop] for source in sources]
    if arithmetic.converts or not outputs:
        kept = torch.empty(stop - start, dtype=arithmetic.kept_dtype)
    else:
        kept = outputs[0]
    arithmetic.fold(kept, inputs)
    arithmetic.finish(outputs, kept)
