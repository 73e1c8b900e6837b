"""Results that this node keeps until every other one has them, and the bound on their memory."""

from __future__ import annotations

from typing import NamedTuple

from allfold_agent.execution.op import Op
from allfold_agent.groups.op_table import OpTable
from allfold_agent.runtime.buffers import Buffer
from allfold_agent.runtime.locks import make_lock
from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import is_replicated

LEAST_BYTES = 256 << 20


class Retention:
    """The bound on what the groups of this node keep, in equal shares.

    No group waits for the memory of another one: two groups whose ops are called in different
    orders on two nodes would wait for each other.

    Args:
        limit: in bytes; by default at least 256 MiB, and twice the largest result.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._given = limit
        self._limit = LEAST_BYTES if limit is None else limit
        self._groups = 0
        self._share = self._limit
        self._lock = make_lock("retention")

    @property
    def limit(self) -> int:
        """The bound for all groups together, in bytes."""
        return self._limit

    @property
    def share(self) -> int:
        """The bound for each group, in bytes."""
        return self._share

    def enter(self) -> None:
        """One more group keeps results."""
        with self._lock:
            self._groups += 1
            self._divide()

    def leave(self) -> None:
        """One of the groups is over."""
        with self._lock:
            self._groups -= 1
            self._divide()

    def note(self, nbytes: int) -> None:
        """There is a result of so many bytes."""
        if self._given is None and 2 * nbytes > self._limit:
            with self._lock:
                self._limit = max(self._limit, 2 * nbytes)
                self._divide()

    def _divide(self) -> None:
        self._share = self._limit // max(1, self._groups)


class Result(NamedTuple):
    """The result of an op, as it lies in a work buffer."""

    stamp: Stamp
    buffer: Buffer
    nbytes: int


class Results:
    """Work buffers of ops that are over here: held, not copied. With the table's lock held.

    Only for kinds whose result is the same on all nodes: other nodes cannot use any other result.
    """

    def __init__(self, table: OpTable, retention: Retention) -> None:
        self._table = table
        self._retention = retention
        self._kept: dict[int, Result] = {}
        self._nbytes = 0
        self._closed = False
        retention.enter()

    @property
    def nbytes(self) -> int:
        """The memory of all that is kept."""
        return self._nbytes

    @property
    def has_room(self) -> bool:
        """True unless the group keeps more than its share."""
        return self._nbytes <= self._retention.share

    def keep(self, op: Op) -> None:
        """Keep the result of an op that is handed out, where another node may need it."""
        buffer = op.result or (op.executor.buffer if op.executor is not None else None)
        if buffer is None or not is_replicated(op.fingerprint.kind):
            return
        assert op.compiled is not None
        nbytes = op.compiled.layout.held * op.compiled.arithmetic.kept_itemsize
        self._retention.note(nbytes)
        self._kept[op.seq] = Result(op.stamp, buffer.hold(), nbytes)
        self._nbytes += nbytes

    def keep_copy(self, seq: int, stamp: Stamp, buffer: Buffer, nbytes: int) -> None:
        """Keep a result that lies in a buffer of its own."""
        self._kept[seq] = Result(stamp, buffer, nbytes)
        self._nbytes += nbytes

    def release(self, floor: int) -> None:
        """Every node has the results up to this op."""
        kept = self._kept
        if not kept:
            return
        for seq in [each for each in kept if each <= floor]:
            _, buffer, nbytes = kept.pop(seq)
            self._nbytes -= nbytes
            buffer.release()

    def close(self) -> None:
        """The group is over here."""
        self.release(max(self._kept, default=-1))
        if not self._closed:
            self._closed = True
            self._retention.leave()

    def take(self, seq: int, stamp: Stamp) -> Result | None:
        """The result of an attempt, held once more for the caller; ``None`` if it is not here."""
        with self._table.lock:
            kept = self._kept.get(seq)
            if kept is None or kept.stamp != stamp:
                return None
            kept.buffer.hold()
            return kept
