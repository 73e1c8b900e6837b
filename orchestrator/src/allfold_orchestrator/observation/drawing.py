"""The picture of a group: its nodes, and the links over which its last op went. Pure.

The links are those of the op's schedule, compiled anew from its strategy and the order of the
nodes; what each carries is measured. No strategy is known here by name: whether a schedule is a
ring, a tree or a mesh follows from its links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from allfold_core.agent_answers import RecordedOp
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.schedule import Send

MAX_DRAWN_NODES = 64
"""Of larger groups the order of the nodes is drawn, and their busiest links are listed."""

MAX_LISTED_LINKS = 256

_ELEMENTS_PER_NODE = 1024

Json = dict[str, Any]
Link = tuple[int, int]
Shape = Literal["alone", "ring", "tree", "mesh"]


def draw(
    nodes: Sequence[str],
    tree_order: Sequence[str],
    op: RecordedOp | None,
    root_node: str,
    rates: Mapping[tuple[str, str], float],
) -> Json:
    """Return the picture of a group.

    Args:
        nodes: in the order of the ring.
        tree_order: the same from the root of a tree downwards.
        op: the last one; ``None`` if there was none.
        root_node: the node of the op's root, ``""`` for none.
        rates: the bytes per second over each link.
    """
    index = {node: number for number, node in enumerate(nodes)}
    order = tuple(index[node] for node in tree_order if node in index)
    planned = scheduled_links(op, len(nodes), order, index.get(root_node, -1))
    measured = {
        (index[source], index[target]): rate
        for (source, target), rate in rates.items()
        if source in index and target in index and rate > 0
    }
    total = sum(measured.values())
    if len(nodes) > MAX_DRAWN_NODES:
        busiest = sorted(measured, key=lambda link: -measured[link])[:MAX_LISTED_LINKS]
        measured = {link: measured[link] for link in busiest}
    shape, levels = shape_of(len(nodes), planned, index.get(root_node, order[0] if order else 0))
    return {
        "shape": shape,
        "levels": levels,
        "nodes": list(nodes),
        "is_condensed": len(nodes) > MAX_DRAWN_NODES,
        "edges": [
            {
                "source": nodes[source],
                "target": nodes[target],
                "planned": (source, target) in planned,
                "planned_share": planned.get((source, target), 0.0),
                "bytes_per_second": measured.get((source, target)),
                "share": measured.get((source, target), 0.0) / total if total else None,
            }
            for source, target in sorted(planned.keys() | measured.keys())
        ],
    }


def scheduled_links(
    op: RecordedOp | None, nodes: int, tree_order: tuple[int, ...], root: int
) -> dict[Link, float]:
    """Return the links of an op's schedule, with the share of its data that goes over each.

    There are none where there was no op, or none whose schedule this version knows.
    """
    if op is None or not 1 < nodes <= MAX_DRAWN_NODES:
        return {}
    kind = next((each for each in Kind if each.label == op.get("kind")), None)
    if kind is None or (kind.has_root and root < 0):
        return {}
    order = tree_order if len(tree_order) == nodes else tuple(range(nodes))
    try:
        return _links(kind, op["strategy"], nodes, root if kind.has_root else -1, order)
    except InvalidArgument:
        return {}


@lru_cache(maxsize=64)
def _links(
    kind: Kind, strategy: str, nodes: int, root: int, tree_order: tuple[int, ...]
) -> dict[Link, float]:
    schedule = compile_schedule(
        kind,
        strategy,
        nodes=nodes,
        numel=nodes * nodes * _ELEMENTS_PER_NODE,
        root=root,
        tree_order=tree_order,
    )
    sent: dict[Link, int] = {}
    for source, program in enumerate(schedule.programs):
        for step in program:
            if isinstance(step, Send):
                link = source, step.to
                sent[link] = sent.get(link, 0) + len(step.slice)
    total = sum(sent.values())
    return {link: elements / total if total else 0.0 for link, elements in sent.items()}


def shape_of(nodes: int, links: Mapping[Link, float], root: int) -> tuple[Shape, list[list[int]]]:
    """Return the shape that these links make, and for a tree its levels from the root downwards."""
    if nodes <= 1:
        return "alone", []
    pairs = {frozenset(link) for link in links}
    neighbours: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for source, target in links:
        neighbours[source].add(target)
        neighbours[target].add(source)
    levels = _levels(neighbours, root)
    if len(pairs) == nodes - 1 and sum(map(len, levels)) == nodes:
        return "tree", levels
    in_order = {frozenset((node, (node + 1) % nodes)) for node in range(nodes)}
    return ("ring" if pairs <= in_order else "mesh"), []


def _levels(neighbours: Mapping[int, set[int]], root: int) -> list[list[int]]:
    levels, seen = [[root]], {root}
    while level := sorted({to for node in levels[-1] for to in neighbours[node]} - seen):
        levels.append(level)
        seen.update(level)
    return levels
