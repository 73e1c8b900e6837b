"""One collective of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allfold._options import Options
from allfold.cli._bench.data import Array, Bench
from allfold.cli._bench.kinds import KINDS
from benchmarks.data import RandomShare
from benchmarks.devices import Device, Operation, Tensor
from benchmarks.libraries import Library
from benchmarks.plan import BARRIER, Case
from benchmarks.workloads import timed

# More than what is moved ever is.
_UNTOUCHED = 9999


@dataclass(frozen=True)
class _Turn:
    """One library's tensors and what it does with them."""

    source: Tensor
    target: Tensor
    operation: Operation
    wire: str


class CollectiveWorkload:
    """A collective, checked against what NumPy computes. See :class:`benchmarks.plan.Case`."""

    def __init__(
        self,
        case: Case,
        libraries: Sequence[Library],
        device: Device,
        rank: int,
        nodes: int,
        world: int,
    ) -> None:
        self._device = device
        self._kind = KINDS[case.kind]
        self._nodes = nodes
        bench = Bench(case.kind, "sum", "float32", case.size // 4, Options())
        self._share = RandomShare(bench, rank, world)
        given = self._share.brought_by(rank, self._kind.source(self._share))
        expected: Array | None = self._kind.expected(self._share)
        self._given = device.keep(given)
        self._expected = None if expected is None else device.keep(expected)
        self._plain: dict[str, Tensor] = {}
        some = [each for each in libraries if each.supports(case.kind)]
        self._turns = {library.name: self._turn(library, bench) for library in some}
        self.contestants = list(self._turns)

    def reset(self, contestant: str) -> None:
        turn = self._turns[contestant]
        if turn.target is not turn.source:
            turn.target[:] = _UNTOUCHED
        self._device.write(turn.source, self._given)

    def run(self, contestant: str, ops: int) -> list[float]:
        return timed(self._turns[contestant].operation, ops)

    def count_wrong(self, contestant: str, ops: int) -> int:
        if ops > 1 and self._share.bench.kind == "reduce":
            # Gloo leaves partial sums with the others, so only the first in a row is a sum.
            self.reset(contestant)
            self.run(contestant, ops := 1)
        if self._expected is None:
            return 0
        turn, share = self._turns[contestant], self._share
        allowed = share.tolerance(self._nodes, ops, turn.wire)
        return self._device.count_wrong(turn.target, self._expected, share.growth(ops), allowed)

    def _turn(self, library: Library, bench: Bench) -> _Turn:
        source = self._memory("source", library, len(self._given))
        target = source
        if self._kind.target is not None:
            target = self._memory("target", library, self._kind.target(self._share))
        operation = self._device.finished(library.operation(bench, source, target))
        return _Turn(source, target, operation, library.wire)

    def _memory(self, role: str, library: Library, count: int) -> Tensor:
        """The library's own, or what all without one share: they take turns."""
        own = library.empty(count)
        if own is not None:
            return own
        if role not in self._plain:
            self._plain[role] = self._device.empty(count)
        return self._plain[role]


class BarrierWorkload:
    """A barrier. Nothing can be wrong with the data of it."""

    def __init__(self, libraries: Sequence[Library], device: Device) -> None:
        some = [each for each in libraries if each.supports(BARRIER)]
        self._barriers = {each.name: device.finished(each.barrier()) for each in some}
        self.contestants = list(self._barriers)

    def reset(self, contestant: str) -> None:
        """Nothing to prepare."""

    def run(self, contestant: str, ops: int) -> list[float]:
        return timed(self._barriers[contestant], ops)

    def count_wrong(self, _contestant: str, _ops: int, /) -> int:
        return 0


def collective(
    case: Case, libraries: Sequence[Library], device: Device, rank: int, nodes: int, world: int
) -> CollectiveWorkload | BarrierWorkload:
    """The workload of a case."""
    if case.kind == BARRIER:
        return BarrierWorkload(libraries, device)
    return CollectiveWorkload(case, libraries, device, rank, nodes, world)
