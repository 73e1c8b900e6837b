"""The verdict names the odd rank and shows both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import DType, Wire
from allfold_core.group_options import GroupOptions
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.plan import Plan
from allfold_core.topology import LinkModel, Member
from allfold_core.verdict import (
    OpEvidence,
    counted,
    judge_deadline,
    judge_mismatch,
    name_ranks,
    numbering,
    refused_by,
    unmatched_pair,
)


def call(*shape: int, op: ReduceOp = ReduceOp.SUM) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, op, DType.FLOAT32, shape, -1, "auto")


GROUP = "g"
NODES = ("a", "a", "b", "b")


def test_what_there_is_one_of_is_counted_in_the_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert (numbering(1), numbering(3)) == ("only rank is 0", "ranks are 0 to 2")


def test_equal_calls_are_no_mismatch() -> None:
    assert judge_mismatch(GROUP, NODES, OpEvidence(3, {0: call(4), 2: call(4)}, {})) is None
    assert judge_mismatch(GROUP, NODES, OpEvidence(3, {}, {})) is None


def test_the_minority_is_the_odd_side() -> None:
    calls = {0: call(1436), 1: call(1435), 2: call(1436), 3: call(1436)}
    error = judge_mismatch(GROUP, NODES, OpEvidence(3, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [1]
    assert "rank 1 (node a) called all_reduce(sum, float32[1435])" in error.message
    assert "differs in shape" in error.message
    assert "ranks 0, 2, 3 called it: all_reduce(sum, float32[1436])" in error.message


def test_in_a_tie_the_side_of_the_lowest_rank_is_expected() -> None:
    error = judge_mismatch(
        GROUP, NODES, OpEvidence(0, {1: call(2, op=ReduceOp.MAX), 3: call(2)}, {})
    )
    assert error is not None
    assert error.details["odd_ranks"] == [3]
    assert "differs in reduce_op" in error.message


def test_three_sides_are_all_shown() -> None:
    calls = {0: call(1), 1: call(1), 2: call(2), 3: call(3)}
    error = judge_mismatch(GROUP, NODES, OpEvidence(0, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [2, 3]
    assert all(text in error.message for text in ("float32[1]", "float32[2]", "float32[3]"))


@pytest.mark.parametrize(
    ("change", "field", "shown"),
    [
        ({"wire": Wire.INT8}, "wire", "wire=int8"),
        ({"factor": 0.5}, "factor", "factor=0.5"),
        ({"feedback": 7}, "feedback", "premul_sum"),
        ({"kind": Kind.REDUCE_SCATTER, "counts": (1, 2, 3, 5)}, "counts", "rows (1, 2, 3, 5)"),
        ({"strategy": "ring", "wire": Wire.FLOAT16}, "strategy, wire", "strategy=ring"),
    ],
)
def test_whatever_differs_is_named(change: dict[str, Any], field: str, shown: str) -> None:
    kind = change.get("kind", Kind.ALL_REDUCE)
    counts = (1, 2, 3, 4) if kind.has_blocks else ()
    right = replace(call(8, op=ReduceOp.PREMUL_SUM), kind=kind, factor=0.25, counts=counts)
    calls = {0: right, 1: right, 2: replace(right, **change), 3: right}
    error = judge_mismatch(GROUP, NODES, OpEvidence(3, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [2]
    assert f"which differs in {field};" in error.message
    assert shown in error.details["got"]["2"]
    assert error.details["expected"] == right.describe()


def exchange(rank: int, matrix: list[list[int]], dtype: DType = DType.FLOAT32) -> Fingerprint:
    """Return the fingerprint of a rank when rank i sends ``matrix[i][j]`` rows to rank j."""
    counts = (*matrix[rank], *(row[rank] for row in matrix))
    return Fingerprint(Kind.ALL_TO_ALL, None, dtype, (8,), -1, "auto", counts=counts)


matrices = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=4, max_size=4)


@given(matrix=matrices, present=st.sets(st.integers(0, 3)))
def test_an_all_to_all_whose_pairs_agree_is_no_mismatch(
    matrix: list[list[int]], present: set[int]
) -> None:
    calls = {rank: exchange(rank, matrix) for rank in present}
    assert unmatched_pair(calls) is None
    assert judge_mismatch(GROUP, NODES, OpEvidence(3, calls, {})) is None


@given(matrix=matrices, giver=st.integers(0, 3), taker=st.integers(0, 3), more=st.integers(1, 5))
def test_an_all_to_all_whose_pair_disagrees_names_both_ranks(
    matrix: list[list[int]], giver: int, taker: int, more: int
) -> None:
    """Whoever of the two is wrong."""
    calls = {rank: exchange(rank, matrix) for rank in range(4)}
    counts = list(calls[taker].counts)
    counts[4 + giver] += more
    calls[taker] = replace(calls[taker], counts=tuple(counts))
    assert unmatched_pair(calls) == (giver, taker)
    error = judge_mismatch(GROUP, NODES, OpEvidence(3, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == sorted({giver, taker})
    sent = matrix[giver][taker]
    nodes = "aabb"
    assert (
        f"rank {giver} (node {nodes[giver]}) sends {counted(sent, 'row')} to rank {taker} "
        f"(node {nodes[taker]}), which expects {sent + more}: "
    ) in error.message
    assert f"receives ({', '.join(map(str, counts[4:]))})" in error.message


def test_a_pair_of_which_one_rank_has_not_come_cannot_disagree() -> None:
    calls = {rank: exchange(rank, [[1, 2, 3, 4]] * 4) for rank in range(4)}
    calls[3] = replace(calls[3], counts=(9, 9, 9, 4, 4, 4, 4, 4))
    assert unmatched_pair(calls) == (3, 0)
    del calls[3]
    assert unmatched_pair(calls) is None


def test_of_an_all_to_all_what_all_must_agree_on_comes_before_the_pairs() -> None:
    """The ranks of another type are odd, whatever sizes they have."""
    calls = {rank: exchange(rank, [[1] * 4] * 4) for rank in range(4)}
    calls[1] = exchange(1, [[5] * 4] * 4, DType.FLOAT64)
    error = judge_mismatch(GROUP, NODES, OpEvidence(3, calls, {}))
    assert error is not None
    assert error.details["odd_ranks"] == [1]
    assert "which differs in dtype;" in error.message


def test_a_missed_deadline_names_the_missing_rank_its_node_and_its_last_op() -> None:
    evidence = OpEvidence(7, dict.fromkeys((0, 1, 2), call(4)), {3: 6})
    error = judge_deadline(GROUP, NODES, evidence, 1.5)
    assert error.details["missing_ranks"] == [3]
    assert "timed out after its timeout of 1.5 s" in error.message
    assert "rank 3 on node b has not called it (its last op was 6)" in error.message


def test_a_rank_that_never_called_anything_is_said_to_be_so() -> None:
    error = judge_deadline(GROUP, NODES, OpEvidence(0, {0: call(4)}, {1: -1, 2: -1, 3: -1}), 1.0)
    assert "rank 1 on node a has not called it (it has called no op yet)" in error.message


def test_a_silent_node_is_told_apart_from_a_late_rank() -> None:
    error = judge_deadline(GROUP, NODES, OpEvidence(0, {0: call(4), 1: call(4)}, {}, ("b",)), 1.0)
    assert "rank 2 on node b is unknown, its agent does not answer" in error.message
    assert error.details["silent_nodes"] == ["b"]


def test_when_all_have_called_the_links_are_to_blame() -> None:
    error = judge_deadline(GROUP, NODES, OpEvidence(0, dict.fromkeys(range(4), call(4)), {}), 1.0)
    assert error.details["missing_ranks"] == []
    assert "the data did not arrive in time" in error.message


def test_what_a_missing_rank_does_instead_is_said_where_it_is_known() -> None:
    hindered = {3: "its process is stopped by a signal (SIGSTOP)"}
    evidence = OpEvidence(7, dict.fromkeys((0, 1, 2), call(4)), {3: 6}, hindered=hindered)
    error = judge_deadline(GROUP, NODES, evidence, 1.5)
    told = "rank 3 on node b has not called it (its last op was 6): its process is stopped by a"
    assert told in error.message


def test_a_slow_link_is_quoted_where_the_data_did_not_arrive() -> None:
    calls = dict.fromkeys(range(4), call(4))
    slow = "the link from node a to node b carries 1 MB/s, and has carried 100 MB/s"
    error = judge_deadline(GROUP, NODES, OpEvidence(0, calls, {}, links=(slow,)), 1.0)
    assert f"the data did not arrive in time: {slow}." in error.message


def test_long_lists_of_ranks_are_cut() -> None:
    assert name_ranks([5]) == "rank 5"
    assert name_ranks(list(range(10))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_rank_whose_gpu_is_busy_has_called_but_cannot_begin() -> None:
    error = judge_deadline(
        GROUP, NODES, OpEvidence(5, {0: call(4)}, {0: 5}, held=frozenset({1, 2, 3})), 2.0
    )
    assert "the GPU of rank 1 on node a is busy with what it was given before" in error.message


def test_a_rank_whose_gpu_is_busy_is_late_even_if_it_could_not_call_a_later_op() -> None:
    last = {0: 5, 1: 6, 2: 5, 3: 5}
    arrivals = {rank: call(4) for rank in (0, 2, 3)}
    error = judge_deadline(GROUP, NODES, OpEvidence(5, arrivals, last, held=frozenset({1})), 2.0)
    assert error.details["missing_ranks"] == [1]
    assert "the GPU of rank 1 on node a is busy" in error.message


def test_a_call_that_cannot_be_is_told_with_the_rank_and_its_reason() -> None:
    error = refused_by(GROUP, 5, 1, "a", "no memory is left; raise the limit.", "reduce")
    assert error.message == (
        f"op 5 of group '{GROUP}' cannot be done: rank 1 (node a) could not call reduce: no memory "
        "is left; raise the limit. No input was changed and the group is usable; look at the "
        "arguments of rank 1."
    )
    assert "could not call it: " in refused_by(GROUP, 5, 1, "a", "it is late").message


def test_a_large_odd_side_is_named_without_nodes() -> None:
    nodes = [f"n{rank}" for rank in range(30)]
    calls = {rank: call(1 if rank < 16 else 2) for rank in range(30)}
    error = judge_mismatch(GROUP, nodes, OpEvidence(0, calls, {}))
    assert error is not None
    assert "ranks 16, 17, 18, 19, 20, 21, 22, 23 and 6 more called" in error.message


def test_a_plan_knows_the_node_of_each_rank() -> None:
    members = (Member("a", "", "", (0, 3)), Member("b", "", "", (1, 2)))
    plan = Plan("g", 1, 4, members, (0, 1), LinkModel(), GroupOptions(5.0))
    assert [plan.index_of_rank(rank) for rank in range(4)] == [0, 1, 1, 0]
