"""From the name of a strategy to programs: the one place that knows which strategies there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from allfold_core.errors import InvalidArgument
from allfold_core.operations import MAX_STRATEGY_LABEL, Kind
from allfold_core.schedule import Program, Schedule, Slice, Step, balanced_slices, relabel
from allfold_core.strategies import (
    block_trees,
    centralized,
    chain,
    direct,
    direct2,
    double_tree,
    halving_doubling,
    ring,
    tree,
)

Builder = Callable[[Kind, int, int, int], Iterator[Step]]
BlockBuilder = Callable[[Kind, Sequence[Slice], int], Iterator[Step]]

AUTO = "auto"
DEFAULT_ARITY = 2

# In the order in which `auto` breaks ties.
_BUILDERS: dict[str, Builder] = {
    "direct": direct.program,
    "direct2": direct2.program,
    "halving_doubling": halving_doubling.program,
    "ring": ring.program,
    "double_tree": double_tree.program,
    "tree": partial(tree.program, arity=DEFAULT_ARITY),
    "centralized": centralized.program,
    "chain": chain.program,
}
# For kinds with blocks; trees are made by their arity.
_BLOCK_BUILDERS: dict[str, BlockBuilder] = {
    "direct": direct.block_program,
    "halving_doubling": halving_doubling.block_program,
    "ring": ring.block_program,
}
_ROOTED = ("tree", "centralized", "chain")
_PLACED = ("double_tree", *_ROOTED)
_SPELLING = re.compile(r"([a-z_][a-z0-9_]*)\s*(?:\(\s*([0-9]+)\s*\))?")


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """A strategy by name, with the arity where it is a tree; ``str()`` is the canonical name."""

    name: str
    arity: int = 0

    def __str__(self) -> str:
        return f"{self.name}({self.arity})" if self.arity else self.name


def strategies_for(kind: Kind) -> tuple[str, ...]:
    """The names that can run ``kind``; ``tree`` also takes an arity, as in ``tree(4)``."""
    if kind.has_root:
        return _ROOTED
    if kind is Kind.ALL_TO_ALL:
        return ("direct",)
    return (*_BLOCK_BUILDERS, "tree", "centralized") if kind.has_blocks else tuple(_BUILDERS)


def parse_strategy(text: str) -> StrategySpec:
    """Read ``ring``, ``tree`` (a binary one), ``tree(4)`` ...

    Raises:
        InvalidArgument: for anything else; the message lists what exists.
    """
    match = _SPELLING.fullmatch(text.strip().lower())
    if not match or match[1] not in _BUILDERS:
        raise InvalidArgument(f"unknown strategy {text!r}; there are {_listing(tuple(_BUILDERS))}")
    name, arity = match[1], match[2]
    if name != "tree":
        if arity is not None:
            raise InvalidArgument(f"{text!r}: {name} takes no number; only tree does")
        return StrategySpec(name)
    spec = StrategySpec(name, DEFAULT_ARITY if arity is None else int(arity))
    if spec.arity < 1 or len(str(spec)) > MAX_STRATEGY_LABEL:
        raise InvalidArgument(f"{text!r}: the arity of a tree is 1 or more children per node")
    return spec


def parse_overrides(text: str) -> dict[str, str]:
    """Read ``all_reduce=ring;broadcast=tree(4)`` into strategies by kind label.

    ``auto`` stands for the choice by the cost model. Spaces and empty parts do not matter.

    Raises:
        InvalidArgument: for an unknown kind or strategy, a strategy that cannot run the kind, or
            a kind that is named twice.
    """
    overrides: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        label, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not name:
            raise InvalidArgument(f"{part!r} in {text!r} is not of the form kind=strategy")
        kind = _kind_from_label(label, text)
        if kind.label in overrides:
            raise InvalidArgument(f"{kind.label} is set twice in {text!r}")
        automatic = name.lower() == AUTO
        overrides[kind.label] = AUTO if automatic else str(strategy_of(kind, name))
    return overrides


def strategy_of(kind: Kind, text: str) -> StrategySpec:
    """The strategy named ``text``; ``InvalidArgument`` where it cannot run ``kind``."""
    spec = parse_strategy(text)
    if spec.name not in strategies_for(kind):
        available = _listing(strategies_for(kind))
        raise InvalidArgument(f"{spec} cannot run {kind.label}; {kind.label} has {available}")
    return spec


def compile_program(
    kind: Kind,
    strategy: str,
    *,
    nodes: int,
    numel: int,
    node: int,
    root: int = -1,
    tree_order: Sequence[int] | None = None,
    blocks: Sequence[Slice] | None = None,
) -> Program:
    """The program of one node, without making the other nodes' programs.

    Args:
        kind: the collective.
        strategy: its name, as :func:`parse_strategy` reads it; ``auto`` is not one.
        nodes: how many nodes the group has.
        numel: elements of the tensor; without any, the op is a barrier.
        node: the node index whose program is wanted.
        root: the node index of the root, for kinds that have one.
        tree_order: node indices by nearness, as in ``Plan.tree_order``: neighbours in it share
            parents. The first is the root of a tree or the hub of a star, unless the kind has a
            root of its own, which then comes first. 0..nodes-1 where it is not given.
        blocks: the block of each node, for kinds that have them; for an all-to-all that of each
            pair, by source and then by destination (what does not concern ``node`` may be empty).
            Balanced ones where they are not given.

    Raises:
        InvalidArgument: for values that fit no schedule.
    """
    problem = _problem(kind, strategy, nodes, numel, root, tree_order, blocks)
    if not 0 <= node < nodes:
        raise InvalidArgument(f"node {node} is not one of {nodes} nodes")
    return problem.program(node)


def compile_schedule(
    kind: Kind,
    strategy: str,
    *,
    nodes: int,
    numel: int,
    root: int = -1,
    tree_order: Sequence[int] | None = None,
    blocks: Sequence[Slice] | None = None,
) -> Schedule:
    """The programs of all nodes; the arguments are those of :func:`compile_program`."""
    problem = _problem(kind, strategy, nodes, numel, root, tree_order, blocks)
    programs = tuple(map(problem.program, range(nodes)))
    moved = 0 if kind is Kind.BARRIER else numel
    return Schedule(kind, str(problem.spec), moved, root, programs, problem.blocks)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which node plays which position of a strategy, and the inverse."""

    nodes: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Problem:
    """Everything that a program depends on, but the node."""

    kind: Kind
    spec: StrategySpec
    nodes: int
    numel: int
    layout: _Layout | None
    blocks: tuple[Slice, ...]

    def program(self, node: int) -> Program:
        if self.nodes == 1:
            return ()
        if self.layout is None:
            return tuple(self._steps(node))
        return relabel(tuple(self._steps(self.layout.positions[node])), self.layout.nodes)

    def _steps(self, position: int) -> Iterator[Step]:
        if not self.numel or not self.kind.has_blocks:
            moved = self.kind if self.numel else Kind.BARRIER
            return _builder(self.spec)(moved, self.nodes, self.numel, position)
        if self.kind is Kind.ALL_TO_ALL:
            return direct.all_to_all(
                self.blocks[position * self.nodes : (position + 1) * self.nodes],
                self.blocks[position :: self.nodes],
                position,
            )
        return self._block_steps(position)

    def _block_steps(self, position: int) -> Iterator[Step]:
        if self.layout is None:
            return _BLOCK_BUILDERS[self.spec.name](self.kind, self.blocks, position)
        blocks = [self.blocks[node] for node in self.layout.nodes]
        arity = {"centralized": self.nodes - 1, "chain": 1}.get(self.spec.name, self.spec.arity)
        return block_trees.program(self.kind, blocks, position, arity)


