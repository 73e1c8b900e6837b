"""The inputs of the tests of schedules: strategies, roots and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from allfold_core.dtypes import NO_ALIAS, Alias
from allfold_core.operations import Kind
from allfold_core.schedules.registry import STRATEGIES, strategies_for
from allfold_core.schedules.schedule import Program, Send, Slice

FEW = 18
NAMES = ["uint16", "bits16", "float8_e4m3fn", "complex64", "[('é', '<i4')]", "x" * 64]
aliases = st.just(NO_ALIAS) | st.builds(Alias, st.sampled_from(NAMES), st.integers(0, 2**32 - 1))
PLAIN = [kind for kind in Kind if not kind.has_blocks]
BLOCKED = [kind for kind in Kind if kind.has_blocks]


def names_for(kind: Kind, *values: int) -> tuple[str, ...]:
    """The strategies of a kind, and further values of those that take a parameter."""
    names = strategies_for(kind)
    taking = [name for name in names if STRATEGIES[name].parameter]
    return (*names, *(f"{name}({value})" for name in taking for value in values))


def pairs_of(kinds: Sequence[Kind], *values: int) -> list[tuple[Kind, str]]:
    """Each kind with each of its strategies."""
    return [(kind, name) for kind in kinds for name in names_for(kind, *values)]


def labels_of(pairs: Sequence[tuple[Kind, str]]) -> list[str]:
    """Test ids."""
    return [f"{kind.label}-{name}" for kind, name in pairs]


def roots_of(kind: Kind, nodes: int) -> tuple[int, ...]:
    """Several roots of few nodes, one of many: another root is but another name of positions."""
    if not kind.has_root:
        return (-1,)
    return tuple(sorted({0, nodes // 2, nodes - 1})) if nodes < FEW else (2 * nodes // 3,)


def blocks_of(sizes: Sequence[int]) -> tuple[Slice, ...]:
    """Blocks of these sizes, one after the other."""
    return tuple(Slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def block_count(kind: Kind, nodes: int) -> int:
    return nodes * nodes if kind is Kind.ALL_TO_ALL else nodes


def bytes_sent(program: Program, itemsize: int = 4) -> int:
    """The payload that one node puts on the wire; signals have none."""
    return itemsize * sum(len(step.slice) for step in program if isinstance(step, Send))


# The sizes of `count` blocks. The first of "some empty" is empty.
SIZES: dict[str, Callable[[int], list[int]]] = {
    "all equal": lambda count: [3] * count,
    "unequal": lambda count: [1 + 7 * block % 5 for block in range(count)],
    "one huge": lambda count: [1 << 40 if block == count // 2 else 1 for block in range(count)],
    "some empty": lambda count: [7 * block % 3 for block in range(count)],
    "first alone": lambda count: [5] + [0] * (count - 1),
    "last alone": lambda count: [0] * (count - 1) + [5],
    "all empty": lambda count: [0] * count,
}
