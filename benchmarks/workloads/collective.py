"""One collective of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allfold._options import Options
from allfold.cli._bench_data import Array, Bench
from allfold.cli._bench_kinds import KINDS
from benchmarks.data import RandomShare, count_wrong
from benchmarks.libraries import Library, Operation
from benchmarks.plan import BARRIER, Case

# More than what is moved ever is.
_UNTOUCHED = 9999


@dataclass(frozen=True)
class _Turn:
    """One library's tensors and what it does with them."""

    source: Array
    target: Array
    operation: Operation
    wire: str


class CollectiveWorkload:
    """A collective, checked against what NumPy computes. See :class:`benchmarks.plan.Case`."""

    def __init__(
        self, case: Case, libraries: Sequence[Library], rank: int, nodes: int, world: int
    ) -> None:
        self._kind = KINDS[case.kind]
        self._nodes = nodes
        bench = Bench(case.kind, "sum", "float32", case.size // 4, Options())
        self._share = RandomShare(bench, rank, world)
        self._given = self._share.brought_by(rank, self._kind.source(self._share))
        self._expected = self._kind.expected(self._share)
        self._plain: dict[str, Array] = {}
        some = [each for each in libraries if self._kind.reduces or each.wire == "native"]
        self._turns = {library.name: self._turn(library, bench) for library in some}
        self.contestants = list(self._turns)

    def reset(self, contestant: str) -> None:
        turn = self._turns[contestant]
        if turn.target is not turn.source:
            turn.target.fill(_UNTOUCHED)
        np.copyto(turn.source, self._given)

    def run(self, contestant: str, ops: int) -> None:
        operation = self._turns[contestant].operation
        for _ in range(ops):
            operation()

    def count_wrong(self, contestant: str, ops: int) -> int:
        if ops > 1 and self._share.bench.kind == "reduce":
            # Gloo leaves partial sums with the others, so only the first in a row is a sum.
            self.reset(contestant)
            self.run(contestant, ops := 1)
        if self._expected is None:
            return 0
        turn, share = self._turns[contestant], self._share
        allowed = share.tolerance(self._nodes, ops, turn.wire)
        return count_wrong(turn.target, self._expected, share.growth(ops), allowed)

    def _turn(self, library: Library, bench: Bench) -> _Turn:
        source = self._memory("source", library, len(self._given))
        target = source
        if self._kind.target is not None:
            target = self._memory("target", library, self._kind.target(self._share))
        return _Turn(source, target, library.operation(bench, source, target), library.wire)

    def _memory(self, role: str, library: Library, count: int) -> Array:
        """The library's own, or what all without one share: they take turns."""
        own = library.empty(count)
        if own is not None:
            return own
        return self._plain.setdefault(role, np.empty(count, np.float32))


class BarrierWorkload:
    """A barrier. Nothing can be wrong with the data of it."""

    def __init__(self, libraries: Sequence[Library]) -> None:
        # Without tensors Allfold has one way only.
        some = [each for each in libraries if each.name != "plain" and each.wire == "native"]
        self._barriers = {library.name: library.barrier() for library in some}
        self.contestants = list(self._barriers)

    def reset(self, contestant: str) -> None:
        """Nothing to prepare."""

    def run(self, contestant: str, ops: int) -> None:
        barrier = self._barriers[contestant]
        for _ in range(ops):
            barrier()

    def count_wrong(self, _contestant: str, _ops: int, /) -> int:
        return 0


def collective(
    case: Case, libraries: Sequence[Library], rank: int, nodes: int, world: int
) -> CollectiveWorkload | BarrierWorkload:
    """The workload of a case."""
    if case.kind == BARRIER:
        return BarrierWorkload(libraries)
    return CollectiveWorkload(case, libraries, rank, nodes, world)
