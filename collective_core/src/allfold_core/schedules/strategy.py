"""A strategy: one way to run collectives between nodes, with all that there is to know about it.

A strategy is one module of :mod:`allfold_core.schedules.strategies`, which ends with its
:class:`Strategy`, and one line of :mod:`allfold_core.schedules.registry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from allfold_core.operations import AUTO, MAX_STRATEGY_LABEL, Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.schedule import Slice, Step

_NAME = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """One op as a strategy sees it, with *positions* 0..nodes-1 in place of nodes.

    Attributes:
        kind: the collective; a barrier for every op without elements.
        nodes: how many there are, 2 or more.
        numel: elements of the tensor or of all blocks; 0 for a barrier.
        blocks: for kinds that have them, the block of each position; for an all-to-all that of each
            pair of positions, by source and then by destination.
        parameter: the number in the strategy's name, as the 4 of ``tree(4)``; 0 without one.
    """

    kind: Kind
    nodes: int
    numel: int
    blocks: tuple[Slice, ...] = ()
    parameter: int = 0

    @property
    def whole(self) -> Slice:
        """The slice of all elements."""
        return Slice(0, self.numel)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The whole number that a strategy takes, as in ``tree(4)``.

    Attributes:
        name: what error messages call it.
        symbol: what formulas call it.
        default: its value where the name is given without one.
        least: the smallest value; there is no greatest one.
        alternatives: the values that ``auto`` tries beside the default.
    """

    name: str
    symbol: str
    default: int
    least: int = 1
    alternatives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """The documentation of a strategy, in Markdown.

    Attributes:
        summary: what an all-reduce (or the first kind that it serves) does, in half a sentence.
        steps: how many messages wait for one another.
        sent: the bytes that the busiest node sends.
        seconds: the closed form for one message per slice.
        auto_for: what ``auto`` takes the strategy for.
    """

    summary: str
    steps: str
    sent: str
    seconds: str
    auto_for: str


def no_senders(_kind: Kind, _nodes: int) -> int:
    """Nodes that send to the same one at once, in a strategy in which they take turns."""
    return 0


def in_tree_order(nodes: int, _parameter: int) -> Sequence[int]:
    """Positions in the order of the tree: the root, or the hub, is position 0."""
    return range(nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """One way to run collectives; there is one object of each.

    Attributes:
        name: lower-case letters, digits and underscores.
        kinds: the collectives that it serves. :attr:`compile` must make a barrier in any case,
            because an op without elements is one.
        compile: yields the steps of the position ``me``, for ``(problem, me)``. Pure.
        predict: the closed form: seconds of an op of two nodes or more. Pure. A barrier stands
            for every op without bytes.
        description: the sentences and formulas of the documentation.
        parameter: the number that it takes, if it does.
        positions: for each position, its index in the order of the tree (``Plan.tree_order``, with
            the root first), for ``(nodes, parameter)``. ``None``: every node plays the position of
            its own index, which is the order of the ring.
        joins_slices: results travel in other slices than those in which they were folded, so a
            wire format that rounds by blocks would round them differently from rank to rank.
        senders: how many nodes send to the same one at the same time, for ``(kind, nodes)``.
        parallel_kinds: the kinds in which each node sends short slices to many others at once, so
            that its connections add up where each of them is limited by its latency.
        sparse_kinds: the reductions in which everybody sends a contribution straight to the node
            that owns the place, which folds all of them and sends the result at most once to each:
            so a format that sends but a few elements selects them twice at most.

    Raises:
        ValueError: the name cannot be one of a strategy, or no kind is served.
    """

    name: str
    kinds: frozenset[Kind]
    compile: Callable[[Problem, int], Iterator[Step]]
    predict: Callable[[PricedOp], float]
    description: Description
    parameter: Parameter | None = None
    positions: Callable[[int, int], Sequence[int]] | None = None
    joins_slices: bool = False
    senders: Callable[[Kind, int], int] = no_senders
    parallel_kinds: frozenset[Kind] = field(default=frozenset())
    sparse_kinds: frozenset[Kind] = field(default=frozenset())

    def __post_init__(self) -> None:
        too_long = len(self.name) > MAX_STRATEGY_LABEL
        if not _NAME.fullmatch(self.name) or self.name == AUTO or too_long:
            raise ValueError(
                f"{self.name!r} cannot be the name of a strategy: it has to be 1 to "
                f"{MAX_STRATEGY_LABEL} of a-z 0-9 _, not begin with a digit, and not be {AUTO!r}"
            )
        if not self.kinds:
            raise ValueError(f"the strategy {self.name} serves no kind of collective")

    @property
    def label(self) -> str:
        """The name as it is listed for people, as in ``tree(arity)``."""
        return f"{self.name}({self.parameter.name})" if self.parameter else self.name


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy with the value of its parameter; ``str()`` is the canonical name."""

    strategy: Strategy
    parameter: int = 0

    def __str__(self) -> str:
        name = self.strategy.name
        return f"{name}({self.parameter})" if self.strategy.parameter else name
