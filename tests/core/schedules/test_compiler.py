"""Names of strategies, the override grammar, and what the compiler refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.errors import InvalidArgument
from allfold_core.operations import MAX_STRATEGY_LABEL, Kind
from allfold_core.schedules.compiler import compile_program, compile_schedule
from allfold_core.schedules.registry import (
    STRATEGIES,
    parse_overrides,
    parse_strategy,
    strategies_for,
)
from allfold_core.schedules.schedule import Fold, Receive, Send, Slice
from allfold_core.schedules.strategy import StrategySpec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ring", "ring"),
        (" Ring ", "ring"),
        ("tree", "tree(2)"),
        ("tree(4)", "tree(4)"),
        ("tree ( 04 )", "tree(4)"),
        ("double_tree", "double_tree"),
        ("direct2", "direct2"),
    ],
)
def test_a_strategy_has_one_canonical_name(text: str, canonical: str) -> None:
    assert str(parse_strategy(text)) == canonical
    assert str(parse_strategy(canonical)) == canonical


@given(arity=st.integers(1, 10**20))
def test_every_arity_has_its_name(arity: int) -> None:
    assert parse_strategy(f"tree({arity})") == StrategySpec(STRATEGIES["tree"], arity)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("rings", r"unknown strategy 'rings'; there are direct, .*tree\(arity\)"),
        ("", "unknown strategy ''"),
        ("tree(", "unknown strategy"),
        ("tree(-1)", "unknown strategy"),
        ("tree(two)", "unknown strategy"),
        ("auto", "unknown strategy"),
        ("tree(0)", "1 or more"),
        (f"tree({'9' * MAX_STRATEGY_LABEL})", "1 or more"),
        ("ring(2)", "ring takes no number"),
    ],
)
def test_a_wrong_name_says_what_there_is(text: str, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        parse_strategy(text)


@given(st.text(max_size=20))
def test_any_text_is_a_strategy_or_refused_properly(text: str) -> None:
    try:
        spec = parse_strategy(text)
    except InvalidArgument:
        return
    assert parse_strategy(str(spec)) == spec
    assert len(str(spec).encode("ascii")) <= MAX_STRATEGY_LABEL


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", {}),
        (" ; ;", {}),
        ("all_reduce=ring", {"all_reduce": "ring"}),
        (
            "all_reduce=ring;broadcast=tree(4)",
            {"all_reduce": "ring", "broadcast": "tree(4)"},
        ),
        (
            " All_Reduce = direct2 ; reduce=tree; barrier = AUTO;",
            {"all_reduce": "direct2", "reduce": "tree(2)", "barrier": "auto"},
        ),
        (
            "all_gather=ring;reduce_scatter=halving_doubling;gather=chain;scatter=tree(8);"
            "all_to_all=direct",
            {
                "all_gather": "ring",
                "reduce_scatter": "halving_doubling",
                "gather": "chain",
                "scatter": "tree(8)",
                "all_to_all": "direct",
            },
        ),
    ],
)
def test_overrides_are_read(text: str, overrides: dict[str, str]) -> None:
    assert parse_overrides(text) == overrides


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("ring", "'ring' in 'ring' is not of the form kind=strategy"),
        ("all_reduce=", "not of the form"),
        ("allreduce=ring", "unknown collective 'allreduce'.*all_reduce, reduce, broadcast"),
        ("all_reduce=rung", "unknown strategy 'rung'"),
        ("broadcast=ring", r"ring cannot run broadcast; broadcast has tree\(arity\), central"),
        ("all_gather=direct2", "direct2 cannot run all_gather; all_gather has direct, halving_"),
        ("scatter=ring", "ring cannot run scatter"),
        ("all_to_all=tree", "cannot run all_to_all; all_to_all has direct$"),
        ("reduce=tree;reduce=chain", "reduce is set twice"),
        ("all_reduce=ring,broadcast=tree", "unknown strategy 'ring,broadcast=tree'"),
    ],
)
def test_wrong_overrides_are_explained(text: str, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        parse_overrides(text)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nodes": 0}, "at least one node"),
        ({"numel": -1}, "-1 elements"),
        ({"node": 4}, "node 4 is not one of 4"),
        ({"node": -1}, "node -1"),
        ({"root": 0}, "all_reduce has no root"),
        ({"kind": Kind.REDUCE}, "needs a root among the nodes 0..3: -1"),
        ({"kind": Kind.BROADCAST, "root": 4}, "needs a root"),
        ({"kind": Kind.SCATTER, "root": -1}, "scatter needs a root among the nodes 0..3"),
        ({"kind": Kind.GATHER, "root": 5}, "gather needs a root among the nodes 0..3"),
        ({"kind": Kind.ALL_TO_ALL, "root": 0, "strategy": "direct"}, "all_to_all has no root"),
        ({"kind": Kind.BROADCAST, "root": 1, "strategy": "direct"}, "cannot run broadcast"),
        ({"strategy": "auto"}, "unknown strategy"),
        ({"tree_order": (0, 1, 2)}, "tree order"),
        ({"tree_order": (0, 1, 2, 2)}, "tree order"),
        ({"tree_order": (1, 2, 3, 4), "strategy": "ring"}, "tree order"),
    ],
)
def test_values_that_fit_no_schedule_are_refused(change: dict[str, Any], match: str) -> None:
    values: dict[str, Any] = {
        "kind": Kind.ALL_REDUCE,
        "strategy": "tree",
        "nodes": 4,
        "numel": 10,
        "node": 0,
    } | change
    with pytest.raises(InvalidArgument, match=match):
        compile_program(**values)


def test_each_kind_has_its_strategies() -> None:
    assert set(strategies_for(Kind.REDUCE)) == {"tree", "centralized", "chain"}
    assert strategies_for(Kind.BROADCAST) == strategies_for(Kind.REDUCE)
    assert "ring" in strategies_for(Kind.ALL_REDUCE)
    assert strategies_for(Kind.BARRIER) == strategies_for(Kind.ALL_REDUCE)
    assert (
        strategies_for(Kind.GATHER) == strategies_for(Kind.SCATTER) == strategies_for(Kind.REDUCE)
    )
    halves = {"direct", "halving_doubling", "ring", "tree", "centralized"}
    assert set(strategies_for(Kind.ALL_GATHER)) == halves
    assert strategies_for(Kind.REDUCE_SCATTER) == strategies_for(Kind.ALL_GATHER)
    assert strategies_for(Kind.ALL_TO_ALL) == ("direct",)


def test_a_schedule_carries_its_canonical_name() -> None:
    schedule = compile_schedule(Kind.BROADCAST, "tree", nodes=3, numel=5, root=2)
    assert (schedule.strategy, schedule.root, schedule.numel) == ("tree(2)", 2, 5)


def test_the_first_of_the_tree_order_is_the_hub_of_a_star() -> None:
    schedule = compile_schedule(
        Kind.ALL_REDUCE, "centralized", nodes=4, numel=5, tree_order=(2, 0, 3, 1)
    )
    assert schedule.programs[2][0] == Fold(Slice(0, 5), (2, 0, 3, 1))
    assert all(len(schedule.programs[node]) == 2 for node in (0, 1, 3))


def test_a_root_moves_to_the_front_of_the_order() -> None:
    schedule = compile_schedule(
        Kind.BROADCAST, "chain", nodes=4, numel=5, root=3, tree_order=(2, 0, 3, 1)
    )
    received = [
        {step.source for step in program if isinstance(step, Receive)}
        for program in schedule.programs
    ]
    assert received == [{2}, {0}, {3}, set()]


def test_neighbours_in_the_tree_order_share_a_subtree() -> None:
    """0 over 1 and 4, 1 over 2 and 3, 4 over 5 and 6: not the heap's own 0 over 1 and 2."""
    schedule = compile_schedule(Kind.ALL_REDUCE, "tree(2)", nodes=7, numel=1)
    folds = [
        step.operands for program in schedule.programs for step in program if isinstance(step, Fold)
    ]
    assert folds == [(0, 1, 4), (1, 2, 3), (4, 5, 6)]


@pytest.mark.parametrize("name", ["ring", "direct", "direct2", "halving_doubling"])
def test_the_tree_order_does_not_matter_off_trees(name: str) -> None:
    plain = compile_schedule(Kind.ALL_REDUCE, name, nodes=5, numel=9)
    ordered = compile_schedule(Kind.ALL_REDUCE, name, nodes=5, numel=9, tree_order=[4, 3, 2, 1, 0])
    assert plain == ordered


def test_a_ring_follows_the_node_order() -> None:
    schedule = compile_schedule(Kind.ALL_REDUCE, "ring", nodes=5, numel=9)
    for node, program in enumerate(schedule.programs):
        assert {step.to for step in program if isinstance(step, Send)} == {(node + 1) % 5}
