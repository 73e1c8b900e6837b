"""Allfold itself, through its own functions."""

from __future__ import annotations

from dataclasses import replace

import allfold
from allfold._options import Options
from allfold.cli._bench_data import Array, Bench
from allfold.cli._bench_kinds import KINDS
from benchmarks.libraries import Handle, Operation
from benchmarks.plan import OURS


class AllfoldLibrary:
    """``allfold`` on tensors of the arena, ``plain`` on ordinary ones, ``allfold:int8`` etc."""

    def __init__(self, name: str, group: allfold.Group) -> None:
        self.name = name
        self.wire = name.partition(":")[2] or "native"
        self._group = group
        self._arena = name.startswith(OURS)

    def empty(self, count: int, /) -> Array | None:
        if not self._arena:
            return None
        tensor: Array = self._group.empty(count, "float32")
        return tensor

    def operation(self, bench: Bench, source: Array, target: Array) -> Operation:
        kind, group = KINDS[bench.kind], self._group
        # Only reductions have a wire.
        options = Options(wire=self.wire) if kind.reduces else Options()
        ours = replace(bench, options=options)
        return lambda: kind.start(group, ours, source, target)

    def barrier(self) -> Operation:
        return self._group.barrier

    def start_all_reduce(self, tensor: Array) -> Handle:
        handle: Handle = self._group.all_reduce(tensor, "sum", wire=self.wire, async_op=True)
        return handle

    def close(self) -> None:
        """Nothing: several share the group, see the rank."""
