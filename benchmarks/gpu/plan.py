"""What is measured and checked: parts, settings, sizes and calls, as pure data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp
from benchmarks.plan import KIB, MIB, Shape

COPY, CHECK, KERNEL, BANDWIDTH = "copy", "check", "kernel", "bandwidth"
LATENCY, SWEEP, PEERS = "latency", "sweep", "peers"
PARTS = (COPY, CHECK, BANDWIDTH, KERNEL, LATENCY, SWEEP, PEERS)
"""In the order in which they are done; the peers take their turns in latency and sweep."""

CPU, AUTO = "cpu", "auto"
PATHS = ("ipc", "pinned", "host")
ARENA, PLAIN = "arena", "plain"
GLOO, GLOO_HOST = "gloo", "gloo_host"
OURS = (ARENA, PLAIN)
OTHERS = (GLOO, GLOO_HOST)

GIB = 1 << 30
COMMIT = "COMMIT"
"""In a packed folder, the file that says of which commit it was made."""
LATENCY_BYTES = 4 * KIB
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
QUICK_SIZES = (4 * KIB, MIB, 64 * MIB)
TARGET = 0.75
"""Of the speed of a plain copy on the card: what a large all-reduce is to reach."""
GRIDS = (0, 1, 2, 4, 8, 16, 32)
"""Blocks per multiprocessor; 0 is the agent's own choice."""

# Elements: less than a vector, no multiple of one, and several pieces of an exchange.
_SHORT, _USUAL, _LONG = 3, 1003, 800_003
_QUICK_DTYPES = ("float32", "bfloat16", "int32", "bool")
_QUICK_OPS = ("sum", "mean", "max")
_COMPLEX = ("complex64", "complex128")
_MOVED = ("float32", "bfloat16", "uint8")
# A tensor, its replacement, the arena's copy of a plain one, and what a check takes.
_TENSORS_OF_A_RANK = 4.5


@dataclass(frozen=True)
class Setting:
    """One group: how many agents and ranks there are, and where the ranks' tensors are.

    Attributes:
        ways: for each rank a path of its GPU's tensors, ``"auto"``, or ``"cpu"`` for others.
    """

    shape: Shape
    ways: tuple[str, ...]

    @classmethod
    def alike(cls, shape: Shape, way: str) -> Setting:
        return cls(shape, (way,) * shape.world)

    @property
    def is_mixed(self) -> bool:
        return len(set(self.ways)) > 1

    def __str__(self) -> str:
        return f"{self.shape} {'+'.join(self.ways) if self.is_mixed else self.ways[0]}"


@dataclass(frozen=True)
class Call:
    """One collective that is checked.

    Attributes:
        op: the reduction, or ``"-"``.
        blocks: elements of each rank's block; of an all-to-all, of each pair's, by source and then
            by destination; of other kinds, of the tensor.
        memory: ``arena``; ``plain``; ``offset``, a part of an arena tensor at an odd address;
            ``strided``, every second element; ``array``, the arena's array for other libraries.
        late: the GPU is still busy when the call is made, and the call is asynchronous.
    """

    kind: str
    dtype: str
    blocks: tuple[int, ...]
    op: str = "-"
    memory: str = ARENA
    root: int = 0
    late: bool = False

    @property
    def is_even(self) -> bool:
        return len(set(self.blocks)) == 1

    def __str__(self) -> str:
        op = "" if self.op == "-" else f"{self.op}, "
        late = ", late" if self.late else ""
        shape = "+".join(map(str, self.blocks))
        return f"{self.kind}({op}{self.dtype}[{shape}], {self.memory}{late})"


