"""From the name of a strategy to the programs of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.schedules.registry import strategy_of
from allfold_core.schedules.schedule import Program, Schedule, Slice, balanced_slices, relabel
from allfold_core.schedules.strategy import Problem, StrategySpec


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
        strategy: its name, as :func:`~allfold_core.schedules.registry.parse_strategy` reads it;
            ``auto`` is not one.
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
    plan = _plan(kind, strategy, nodes, numel, root, tree_order, blocks)
    if not 0 <= node < nodes:
        raise InvalidArgument(f"node {node} is not one of {nodes} nodes")
    return plan.program(node)


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
    plan = _plan(kind, strategy, nodes, numel, root, tree_order, blocks)
    programs = tuple(map(plan.program, range(nodes)))
    moved = 0 if kind is Kind.BARRIER else numel
    return Schedule(kind, str(plan.spec), moved, root, programs, plan.blocks)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The node of each position of a strategy, and the position of each node."""

    nodes: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything on which the program of a node depends.

    ``blocks`` are those of the nodes, ``problem.blocks`` those of the positions.
    """

    spec: StrategySpec
    blocks: tuple[Slice, ...]
    problem: Problem
    layout: _Layout | None

    def program(self, node: int) -> Program:
        if self.problem.nodes == 1:
            return ()
        compiled = self.spec.strategy.compile
        if self.layout is None:
            return tuple(compiled(self.problem, node))
        steps = compiled(self.problem, self.layout.positions[node])
        return relabel(tuple(steps), self.layout.nodes)


def _plan(
    kind: Kind,
    strategy: str,
    nodes: int,
    numel: int,
    root: int,
    tree_order: Sequence[int] | None,
    blocks: Sequence[Slice] | None,
) -> _Plan:
    _check(kind, nodes, numel, root)
    spec = strategy_of(kind, strategy)
    layout = _layout(spec, nodes, root, None if tree_order is None else tuple(tree_order))
    given = _blocks(kind, nodes, numel, blocks)
    if kind is Kind.BARRIER or not numel:
        problem = Problem(Kind.BARRIER, nodes, 0, parameter=spec.parameter)
    else:
        placed = _placed(given, kind, layout)
        problem = Problem(kind, nodes, numel, placed, spec.parameter)
    return _Plan(spec, given, problem, layout)


def _check(kind: Kind, nodes: int, numel: int, root: int) -> None:
    if nodes < 1:
        raise InvalidArgument(f"a group has at least one node, not {nodes}")
    if numel < 0:
        raise InvalidArgument(f"a tensor cannot have {numel} elements")
    if kind.has_root and not 0 <= root < nodes:
        raise InvalidArgument(f"{kind.label} needs a root among the nodes 0..{nodes - 1}: {root}")
    if not kind.has_root and root != -1:
        raise InvalidArgument(f"{kind.label} has no root, but got root {root}")


def _blocks(kind: Kind, nodes: int, numel: int, given: Sequence[Slice] | None) -> tuple[Slice, ...]:
    if not kind.has_blocks:
        return ()
    count = nodes * nodes if kind is Kind.ALL_TO_ALL else nodes
    if given is None:
        return balanced_slices(numel, count)
    if len(given) != count:
        raise InvalidArgument(f"{kind.label} of {nodes} nodes has {count} blocks, not {len(given)}")
    return tuple(given)


def _placed(blocks: tuple[Slice, ...], kind: Kind, layout: _Layout | None) -> tuple[Slice, ...]:
    """The blocks of the positions, from those of the nodes."""
    if layout is None or not blocks:
        return blocks
    order = layout.nodes
    if kind is Kind.ALL_TO_ALL:
        return tuple(blocks[source * len(order) + to] for source in order for to in order)
    return tuple(blocks[node] for node in order)


@lru_cache(maxsize=256)
def _layout(
    spec: StrategySpec, nodes: int, root: int, tree_order: tuple[int, ...] | None
) -> _Layout | None:
    """``None`` where every node plays the position of its own index."""
    order = tuple(range(nodes)) if tree_order is None else tree_order
    if sorted(order) != list(range(nodes)):
        raise InvalidArgument(f"the tree order {order} does not name each of {nodes} nodes once")
    if spec.strategy.positions is None:
        return None
    if root >= 0:
        order = (root, *(node for node in order if node != root))
    order = tuple(order[rank] for rank in spec.strategy.positions(nodes, spec.parameter))
    positions = [0] * nodes
    for position, node in enumerate(order):
        positions[node] = position
    return _Layout(order, tuple(positions))
