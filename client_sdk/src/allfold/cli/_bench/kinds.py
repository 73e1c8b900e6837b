"""The collectives that ``allfold bench`` measures: how each is called and checked.

Sizes are those of nccl-tests: of the tensor for all-reduce, reduce and broadcast, of all blocks
together for the others. Rank 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import allfold
from allfold._calls.options import Options
from allfold.cli._bench.data import Array, Bench, Share
from allfold_core.dtypes import DType, Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO, Kind, ReduceOp
from allfold_core.pricing.choose import check_wire
from allfold_core.schedules.registry import strategy_of


def _whole(share: Share) -> int:
    return share.count


def _block(share: Share) -> int:
    return share.block


def _same(_: int) -> float:
    """A link carries as many bytes as the size says."""
    return 1.0


def _without_own(world: int) -> float:
    """Every rank has its own block already."""
    return (world - 1) / world


def _twice_without_own(world: int) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * (world - 1) / world


@dataclass(frozen=True)
class BenchKind:
    """One collective: its call, its tensors and its expected result.

    Attributes:
        start: does it once, from a source to a target.
        source: the elements of the input.
        target: those of the output; ``None`` of an op in place.
        expected: the output of a rank; ``None`` where it gets none.
        bus_factor: busbw / algbw of so many ranks (nccl-tests' doc/PERFORMANCE.md).
        reduces: whether there is a reduce operation.
    """

    start: Callable[[allfold.Group, Bench, Array, Array], object]
    source: Callable[[Share], int]
    target: Callable[[Share], int] | None
    expected: Callable[[Share], Array | None]
    bus_factor: Callable[[int], float]
    reduces: bool = False


def _gather(group: allfold.Group, bench: Bench, source: Array, target: Array) -> None:
    group.gather(source, 0, target if group.rank == 0 else None, **bench.options)


def _scatter(group: allfold.Group, bench: Bench, source: Array, target: Array) -> None:
    group.scatter(target, source if group.rank == 0 else None, 0, **bench.options)


def _shift(group: allfold.Group, _: Bench, source: Array, target: Array) -> None:
    """Everybody sends to the next rank."""
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if after == group.rank:
        np.copyto(target, source)
        return
    sending = group.send(source, after, async_op=True)
    group.recv(target, before)
    sending.wait()


KINDS: dict[str, BenchKind] = {
    "all_reduce": BenchKind(
        start=lambda group, bench, x, _: group.all_reduce(x, bench.op, **bench.options),
        source=_whole,
        target=None,
        expected=lambda share: share.folded(),
        bus_factor=_twice_without_own,
        reduces=True,
    ),
    "reduce": BenchKind(
        start=lambda group, bench, x, _: group.reduce(x, 0, bench.op, **bench.options),
        source=_whole,
        target=None,
        expected=lambda share: share.folded() if share.is_root else None,
        bus_factor=_same,
        reduces=True,
    ),
    "broadcast": BenchKind(
        start=lambda group, bench, x, _: group.broadcast(x, 0, **bench.options),
        source=_whole,
        target=None,
        expected=lambda share: share.brought_by(0, share.count),
        bus_factor=_same,
    ),
    "all_gather": BenchKind(
        start=lambda group, bench, x, y: group.all_gather(x, y, **bench.options),
        source=_block,
        target=_whole,
        expected=lambda share: share.gathered(),
        bus_factor=_without_own,
    ),
    "reduce_scatter": BenchKind(
        start=lambda group, bench, x, y: group.reduce_scatter(x, y, bench.op, **bench.options),
        source=_whole,
        target=_block,
        expected=lambda share: share.own(share.folded()),
        bus_factor=_without_own,
        reduces=True,
    ),
    "gather": BenchKind(
        start=_gather,
        source=_block,
        target=_whole,
        expected=lambda share: share.gathered() if share.is_root else None,
        bus_factor=_without_own,
    ),
    "scatter": BenchKind(
        start=_scatter,
        source=_whole,
        target=_block,
        expected=lambda share: share.own(share.brought_by(0, share.count)),
        bus_factor=_without_own,
    ),
    "all_to_all": BenchKind(
        start=lambda group, bench, x, y: group.all_to_all(x, y, **bench.options),
        source=_whole,
        target=_whole,
        expected=lambda share: share.exchanged(),
        bus_factor=_without_own,
    ),
    "send_recv": BenchKind(
        start=_shift,
        source=_whole,
        target=_whole,
        expected=lambda share: share.brought_by((share.rank - 1) % share.world, share.count),
        bus_factor=_same,
    ),
}


_COLLECTIVES = {kind.label: kind for kind in Kind}
_OPS = {op.label: op for op in ReduceOp}


@dataclass(frozen=True)
class BenchSelection:
    """Everything that is to be measured: each kind of each type, by each operation."""

    kinds: Sequence[str]
    ops: Sequence[str]
    dtypes: Sequence[str]
    strategy: str
    wire: str

    def possible(self) -> list[tuple[str, str, str]]:
        """Return what can run, in the order of the table."""
        return [each for each in self._all() if self._refusal(*each) is None]

    def skipped(self) -> list[str]:
        """Return the reasons why the rest cannot run, each once."""
        reasons = (self._refusal(*each) for each in self._all())
        return list(dict.fromkeys(filter(None, reasons)))

    def benches(self, sizes: Sequence[int], world: int) -> Iterator[Bench]:
        """The lines of so many ranks; no tensor has less than an element per rank."""
        call: Options = {"strategy": self.strategy, "wire": self.wire}
        for kind, op, dtype in self.possible():
            for size in sizes:
                count = max(1, size // np.dtype(dtype).itemsize // world) * world
                yield Bench(kind, op, dtype, count, call if kind in _COLLECTIVES else {})

    def _all(self) -> Iterator[tuple[str, str, str]]:
        for kind in self.kinds:
            for dtype in self.dtypes:
                for op in self.ops if KINDS[kind].reduces else ("-",):
                    yield kind, op, dtype

    def _refusal(self, kind: str, op: str, dtype: str) -> str | None:
        """Return the reason for which ranks or agents would refuse it; ``None`` if it can run."""
        if kind not in _COLLECTIVES:
            return None if self.strategy == AUTO else f"{kind} has no strategies"
        return self._strategy_refusal(_COLLECTIVES[kind]) or self._type_refusal(op, dtype)

    def _strategy_refusal(self, kind: Kind) -> str | None:
        if self.strategy == AUTO:
            return None
        try:
            check_wire(kind, strategy_of(kind, self.strategy), Wire.from_label(self.wire))
        except InvalidArgument as error:
            return error.message
        return None

    def _type_refusal(self, op: str, dtype: str) -> str | None:
        given = kept = DType.from_label(dtype)
        if op in _OPS:
            kept = _OPS[op].accumulation_dtype(given)
            if refusal := _OPS[op].refusal(given):
                return refusal
        return Wire.from_label(self.wire).refusal(kept)


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """From size to size."""
    found = [smallest]
    while found[-1] * factor <= largest:
        found.append(found[-1] * factor)
    return found