def shapes(ranks: Sequence[int], agents: Sequence[int]) -> list[Shape]:
    """Every number of ranks on every number of agents that it can be split over."""
    return [
        Shape(nodes, world // nodes)
        for world in ranks
        for nodes in agents
        if world >= nodes and world % nodes == 0
    ]


def settings(found: Sequence[Shape], paths: Sequence[str]) -> list[Setting]:
    """What is checked of shapes: every path, and mixtures of the paths and the host."""
    chosen = [Setting.alike(shape, path) for path in paths for shape in found]
    if CPU not in paths:
        mixtures = ((paths[0], CPU), (*paths, CPU))
        chosen += [
            Setting(shape, tuple(islice(cycle(some), shape.world)))
            for shape in found
            for some in mixtures
        ]
    return list(dict.fromkeys(chosen))


def calls(world: int, *, quick: bool) -> list[Call]:
    """What is checked of one setting; the same on every rank, in the same order."""
    found = [*_reductions(quick), *_sizes(), *_moves(world, quick), *_blocked(world, quick)]
    return list(dict.fromkeys(found))


def folds(quick: bool) -> Iterator[tuple[str, str]]:
    """Every dtype with every reduction that it has."""
    for dtype in DType:
        for op in ReduceOp:
            chosen = dtype.label in _QUICK_DTYPES and op.label in _QUICK_OPS
            if not op.refusal(dtype) and (chosen or not quick):
                yield dtype.label, op.label
    for dtype_label in _COMPLEX[: 1 if quick else 2]:
        yield dtype_label, "sum"
        yield dtype_label, "mean"


def _reductions(quick: bool) -> Iterator[Call]:
    for (dtype, op), memory in zip(folds(quick), cycle((ARENA, PLAIN, "offset")), strict=False):
        yield Call("all_reduce", dtype, (_USUAL,), op, memory)


def _sizes() -> Iterator[Call]:
    for memory in (ARENA, PLAIN, "offset", "strided", "array"):
        for count in (1, _SHORT, _LONG):
            yield Call("all_reduce", "float32", (count,), "sum", memory)
    for memory in (ARENA, PLAIN):
        yield Call("all_reduce", "bfloat16", (_LONG,), "sum", memory)
        yield Call("all_reduce", "float32", (_LONG,), "sum", memory, late=True)


def _moves(world: int, quick: bool) -> Iterator[Call]:
    last = world - 1
    for dtype in _MOVED[: 2 if quick else 3]:
        for memory in (ARENA, PLAIN, "offset"):
            yield Call("reduce", dtype, (_USUAL,), "sum", memory, root=last)
            yield Call("broadcast", dtype, (_USUAL,), memory=memory, root=last)
            yield Call("send_recv", dtype, (_USUAL,), memory=memory)
    for late in (False, True):
        yield Call("broadcast", "float32", (_LONG,), root=0, late=late)
        yield Call("send_recv", "float32", (_LONG,), memory=PLAIN, late=late)


def _blocked(world: int, quick: bool) -> Iterator[Call]:
    even = (_USUAL,) * world
    uneven = tuple(_USUAL * index + index % 2 for index in range(world))  # the first has nothing
    pairs = tuple(97 * ((i + 2 * j) % 3) for i in range(world) for j in range(world))
    equal_pairs = (251,) * (world * world)
    for dtype in _MOVED[: 2 if quick else 3]:
        for memory in (ARENA, PLAIN):
            for blocks in (even, uneven):
                yield Call("all_gather", dtype, blocks, memory=memory)
                yield Call("gather", dtype, blocks, memory=memory, root=world - 1)
                yield Call("scatter", dtype, blocks, memory=memory, root=world - 1)
                yield Call("reduce_scatter", dtype, blocks, "sum", memory)
            for blocks in (equal_pairs, pairs):
                yield Call("all_to_all", dtype, blocks, memory=memory)
    long = (_LONG // world,) * world
    for kind in ("all_gather", "reduce_scatter"):
        op = "sum" if kind == "reduce_scatter" else "-"
        yield Call(kind, "float32", long, op, PLAIN, late=True)


# Bytes


def copy_bytes(size: int) -> int:
    """What a plain copy of a tensor moves: each byte is read once and written once."""
    return 2 * size


def fold_bytes(size: int, ranks: int) -> int:
    """What an all-reduce on one card must move at least: every rank's tensor in and out."""
    return 2 * size * ranks


def largest_size(free: int, ranks: int) -> int:
    """Bytes of the largest tensor per rank for which so much free memory is enough."""
    return int(free / (_TENSORS_OF_A_RANK * ranks))
