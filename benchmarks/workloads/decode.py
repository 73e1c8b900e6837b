"""One token of tensor-parallel decoding: 64 small all-reduces, in a row or all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allfold._options import Options
from allfold.cli._bench_data import Array, Bench
from benchmarks.data import RandomShare, count_wrong
from benchmarks.libraries import Library
from benchmarks.plan import DECODE

TENSORS, TENSOR_BYTES = 64, 16 << 10
_AT_ONCE = " async"


class DecodeWorkload:
    """Each library has two turns: sync, and (``... async``) all in flight and then waited for."""

    def __init__(self, libraries: Sequence[Library], rank: int, nodes: int, world: int) -> None:
        count = TENSORS * TENSOR_BYTES // 4
        self._share = RandomShare(Bench(DECODE, "sum", "float32", count, Options()), rank, world)
        self._nodes = nodes
        self._given, self._expected = self._share.brought_by(rank, count), self._share.folded()
        self._libraries = {library.name: library for library in libraries}
        self._tensors = {library.name: _tensors(library, count) for library in libraries}
        one = Bench("all_reduce", "sum", "float32", TENSOR_BYTES // 4, Options())
        self._operations = {
            library.name: [library.operation(one, row, row) for row in self._tensors[library.name]]
            for library in libraries
        }
        self.contestants = [name + how for name in self._libraries for how in ("", _AT_ONCE)]

    def reset(self, contestant: str) -> None:
        tensors = self._tensors[contestant.removesuffix(_AT_ONCE)]
        np.copyto(tensors, self._given.reshape(tensors.shape))

    def run(self, contestant: str, ops: int) -> None:
        name = contestant.removesuffix(_AT_ONCE)
        for _ in range(ops):
            if contestant.endswith(_AT_ONCE):
                self._at_once(name)
            else:
                for operation in self._operations[name]:
                    operation()

    def count_wrong(self, contestant: str, ops: int) -> int:
        name = contestant.removesuffix(_AT_ONCE)
        allowed = self._share.tolerance(self._nodes, ops, self._libraries[name].wire)
        result = self._tensors[name].reshape(-1)
        return count_wrong(result, self._expected, self._share.growth(ops), allowed)

    def _at_once(self, name: str) -> None:
        library = self._libraries[name]
        handles = [library.start_all_reduce(row) for row in self._tensors[name]]
        for handle in handles:
            handle.wait()


def _tensors(library: Library, count: int) -> Array:
    memory = library.empty(count)
    if memory is None:
        memory = np.empty(count, np.float32)
    return memory.reshape(TENSORS, -1)
