"""One rank of ``allfold bench``. Needs NumPy alone, as the SDK does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

import allfold
from allfold.cli._bench.data import Array, Bench, Share
from allfold.cli._bench.kinds import KINDS, BenchSelection, sizes
from allfold_core.dtypes import Wire
from allfold_core.verdict import counted

# More than what is moved ever is.
_UNTOUCHED = 99
_WARM_UP = 2
_ITERATIONS = (3, 50)
_BYTES_PER_FIGURE = 64 << 20

_HEAD = ("kind", "size", "count", "type", "op", "time", "algbw", "busbw", "#wrong")
_ROW = "{:>14} {:>12} {:>12} {:>8} {:>8} {:>10} {:>8} {:>8} {:>7}"


@dataclass(frozen=True)
class PreparedBench:
    """The tensors of one line on one rank.

    Attributes:
        given: what the input is before an op.
        source: the input; the output too, of an op in place.
        target: where the result is.
        expected: what it must be; ``None`` for a rank that gets none.
        tolerance: how far each element may be from that.
        call: does the op once.
    """

    given: Array
    source: Array
    target: Array
    expected: Array | None
    tolerance: float
    call: Callable[[], object]

    def reset(self) -> None:
        """Undo an op."""
        self.target.fill(_UNTOUCHED)
        np.copyto(self.source, self.given)

    def count_wrong(self) -> int:
        """Elements of the result that are further from the truth than they may be."""
        if self.expected is None:
            return 0
        if not self.tolerance:
            return int(np.count_nonzero(self.target != self.expected))
        distance = np.abs(self.target.astype(np.float64) - self.expected.astype(np.float64))
        return int(np.count_nonzero(~(distance <= self.tolerance)))


def prepare(bench: Bench, group: allfold.Group) -> PreparedBench:
    """Make the tensors of one line, in the arena, and the op on them."""
    kind, share = KINDS[bench.kind], Share(bench, group.rank, group.world_size)
    given = share.brought_by(group.rank, kind.source(share))
    source = group.empty(len(given), bench.dtype)
    target = source if kind.target is None else group.empty(kind.target(share), bench.dtype)

    def call() -> object:
        return kind.start(group, bench, source, target)

    expected, allowed = kind.expected(share), tolerance(share, group.nodes)
    return PreparedBench(given, source, target, expected, allowed, call)


def measure(bench: Bench, prepared: PreparedBench, group: allfold.Group, iterations: int) -> float:
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


def tolerance(share: Share, nodes: int) -> float:
    """The most that a lossy wire may change an element.

    One rounding per node that a value passes, and one for the result; each costs a share of the
    greatest magnitude, which may be that of another element of a block.
    """
    roundings = nodes + 1
    if share.bench.op == "product":
        roundings *= 2  # other ranks' marks may double what a rounding has cost
    wire = Wire.from_label(share.bench.options.get("wire") or Wire.NATIVE.label)
    return wire.rounding * roundings * share.greatest


def check(prepared: PreparedBench, group: allfold.Group) -> int:
    """Do the op once; how many elements are wrong, over all ranks."""
    prepared.reset()
    group.barrier()
    prepared.call()
    wrong = np.array([prepared.count_wrong()])
    group.all_reduce(wrong)
    return int(wrong[0])


def main() -> None:
    """Measure and print; status 1 if anything was wrong."""
    options = _options()
    wanted = BenchSelection(options.kind, options.op, options.dtype, options.strategy, options.wire)
    steps = sizes(options.min_bytes, options.max_bytes, options.factor)
    group = allfold.init()
    if group.rank == 0:
        _print_head(group, wanted)
    benches = wanted.benches(steps, group.world_size)
    wrong = sum(run(bench, group, options.iterations) for bench in benches)
    allfold.shutdown()
    sys.exit(1 if wrong else 0)


def run(bench: Bench, group: allfold.Group, iterations: int) -> int:
    """Measure and print one line; how many elements were wrong, before and after."""
    prepared = prepare(bench, group)
    wrong = check(prepared, group)
    seconds = measure(bench, prepared, group, iterations)
    wrong += check(prepared, group)
    if group.rank == 0:
        _print(_row(bench, group.world_size, seconds, wrong))
    return wrong


def _options() -> argparse.Namespace:
    """Parse the options of ``allfold bench``, which passes all of them on."""
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--op", "--dtype"):
        parser.add_argument(name, action="append")
    for name in ("--min-bytes", "--max-bytes", "--factor", "--iterations"):
        parser.add_argument(name, type=int)
    for name in ("--strategy", "--wire"):
        parser.add_argument(name)
    return parser.parse_args()


def _print_head(group: allfold.Group, wanted: BenchSelection) -> None:
    where = f"{counted(group.world_size, 'rank')} on {counted(group.nodes, 'node')}"
    _print(f"# {where}; strategy {wanted.strategy}, wire {wanted.wire}")
    for reason in wanted.skipped():
        _print(f"# skipped: {reason}")
    _print("# size in bytes, time in us, algbw and busbw in GB/s")
    _print(_ROW.format(*_HEAD))


def _row(bench: Bench, world: int, seconds: float, wrong: int) -> str:
    algbw = bench.size / seconds / 1e9
    busbw = algbw * KINDS[bench.kind].bus_factor(world)
    head = (bench.kind, bench.size, bench.count, bench.dtype, bench.op)
    return _ROW.format(*head, f"{seconds * 1e6:.1f}", f"{algbw:.3f}", f"{busbw:.3f}", wrong)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
