"""One collective of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allfold._calls.options import Options
from allfold.cli._bench.data import Bench
from allfold.cli._bench.kinds import KINDS
from benchmarks.data import RandomShare
from benchmarks.devices import Device, Operation, Tensor
from benchmarks.libraries import Library
from benchmarks.plan import BARRIER, Case, most_ops

# More than what is moved ever is.
_UNTOUCHED = 9999
_VARIANTS = 5


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
        variants = range(min(_VARIANTS, most_ops(case)))
        shares = [RandomShare(bench, rank, world, variant) for variant in variants]
        self._share = shares[0]
        self._given = [self._brought(share) for share in shares]
        self._expected = [self._right(share) for share in shares]
        self._kept: list[Tensor] = []
        self._plain: dict[str, Tensor] = {}
        some = [each for each in libraries if each.supports(case.kind)]
        self._turns = {library.name: self._turn(library, bench) for library in some}
        self.contestants = list(self._turns)

    def operation(self, contestant: str) -> Operation:
        return self._turns[contestant].operation

    def write(self, contestant: str, op: int) -> None:
        turn = self._turns[contestant]
        if turn.target is not turn.source:
            turn.target[:] = _UNTOUCHED
        self._device.write(turn.source, self._given[op % len(self._given)])

    def keep(self, contestant: str, op: int) -> None:
        result = self._turns[contestant].target
        if op == len(self._kept):
            self._kept.append(self._device.empty(len(result)))
        self._device.write(self._kept[op], result)

    def count_wrong(self, contestant: str, ops: int) -> int:
        turn = self._turns[contestant]
        results = [*self._kept[: ops - 1], turn.target]
        return sum(self._wrong(result, op, turn.wire) for op, result in enumerate(results))

    def _wrong(self, result: Tensor, op: int, wire: str) -> int:
        expected = self._expected[op % len(self._expected)]
        if expected is None:
            return 0
        allowed = self._share.tolerance(self._nodes, wire)
        return self._device.count_wrong(result, expected, allowed)

    def _brought(self, share: RandomShare) -> Tensor:
        return self._device.keep(share.brought_by(share.rank, self._kind.source(share)))

    def _right(self, share: RandomShare) -> Tensor | None:
        """The result, where this rank gets one."""
        expected = self._kind.expected(share)
        return None if expected is None else self._device.keep(expected)

    def _turn(self, library: Library, bench: Bench) -> _Turn:
        source = self._memory("source", library, self._kind.source(self._share))
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

    def operation(self, contestant: str) -> Operation:
        return self._barriers[contestant]

    def write(self, _contestant: str, _op: int, /) -> None:
        """Nothing to write."""

    def keep(self, _contestant: str, _op: int, /) -> None:
        """Nothing to keep."""

    def count_wrong(self, _contestant: str, _ops: int, /) -> int:
        return 0


def collective(
    case: Case, libraries: Sequence[Library], device: Device, rank: int, nodes: int, world: int
) -> CollectiveWorkload | BarrierWorkload:
    """The workload of a case."""
    if case.kind == BARRIER:
        return BarrierWorkload(libraries, device)
    return CollectiveWorkload(case, libraries, device, rank, nodes, world)
