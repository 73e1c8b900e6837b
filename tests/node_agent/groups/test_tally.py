"""The tally of a group's ops."""

from __future__ import annotations

from allfold_agent.groups.flight_recorder import OpRecord, OpStage
from allfold_agent.groups.outcomes import LONG, SHORT, ErrorCounts, Tally
from allfold_core.agent_answers import RecordedRound
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp

ALL_REDUCE = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (4,), -1, "auto")
KEY = ("all_reduce", "ring", "float32")


def record(
    seconds: float, late: float, error: str = "", called: Fingerprint | None = ALL_REDUCE
) -> OpRecord:
    arrivals = {0: 0.0, 1: late} if called else {}
    state = OpStage.FAILED if error else OpStage.COMPLETED
    return OpRecord(0, 0, 2, called, "ring", state, 0.0, seconds, arrivals, error=error)


def test_lanes_are_told_apart() -> None:
    tally = Tally(ErrorCounts())
    for seconds, lane in ((0.5, LONG), (0.25, LONG), (0.125, SHORT)):
        tally.count(record(seconds, seconds / 2), lane)
    assert tally.seconds[*KEY, LONG].sum == 0.75
    assert tally.seconds[*KEY, SHORT].sum == 0.125
    assert {lane: skews.sum for lane, skews in tally.skews.items()} == {LONG: 0.375, SHORT: 0.0625}


def test_failed_ops_are_counted_with_those_of_other_groups_and_take_no_time() -> None:
    errors = ErrorCounts()
    one, other = Tally(errors), Tally(errors)
    one.count(record(30.0, 0.0, "AF302"), LONG)
    other.count(record(30.0, 0.0, "AF302"), LONG)
    other.count(record(1.0, 0.0, "AF301", called=None), LONG)
    assert errors.by_code() == {"AF302": 2, "AF301": 1}
    assert not one.seconds


def test_rounds_are_counted_with_the_ranks_that_were_late_and_the_latest_kept() -> None:
    tally = Tally(ErrorCounts())
    for number in range(20):
        late = [1] if number % 4 == 0 else []
        told: RecordedRound = {"weight": 2.0, "absent": [1, 3], "late": late, "sent_bytes": 8}
        done = record(1.0, 0.0)._replace(seq=number, round=told)
        tally.count(done, LONG)
    tally.count(done._replace(error="AF302"), LONG)
    tally.count(record(1.0, 0.0), LONG)
    assert (tally.round_count, tally.late_ranks) == (20, 5)
    assert [each.seq for each in tally.rounds] == [*range(12, 20)]


def test_an_op_in_which_no_rank_here_has_a_part_is_not_counted() -> None:
    tally = Tally(ErrorCounts())
    tally.count(record(1.0, 0.0, called=None), LONG)
    assert not tally.seconds


def test_the_number_of_called_ops_begins_with_the_node_and_never_falls() -> None:
    tally = Tally(ErrorCounts())
    assert tally.called(100, -1) == 0
    assert tally.called(100, 104) == 5
    assert tally.called(0, 102) == 5
    assert tally.called(0, 109) == 10
