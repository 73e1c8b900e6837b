"""The picture of a group: its links are those of the schedule, whatever the strategy is called."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_core.operations import Kind
from allfold_core.schedules.registry import strategies_for
from allfold_orchestrator.observation.drawing import (
    MAX_DRAWN_NODES,
    MAX_LISTED_LINKS,
    draw,
    scheduled_links,
)

NODES = ["a", "b", "c", "d"]


def op(strategy: str, kind: str = "all_reduce", root: int = -1) -> Any:
    return {"kind": kind, "strategy": strategy, "root": root}


def links(drawing: dict[str, Any]) -> list[str]:
    return [f"{each['source']}{each['target']}" for each in drawing["edges"]]


def test_a_ring_is_drawn_as_one_and_each_link_has_its_share() -> None:
    rates = {("a", "b"): 30.0, ("b", "c"): 10.0}
    drawing = draw(NODES, NODES, op("ring"), "", rates)
    assert drawing["shape"] == "ring"
    assert links(drawing) == ["ab", "bc", "cd", "da"]
    assert [each["share"] for each in drawing["edges"]] == [0.75, 0.25, 0.0, 0.0]
    assert [each["planned_share"] for each in drawing["edges"]] == [0.25] * 4


def test_a_tree_has_levels_from_its_root_downwards() -> None:
    drawing = draw(NODES, ["c", "a", "b", "d"], op("tree(2)"), "", {})
    assert drawing["shape"] == "tree"
    assert drawing["levels"][0] == [2]
    assert sorted(index for level in drawing["levels"] for index in level) == [0, 1, 2, 3]


def test_the_root_of_a_broadcast_is_the_root_of_the_picture() -> None:
    drawing = draw(NODES, NODES, op("tree(2)", "broadcast", root=1), "b", {})
    assert drawing["levels"][0] == [1]
    assert all(each["target"] != "b" for each in drawing["edges"])


def test_all_to_all_is_a_mesh() -> None:
    drawing = draw(NODES, NODES, op("direct", "all_to_all"), "", {})
    assert drawing["shape"] == "mesh"
    assert len(links(drawing)) == 12


@pytest.mark.parametrize("strategy", strategies_for(Kind.ALL_REDUCE))
def test_every_strategy_of_the_registry_can_be_drawn(strategy: str) -> None:
    assert draw(NODES, NODES, op(strategy), "", {})["edges"]


@pytest.mark.parametrize(
    "last",
    [
        None,
        op("a strategy of tomorrow"),
        op("ring", "fly"),
        op("ring", "broadcast"),
        {"strategy": "ring"},
    ],
)
def test_without_an_op_that_is_known_only_measured_links_are_there(
    last: Any,
) -> None:
    drawing = draw(NODES, NODES, last, "", {("a", "c"): 5.0, ("a", "gone"): 9.0})
    assert links(drawing) == ["ac"]
    assert not drawing["edges"][0]["planned"]


def test_large_groups_have_their_order_and_their_busiest_links() -> None:
    names = [str(number) for number in range(MAX_DRAWN_NODES + 1)]
    rates = {(a, b): float(int(a) * 1000 + int(b)) for a in names for b in names if a != b}
    drawing = draw(names, names, op("ring"), "", rates)
    assert drawing["is_condensed"]
    assert len(drawing["edges"]) == MAX_LISTED_LINKS
    assert links(drawing)[-1] == f"{names[-1]}{names[-2]}"
    assert drawing["nodes"] == names


def test_a_node_alone_has_no_links() -> None:
    assert draw(["a"], ["a"], op("ring"), "", {})["shape"] == "alone"
    assert draw([], [], None, "", {})["edges"] == []
    assert scheduled_links(op("ring"), 1, (0,), -1) == {}
