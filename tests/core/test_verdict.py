"""The verdict names the odd rank and shows both sides."""

from __future__ import annotations

from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.plan import LinkModel, Member, Plan
from allfold_core.verdict import Evidence, judge_deadline, judge_mismatch, name_ranks


def call(*shape: int, op: ReduceOp = ReduceOp.SUM) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, op, DType.FLOAT32, shape, -1, "auto")


PLAN = Plan(
    group="g",
    epoch=1,
    world_size=4,
    members=(
        Member("a", "http://a", "a:1", (0, 1)),
        Member("b", "http://b", "b:1", (2, 3)),
    ),
    tree_order=(0, 1),
    links=LinkModel(),
    strategies={},
    timeout=5.0,
)


def test_equal_calls_are_no_mismatch() -> None:
    assert judge_mismatch(PLAN, Evidence(3, {0: call(4), 2: call(4)}, {})) is None
    assert judge_mismatch(PLAN, Evidence(3, {}, {})) is None


def test_the_minority_is_the_odd_side() -> None:
    calls = {0: call(1436), 1: call(1435), 2: call(1436), 3: call(1436)}
    error = judge_mismatch(PLAN, Evidence(3, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [1]
    assert "rank 1 (node a) called all_reduce(sum, float32[1435])" in error.message
    assert "differs in shape" in error.message
    assert "ranks 0, 2, 3 called it: all_reduce(sum, float32[1436])" in error.message


def test_in_a_tie_the_side_of_the_lowest_rank_is_expected() -> None:
    error = judge_mismatch(PLAN, Evidence(0, {1: call(2, op=ReduceOp.MAX), 3: call(2)}, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [3]
    assert "differs in reduce_op" in error.message


def test_three_sides_are_all_shown() -> None:
    calls = {0: call(1), 1: call(1), 2: call(2), 3: call(3)}
    error = judge_mismatch(PLAN, Evidence(0, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [2, 3]
    assert all(text in error.message for text in ("float32[1]", "float32[2]", "float32[3]"))


def test_a_missed_deadline_names_the_missing_rank_its_node_and_its_last_op() -> None:
    evidence = Evidence(7, dict.fromkeys((0, 1, 2), call(4)), {3: 6})
    error = judge_deadline(PLAN, evidence, 1.5)
    assert error.details["missing_ranks"] == [3]
    assert "missed its deadline of 1.5 s" in error.message
    assert "rank 3 on node b has not called it (its last op was 6)" in error.message


def test_a_rank_that_never_called_anything_is_said_to_be_so() -> None:
    error = judge_deadline(PLAN, Evidence(0, {0: call(4)}, {1: -1, 2: -1, 3: -1}), 1.0)
    assert "rank 1 on node a has not called it (it has called no op yet)" in error.message


def test_a_silent_node_is_told_apart_from_a_late_rank() -> None:
    error = judge_deadline(PLAN, Evidence(0, {0: call(4), 1: call(4)}, {}, ("b",)), 1.0)
    assert "rank 2 on node b is unknown, its agent does not answer" in error.message
    assert error.details["silent_nodes"] == ["b"]


def test_when_all_have_called_the_links_are_to_blame() -> None:
    error = judge_deadline(PLAN, Evidence(0, dict.fromkeys(range(4), call(4)), {}), 1.0)
    assert error.details["missing_ranks"] == []
    assert "the data did not arrive in time" in error.message


def test_long_lists_of_ranks_are_cut() -> None:
    assert name_ranks([5]) == "rank 5"
    assert name_ranks(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