def _problem(
    kind: Kind,
    strategy: str,
    nodes: int,
    numel: int,
    root: int,
    tree_order: Sequence[int] | None,
    blocks: Sequence[Slice] | None,
) -> _Problem:
    spec = _checked(kind, strategy, nodes, numel, root)
    order = None if tree_order is None else tuple(tree_order)
    layout = _layout(spec, nodes, root, order)
    return _Problem(kind, spec, nodes, numel, layout, _blocks(kind, nodes, numel, blocks))


def _blocks(kind: Kind, nodes: int, numel: int, given: Sequence[Slice] | None) -> tuple[Slice, ...]:
    if not kind.has_blocks:
        return ()
    count = nodes * nodes if kind is Kind.ALL_TO_ALL else nodes
    if given is None:
        return balanced_slices(numel, count)
    if len(given) != count:
        raise InvalidArgument(f"{kind.label} of {nodes} nodes has {count} blocks, not {len(given)}")
    return tuple(given)


def _builder(spec: StrategySpec) -> Builder:
    return partial(tree.program, arity=spec.arity) if spec.arity else _BUILDERS[spec.name]


@lru_cache(maxsize=256)
def _layout(
    spec: StrategySpec, nodes: int, root: int, tree_order: tuple[int, ...] | None
) -> _Layout | None:
    """``None`` where every node plays the position of its own index."""
    order = tuple(range(nodes)) if tree_order is None else tree_order
    if sorted(order) != list(range(nodes)):
        raise InvalidArgument(f"the tree order {order} does not name each of {nodes} nodes once")
    if spec.name not in _PLACED:
        return None
    if root >= 0:
        order = (root, *(node for node in order if node != root))
    if spec.arity:
        order = tuple(order[rank] for rank in tree.preorder_ranks(nodes, spec.arity))
    positions = [0] * nodes
    for position, node in enumerate(order):
        positions[node] = position
    return _Layout(order, tuple(positions))


def _checked(kind: Kind, strategy: str, nodes: int, numel: int, root: int) -> StrategySpec:
    if nodes < 1:
        raise InvalidArgument(f"a group has at least one node, not {nodes}")
    if numel < 0:
        raise InvalidArgument(f"a tensor cannot have {numel} elements")
    if kind.has_root and not 0 <= root < nodes:
        raise InvalidArgument(f"{kind.label} needs a root among the nodes 0..{nodes - 1}: {root}")
    if not kind.has_root and root != -1:
        raise InvalidArgument(f"{kind.label} has no root, but got root {root}")
    return strategy_of(kind, strategy)


def _kind_from_label(label: str, text: str) -> Kind:
    for kind in Kind:
        if kind.label == label.lower():
            return kind
    kinds = ", ".join(kind.label for kind in Kind)
    raise InvalidArgument(f"unknown collective {label!r} in {text!r}; there are {kinds}")


def _listing(names: tuple[str, ...]) -> str:
    return ", ".join("tree(arity)" if name == "tree" else name for name in names)
