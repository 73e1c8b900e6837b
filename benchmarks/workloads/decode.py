"""One token of tensor-parallel decoding: 64 small all-reduces, in a row or all at once."""

from __future__ import annotations

from collections.abc import Sequence

from allfold._options import Options
from allfold.cli._bench.data import Bench
from benchmarks.data import RandomShare
from benchmarks.devices import Device, Tensor
from benchmarks.libraries import Library
from benchmarks.plan import DECODE
from benchmarks.workloads import timed

TENSORS, TENSOR_BYTES = 64, 16 << 10
_AT_ONCE = " async"


class DecodeWorkload:
    """Each library has two turns: sync, and (``... async``) all in flight and then waited for."""

    def __init__(
        self, libraries: Sequence[Library], device: Device, rank: int, nodes: int, world: int
    ) -> None:
        self._device = device
        libraries = [library for library in libraries if library.supports(DECODE)]
        count = TENSORS * TENSOR_BYTES // 4
        self._share = RandomShare(Bench(DECODE, "sum", "float32", count, Options()), rank, world)
        self._nodes = nodes
        self._given = device.keep(self._share.brought_by(rank, count))
        self._expected = device.keep(self._share.folded())
        self._libraries = {library.name: library for library in libraries}
        self._tensors = {library.name: _tensors(library, device, count) for library in libraries}
        one = Bench("all_reduce", "sum", "float32", TENSOR_BYTES // 4, Options())
        self._operations = {
            library.name: [library.operation(one, row, row) for row in self._tensors[library.name]]
            for library in libraries
        }
        self.contestants = [name + how for name in self._libraries for how in ("", _AT_ONCE)]

    def reset(self, contestant: str) -> None:
        tensors = self._tensors[contestant.removesuffix(_AT_ONCE)]
        self._device.write(tensors, self._given.reshape(tensors.shape))

    def run(self, contestant: str, ops: int) -> list[float]:
        do = self._at_once if contestant.endswith(_AT_ONCE) else self._in_a_row
        name = contestant.removesuffix(_AT_ONCE)
        return timed(self._device.finished(lambda: do(name)), ops)

    def count_wrong(self, contestant: str, ops: int) -> int:
        name = contestant.removesuffix(_AT_ONCE)
        allowed = self._share.tolerance(self._nodes, ops, self._libraries[name].wire)
        result = self._tensors[name].reshape(-1)
        growth = self._share.growth(ops)
        return self._device.count_wrong(result, self._expected, growth, allowed)

    def _in_a_row(self, name: str) -> None:
        for operation in self._operations[name]:
            operation()

    def _at_once(self, name: str) -> None:
        library = self._libraries[name]
        handles = [library.start_all_reduce(row) for row in self._tensors[name]]
        for handle in handles:
            handle.wait()


def _tensors(library: Library, device: Device, count: int) -> Tensor:
    memory = library.empty(count)
    if memory is None:
        memory = device.empty(count)
    return memory.reshape(TENSORS, -1)
