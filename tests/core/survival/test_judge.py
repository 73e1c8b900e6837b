"""The judge of a round names ranks by their numbers in the epoch of the op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.dtypes import DType
from allfold_core.errors import GpuFailed, MismatchError, PeerMissing
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.survival.judge import judge_calls, packed
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Call, Doubt, OpReport, OpState, Reason, Report

TERM = Term(0, 0, ("a", "b"), (0, 0))
BEFORE = Epoch(Stamp(0, 0, 0), 0, tuple(Seat(f"s{n}", "aabc"[n]) for n in range(4)))
# Rank 0 was lost since, so the others have other numbers.
NOW = Epoch(Stamp(0, 1, 0), 1, BEFORE.seats[1:], "{}")
SEQ = 7
LATE = Doubt(SEQ, Reason.DEADLINE, 1.5)
DIFFERS = Doubt(SEQ, Reason.MISMATCH)


def all_reduce(*shape: int) -> Call:
    return Call(1, Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, shape, -1, AUTO))


def broadcast(root: int, session: str, view: int) -> Call:
    return Call(view, Fingerprint(Kind.BROADCAST, None, DType.FLOAT32, (4,), root, AUTO), session)


def reports(calls: Mapping[str, Call], **others: Mapping[str, int]) -> dict[str, Report]:
    """Return the reports of two nodes; ``others`` are fields of them, by session."""
    sessions = {"a": ("s0", "s1"), "b": ("s2",)}

    def report(node: str) -> Report:
        mine = {s: call for s, call in calls.items() if s in sessions[node]}
        rest: dict[str, Any] = {"called": {}} | {
            name: {s: seq for s, seq in by.items() if s in sessions[node]}
            for name, by in others.items()
        }
        ops = {SEQ: OpReport(OpState.OPEN, None, mine)} if mine else {}
        return Report(node, TERM, 0, NOW, (), {}, -1, ops=ops, **rest)

    return {node: report(node) for node in sessions}


def judge(epoch: Epoch, said: Mapping[str, Report], doubt: Doubt | None = None) -> Any:
    return judge_calls("g", Hindrances(), SEQ, epoch, said, doubt)


def test_calls_that_fit_together_and_that_nobody_doubts_are_no_error() -> None:
    assert judge(NOW, reports({"s1": all_reduce(4), "s2": all_reduce(4)})) is None


def test_a_mismatch_is_an_error_whatever_the_op_is_doubted_for() -> None:
    said = reports({"s1": all_reduce(4), "s2": all_reduce(5)})
    for doubt in (DIFFERS, LATE, Doubt(SEQ, Reason.FAILED, 0.0, packed(GpuFailed("x")))):
        error = judge(NOW, said, doubt)
        assert isinstance(error, MismatchError)
        assert "rank 1 (node b) called all_reduce(sum, float32[5])" in error.message
        assert error.details["odd_ranks"] == [1]


def test_where_nobody_doubts_the_op_nobody_is_called_odd_before_all_have_called() -> None:
    """Of two calls that differ it could not be said which of them is."""
    three = Epoch(BEFORE.stamp, 0, BEFORE.seats[:3])
    calls = {"s0": all_reduce(4), "s1": all_reduce(5)}
    assert judge(three, reports(calls)) is None
    error = judge(three, reports(calls | {"s2": all_reduce(5)}))
    assert isinstance(error, MismatchError)
    assert error.details["odd_ranks"] == [0]


def test_a_doubt_that_the_calls_do_not_confirm_is_no_error() -> None:
    said = reports({"s1": all_reduce(4), "s2": all_reduce(4)})
    assert judge(NOW, said, DIFFERS) is None
    assert judge(NOW, said, Doubt(SEQ, Reason.STALE)) is None


def test_the_call_of_a_rank_that_is_not_in_the_epoch_is_no_mismatch() -> None:
    said = reports({"s0": all_reduce(9), "s1": all_reduce(4), "s2": all_reduce(4)})
    assert judge(NOW, said, DIFFERS) is None
    assert isinstance(judge(BEFORE, said, DIFFERS), MismatchError)


def test_a_root_is_the_same_whatever_number_the_caller_knew_it_by() -> None:
    same = {"s1": broadcast(2, "s2", view=0), "s2": broadcast(1, "s2", view=1)}
    assert judge(NOW, reports(same), DIFFERS) is None
    other = {"s1": broadcast(1, "s1", view=0), "s2": broadcast(1, "s2", view=1)}
    error = judge(NOW, reports(other), DIFFERS)
    assert isinstance(error, MismatchError)
    assert "rank 1 (node b) called broadcast(float32[4], root=1)" in error.message
    assert error.message.count("root=0") == 1


def test_a_root_that_is_gone_has_no_number() -> None:
    calls = {"s1": broadcast(0, "s0", view=0), "s2": broadcast(0, "s1", view=1)}
    error = judge(NOW, reports(calls), DIFFERS)
    assert isinstance(error, MismatchError)
    assert "root=-1" in error.message


def test_a_deadline_names_who_did_not_come_and_what_each_did_last() -> None:
    error = judge(NOW, reports({"s1": all_reduce(4)}, called={"s1": SEQ, "s2": 6}), LATE)
    assert isinstance(error, PeerMissing)
    assert error.details["missing_ranks"] == [1, 2]
    assert error.details["silent_nodes"] == ["c"]
    assert "timed out after its timeout of 1.5 s" in error.message
    assert "rank 1 on node b has not called it (its last op was 6)" in error.message
    assert "rank 2 on node c is unknown, its agent does not answer" in error.message


def test_a_rank_whose_gpu_has_not_come_to_the_op_is_busy_and_not_absent() -> None:
    def message(first: int) -> str:
        said = reports({"s1": all_reduce(4)}, called={"s2": 4}, deferred={"s0": 1, "s2": first})
        return str(judge(NOW, said, LATE).message)

    busy = "the GPU of rank 1 on node b is busy"
    assert busy in message(5)
    assert busy in message(SEQ)
    assert busy not in message(SEQ + 1)


def test_a_node_that_cannot_do_its_part_says_why() -> None:
    error = GpuFailed("out of memory", device=1)
    said = reports({"s1": all_reduce(4), "s2": all_reduce(4)})
    judged = judge(NOW, said, Doubt(SEQ, Reason.FAILED, 0.0, packed(error)))
    assert isinstance(judged, GpuFailed)
    assert (judged.message, judged.details) == (error.message, error.details)
