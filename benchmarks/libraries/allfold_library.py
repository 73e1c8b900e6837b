"""Allfold itself, through its own functions."""

from __future__ import annotations

from dataclasses import replace

import allfold
from allfold._calls.options import Options
from allfold.cli._bench.data import Bench
from allfold.cli._bench.kinds import KINDS
from benchmarks.devices import Device, Operation, Tensor
from benchmarks.libraries import Handle
from benchmarks.plan import BARRIER, BURST, DECODE, OURS


class AllfoldLibrary:
    """``allfold`` on tensors of the arena, ``plain`` on ordinary ones, ``allfold:int8`` etc."""

    def __init__(self, name: str, group: allfold.Group, device: Device) -> None:
        self.name = name
        self.wire = name.partition(":")[2] or "native"
        self._group = group
        self._device = device
        self._arena = name.startswith(OURS)

    def supports(self, kind: str, /) -> bool:
        """Only reductions have a wire, and without tensors there is one way only."""
        if kind == BARRIER:
            return self.name == OURS
        return self.wire == "native" or kind in (BURST, DECODE) or KINDS[kind].reduces

    def empty(self, count: int, /) -> Tensor | None:
        return self._device.in_arena(self._group, count) if self._arena else None

    def operation(self, bench: Bench, source: Tensor, target: Tensor) -> Operation:
        kind, group = KINDS[bench.kind], self._group
        # Only reductions have a wire.
        options = Options(wire=self.wire) if kind.reduces else Options()
        ours = replace(bench, options=options)
        return lambda: kind.start(group, ours, source, target)

    def barrier(self) -> Operation:
        return self._group.barrier

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        handle: Handle = self._group.all_reduce(tensor, "sum", wire=self.wire, async_op=True)
        return handle

    def close(self) -> None:
        """Nothing: several share the group, see the rank."""
