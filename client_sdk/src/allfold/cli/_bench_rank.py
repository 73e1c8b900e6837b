"""One rank of ``allfold bench``. Needs NumPy alone, as the SDK does.

Sizes are those of nccl-tests: of the tensor for all-reduce, reduce and broadcast, of all blocks
together for the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

import allfold
from allfold._group import Options

KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
)
OPS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor")
DTYPES = (
    *("float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8"),
)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_WARM_UP = 2
_ITERATIONS = (3, 50)
_BYTES_PER_FIGURE = 64 << 20

_UNTOUCHED = 99
# Half a unit in the last place; of int8 half a step of 1/127.
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}

Array = np.ndarray[Any, Any]
Start = Callable[[Array, Array], object]


@dataclass(frozen=True)
class Bench:
    """One line of the table.

    Attributes:
        count: elements that ``size`` stands for; a multiple of the world size where the tensor
            consists of blocks.
    """

    kind: str
    op: str
    dtype: str
    count: int
    options: Options

    @property
    def size(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize

    def bus_factor(self, world: int) -> float:
        """busbw / algbw (nccl-tests' doc/PERFORMANCE.md)."""
        match self.kind:
            case "all_reduce":
                return 2 * (world - 1) / world
            case "all_gather" | "reduce_scatter" | "gather" | "scatter" | "all_to_all":
                return (world - 1) / world
        return 1.0


def values(bench: Bench, rank: int, count: int) -> Array:
    """What a rank brings: integers that every type folds exactly, on any number of ranks."""
    index = np.arange(count, dtype=np.int64)
    if bench.op == "product" and bench.kind in _REDUCING:
        return 1 + (index + rank) % (64 if rank == 0 else 1)
    return (index * 7 + rank * 3) % 4


_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def folded(bench: Bench, world: int) -> Array:
    """The reduction of what all ranks bring, in sequence."""
    total = values(bench, 0, bench.count)
    for rank in range(1, world):
        total = _FOLDS[bench.op](total, values(bench, rank, bench.count))
    if bench.op == "mean":
        wide = "float64" if bench.dtype == "float64" else "float32"
        mean: Array = np.divide(total.astype(wide), np.array(world, wide))
        return mean.astype(bench.dtype)
    return total.astype(bench.dtype)


@dataclass(frozen=True)
class Prepared:
    """The tensors of one line on one rank.

    Attributes:
        given: what the input is before an op.
        source: the input; the output too, of an op in place.
        target: where the result is.
        expected: what it must be; ``None`` for a rank that gets none.
        call: does the op once.
    """

    given: Array
    source: Array
    target: Array
    expected: Array | None
    call: Callable[[], object]

    def reset(self) -> None:
        """Undo an op."""
        self.target.fill(_UNTOUCHED)
        np.copyto(self.source, self.given)

    def count_wrong(self, tolerance: float) -> int:
        """Elements of the result that are further from the truth than ``tolerance`` allows.

        Args:
            tolerance: as a share of the greatest magnitude of the true result.
        """
        if self.expected is None or not len(self.expected):
            return 0
        if not tolerance:
            return int(np.count_nonzero(self.target != self.expected))
        truth = self.expected.astype(np.float64)
        distance = np.abs(self.target.astype(np.float64) - truth)
        return int(np.count_nonzero(~(distance <= tolerance * np.abs(truth).max())))


def prepare(bench: Bench, group: allfold.Group) -> Prepared:
    """Make the tensors of one line, in the arena, and the op on them."""
    rank, world, count, options = group.rank, group.world_size, bench.count, bench.options
    block = count // world
    own = slice(rank * block, (rank + 1) * block)

    def of(each: int, size: int) -> Array:
        return values(bench, each, size).astype(bench.dtype)

    def whole() -> Array:
        return np.concatenate([of(each, block) for each in range(world)])

    def made(given: Array, outputs: int | None, truth: Array | None, start: Start) -> Prepared:
        source = group.empty(len(given), bench.dtype)
        target = source if outputs is None else group.empty(outputs, bench.dtype)
        return Prepared(given, source, target, truth, lambda: start(source, target))

    truth: Array | None
    match bench.kind:
        case "all_reduce":
            truth = folded(bench, world)
            return made(
                of(rank, count), None, truth, lambda x, _: group.all_reduce(x, bench.op, **options)
            )
        case "reduce":
            truth = folded(bench, world) if rank == 0 else None
            return made(
                of(rank, count), None, truth, lambda x, _: group.reduce(x, 0, bench.op, **options)
            )
        case "broadcast":
            return made(
                of(rank, count), None, of(0, count), lambda x, _: group.broadcast(x, 0, **options)
            )
        case "all_gather":
            return made(
                of(rank, block), count, whole(), lambda x, y: group.all_gather(x, y, **options)
            )
        case "gather":
            root = rank == 0
            return made(
                of(rank, block),
                count,
                whole() if root else None,
                lambda x, y: group.gather(x, 0, y if root else None, **options),
            )
        case "reduce_scatter":
            truth = folded(bench, world)[own]
            return made(
                of(rank, count),
                block,
                truth,
                lambda x, y: group.reduce_scatter(x, y, bench.op, **options),
            )
        case "scatter":
            root = rank == 0
            return made(
                of(rank, count),
                block,
                of(0, count)[own],
                lambda x, y: group.scatter(y, x if root else None, 0, **options),
            )
        case "all_to_all":
            truth = np.concatenate([of(each, count)[own] for each in range(world)])
            return made(
                of(rank, count), count, truth, lambda x, y: group.all_to_all(x, y, **options)
            )
    return made(of(rank, count), count, of((rank - 1) % world, count), _shift(group))


def _shift(group: allfold.Group) -> Start:
    """Everybody sends to the next rank."""
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size

    def start(source: Array, target: Array) -> None:
        if after == group.rank:
            np.copyto(target, source)
            return
        sending = group.send(source, after, async_op=True)
        group.recv(target, before)
        sending.wait()

    return start


def measure(bench: Bench, prepared: Prepared, group: allfold.Group, iterations: int) -> float:
    """Seconds per op of the slowest rank; the ops run back to back."""
    fewest, most = _ITERATIONS
    count = iterations or max(fewest, min(most, _BYTES_PER_FIGURE // max(1, bench.size)))
    for _ in range(_WARM_UP):
        prepared.call()
    group.barrier()
    began = perf_counter()
    for _ in range(count):
        prepared.call()
    took = np.array([(perf_counter() - began) / count])
    group.all_reduce(took, "max")
    return float(took[0])


def tolerance(wire: str, nodes: int) -> float:
    """The most that a lossy wire may change, as a share of the greatest magnitude.

    One rounding per node that a value passes, and one for the result.
    """
    return _ROUNDING.get(wire, 0.0) * (nodes + 1)


def check(prepared: Prepared, group: allfold.Group, allowed: float) -> int:
    """Do the op once; how many elements are wrong, over all ranks."""
    prepared.reset()
    group.barrier()
    prepared.call()
    wrong = np.array([prepared.count_wrong(allowed)])
    group.all_reduce(wrong)
    return int(wrong[0])


def lines(options: argparse.Namespace, world: int) -> Iterator[Bench]:
    """What is to be measured, in the order of the table."""
    call: Options = {"strategy": options.strategy, "wire": options.wire}
    for kind in options.kind:
        reduces = kind in _REDUCING
        for dtype in options.dtype:
            for op in options.op if reduces else ("-",):
                if op != "-" and not _is_defined(op, dtype):
                    continue
                size = options.min_bytes
                while size <= options.max_bytes:
                    count = max(1, size // np.dtype(dtype).itemsize // world) * world
                    yield Bench(kind, op, dtype, count, {} if kind == "send_recv" else call)
                    size *= options.factor


def _is_defined(op: str, dtype: str) -> bool:
    is_float = dtype.startswith("float")
    return is_float if op == "mean" else not (is_float and op in ("band", "bor", "bxor"))


def main() -> None:
    """Measure and print; status 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--op", "--dtype"):
        parser.add_argument(name, action="append")
    for name in ("--min-bytes", "--max-bytes", "--factor", "--iterations"):
        parser.add_argument(name, type=int)
    for name in ("--strategy", "--wire"):
        parser.add_argument(name)
    options = parser.parse_args()
    group = allfold.init()
    if group.rank == 0:
        where = f"{group.world_size} ranks on {group.nodes} nodes"
        _print(f"# {where}; strategy {options.strategy}, wire {options.wire}")
        _print("# size in bytes, time in us, algbw and busbw in GB/s")
        _print(_ROW.format(*_HEAD))
    allowed = tolerance(options.wire, group.nodes)
    total = 0
    for bench in lines(options, group.world_size):
        prepared = prepare(bench, group)
        wrong = check(prepared, group, allowed)
        seconds = measure(bench, prepared, group, options.iterations)
        wrong += check(prepared, group, allowed)
        total += wrong
        if group.rank == 0:
            _print(_row(bench, group.world_size, seconds, wrong))
    allfold.shutdown()
    sys.exit(1 if total else 0)


_HEAD = ("kind", "size", "count", "type", "op", "time", "algbw", "busbw", "#wrong")
_ROW = "{:>14} {:>12} {:>12} {:>8} {:>8} {:>10} {:>8} {:>8} {:>7}"


def _row(bench: Bench, world: int, seconds: float, wrong: int) -> str:
    algbw = bench.size / seconds / 1e9
    busbw = algbw * bench.bus_factor(world)
    head = (bench.kind, bench.size, bench.count, bench.dtype, bench.op)
    return _ROW.format(*head, f"{seconds * 1e6:.1f}", f"{algbw:.3f}", f"{busbw:.3f}", wrong)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
