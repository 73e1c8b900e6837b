"""The lines of ``allfold bench``: those that can run, and reasons why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from allfold._options import Options
from allfold.cli._bench.data import Bench
from allfold.cli._bench.kinds import KINDS
from allfold_core.dtypes import DType, Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO, Kind, ReduceOp
from allfold_core.pricing.choose import check_slices
from allfold_core.schedules.registry import strategy_of

_COLLECTIVES = {kind.label: kind for kind in Kind}
_OPS = {op.label: op for op in ReduceOp}


@dataclass(frozen=True)
class Wanted:
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
            check_slices(strategy_of(kind, self.strategy), Wire.from_label(self.wire))
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
