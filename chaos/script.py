"""The ops of a group's life. Every rank derives them from the seed alone, so all call the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

WORLD, HALF = "world", "half"
"""The groups of an op: all seats; or the half of a seat, which are those of even or odd numbers."""

FOLDED = ("all_reduce", "reduce_scatter")
CONTROL = "control"
"""An all-reduce that tells all ranks alike whether this was the last op."""

_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "shift")
_WEIGHTS = (8, 3, 3, 3, 1, 3)
_DTYPES = ("float32", "float64", "int32", "int64")
_STRATEGIES = ("auto", "auto", "ring", "tree(2)", "halving_doubling")
_BURSTS_PER_CONTROL = 12
_OPS_PER_CONTROL = 24
_ALONE, _HALF = 0.6, 0.15
_LARGEST_BURST = 8
# Binary digits of the number of elements. Of kinds with a block per rank, those of a block.
_DIGITS, _BLOCK_DIGITS = 18, 13


@dataclass(frozen=True)
class Op:
    """One op of the script.

    Attributes:
        number: of the op in the script.
        kind: ``shift`` sends to the next rank and receives from the one before.
        numel: elements of the tensor, or of each rank's block.
        root: of a broadcast, as a fraction of the world.
    """

    number: int
    group: str
    kind: str
    numel: int
    dtype: str
    root: float
    strategy: str


@dataclass(frozen=True)
class Burst:
    """Ops in flight together; one that is ``sync`` is alone, and waited for inside the call."""

    ops: tuple[Op, ...]
    sync: bool


def bursts(seed: int) -> Iterator[Burst]:
    """Yield the ops of a life, without end; now and then comes a control op, alone."""
    number = 0
    for index in count(1):
        random = Random(f"{seed}/{index}")
        if index % _BURSTS_PER_CONTROL == 0:
            yield Burst((Op(number, WORLD, CONTROL, 1, "int64", 0.0, "auto"),), sync=False)
            number += 1
            continue
        size = 1 if random.random() < _ALONE else random.randint(2, _LARGEST_BURST)
        ops = tuple(_op(number + position, random) for position in range(size))
        yield Burst(ops, sync=size == 1 and random.random() < 0.5)
        number += size


def op_at(seed: int, number: int) -> Op:
    """Return the collective that has a number in an elastic group.

    It follows from the number alone, which is all that those who join know of what has been. So
    its root is the same in groups of every size.
    """
    if number % _OPS_PER_CONTROL == 0:
        return Op(number, WORLD, CONTROL, 1, "int64", 0.0, "auto")
    op = _op(number, Random(f"{seed}/{number}"))
    kind = "all_reduce" if op.kind == "shift" else op.kind
    return replace(op, group=WORLD, kind=kind, root=0.0)


def shift_after(number: int) -> Op:
    """Return the messages to the next rank that follow on an op."""
    return Op(number, WORLD, "shift", 1 + number % 1000, "int64", 0.0, "auto")


def _op(number: int, random: Random) -> Op:
    kind = random.choices(_KINDS, _WEIGHTS)[0]
    blocks = kind in ("reduce_scatter", "all_gather")
    digits = random.uniform(0, _BLOCK_DIGITS if blocks else _DIGITS)
    return Op(
        number,
        HALF if random.random() < _HALF else WORLD,
        kind,
        max(1, int(2**digits)),
        random.choice(_DTYPES),
        random.random(),
        random.choice(_STRATEGIES) if kind == "all_reduce" else "auto",
    )


def group_of(op: Op, seat: int) -> str:
    """Return the name of the group in which a seat calls an op."""
    if op.group == WORLD:
        return WORLD
    return ("even", "odd")[seat % 2]
