"""A burst of 64 small all-reduces, in a row or all in flight at once, as one op."""

from __future__ import annotations

from collections.abc import Sequence

from allfold._calls.options import Options
from allfold.cli._bench.data import Bench
from benchmarks.data import RandomShare
from benchmarks.devices import Device, Operation, Tensor
from benchmarks.libraries import Library
from benchmarks.plan import BURST

TENSORS, TENSOR_BYTES = 64, 16 << 10
_AT_ONCE = " async"


class BurstWorkload:
    """Each library has two turns: sync, and (``... async``) all in flight and then waited for."""

    def __init__(
        self, libraries: Sequence[Library], device: Device, rank: int, nodes: int, world: int
    ) -> None:
        self._device = device
        libraries = [library for library in libraries if library.supports(BURST)]
        count = TENSORS * TENSOR_BYTES // 4
        self._share = RandomShare(Bench(BURST, "sum", "float32", count, Options()), rank, world)
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

    def operation(self, contestant: str) -> Operation:
        do = self._at_once if contestant.endswith(_AT_ONCE) else self._in_a_row
        name = contestant.removesuffix(_AT_ONCE)
        return self._device.finished(lambda: do(name))

    def write(self, contestant: str, _op: int, /) -> None:
        tensors = self._tensors[contestant.removesuffix(_AT_ONCE)]
        self._device.write(tensors, self._given.reshape(tensors.shape))

    def keep(self, _contestant: str, _op: int, /) -> None:
        """A turn has one burst: its result stays where it is."""

    def count_wrong(self, contestant: str, _ops: int, /) -> int:
        name = contestant.removesuffix(_AT_ONCE)
        allowed = self._share.tolerance(self._nodes, self._libraries[name].wire)
        return self._device.count_wrong(self._tensors[name].reshape(-1), self._expected, allowed)

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
