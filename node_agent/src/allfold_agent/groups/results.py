"""The results that this node keeps until every other one has them."""

from __future__ import annotations

from typing import NamedTuple

from allfold_agent.execution.op import Op
from allfold_agent.groups.op_table import OpTable
from allfold_agent.runtime.buffers import Buffer
from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import is_replicated


class Result(NamedTuple):
    """The result of an op, as it lies in a work buffer."""

    stamp: Stamp
    buffer: Buffer
    nbytes: int


class Results:
    """Work buffers of ops that are over here: held, not copied. With the table's lock held.

    Of kinds whose result is the same everywhere: a copy of any other serves nobody.
    """

    def __init__(self, table: OpTable) -> None:
        self._table = table
        self._kept: dict[int, Result] = {}

    def keep(self, op: Op) -> None:
        """Keep the result of an op that is handed out, where another node may need it."""
        buffer = op.result or (op.executor.buffer if op.executor is not None else None)
        if buffer is None or not is_replicated(op.fingerprint.kind):
            return
        assert op.compiled is not None
        nbytes = op.compiled.layout.held * op.compiled.arithmetic.kept_itemsize
        self._kept[op.seq] = Result(op.stamp, buffer.hold(), nbytes)

    def release(self, floor: int) -> None:
        """Every node has the results up to this op."""
        for seq in [each for each in self._kept if each <= floor]:
            self._kept.pop(seq).buffer.release()

    def take(self, seq: int, stamp: Stamp) -> Result | None:
        """The result of an attempt, held once more for the caller; ``None`` if it is not here."""
        with self._table.lock:
            kept = self._kept.get(seq)
            if kept is None or kept.stamp != stamp:
                return None
            kept.buffer.hold()
            return kept

    @property
    def nbytes(self) -> int:
        """The memory of all that is kept."""
        return sum(each.nbytes for each in list(self._kept.values()))
