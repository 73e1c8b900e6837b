"""The judge of elastic groups: what it must object to, and what not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chaos.churn_judge import judge_churn
from chaos.judge import CRASH, DIFFERENT, ERROR, MISSING, SHRINK, WRONG, Life, Loss
from chaos.records import CRASHED, DRAINED, FINISHED, RankLog, Record

MASKS = {0: 0b011, 1: 0b011, 2: 0b111, 3: 0b111}
"""The participants of each op: the seats 0 and 1, and from op 2 on a newcomer."""


def op(number: int, rank: int, **values: Any) -> Record:
    mask = MASKS[number]
    size = mask.bit_count()
    usual: dict[str, Any] = {
        "digest": f"d{mask}", "mask": mask, "participants": size, "world": size,
        "epoch": int(number >= 2), "rank": rank, "opening": 1,
    }  # fmt: skip
    return Record(number, "world", "all_reduce", number, number + 0.5, **usual | values)


def log(seat: int, numbers: range, ending: str = FINISHED, **values: Any) -> RankLog:
    return RankLog(seat, "node0", ending, [op(number, seat, **values) for number in numbers])


def logs() -> list[RankLog]:
    return [log(0, range(4)), log(1, range(4)), log(2, range(2, 4))]


def changed(seat: int, number: int, **values: Any) -> list[RankLog]:
    found = logs()
    records = found[seat].records
    records[:] = [replace(each, **values) if each.number == number else each for each in records]
    return found


def kinds(found: list[RankLog], losses: list[Loss] | None = None) -> list[str]:
    life = Life("life", found, losses or [Loss(-1.0, frozenset())], SHRINK)
    return [finding.kind for finding in judge_churn(life)]


def test_a_newcomer_has_no_ops_before_its_first() -> None:
    assert kinds(logs()) == []


def test_a_rank_that_was_told_to_leave_need_not_call_what_comes_later() -> None:
    assert kinds([log(0, range(4)), log(1, range(2), DRAINED), log(2, range(2, 4))]) == []


@pytest.mark.parametrize("seat", [0, 2])
@pytest.mark.parametrize("values", [{"digest": "x"}, {"epoch": 3}, {"world": 4}])
def test_another_outcome_is_found_also_of_a_newcomer(seat: int, values: dict[str, Any]) -> None:
    assert kinds(changed(seat, 3, **values)) == [DIFFERENT]


def test_two_ranks_with_one_number_are_found() -> None:
    assert kinds(changed(2, 2, rank=1)) == [DIFFERENT]


def test_a_result_without_the_newcomer_is_found() -> None:
    found = logs()
    for seat in range(3):
        found = [*found[:seat], *changed(seat, 2, mask=0b011, participants=2)[seat:]]
    assert WRONG in kinds(found)


def test_an_op_that_a_rank_did_not_call_between_others_is_found() -> None:
    found = logs()
    del found[1].records[1]
    assert kinds(found) == [MISSING]


def test_an_op_that_can_be_done_again_must_not_fail() -> None:
    error = {"code": "PeerLost", "text": "it was lost", "digest": ""}
    found = [RankLog(0, "node0", FINISHED, [op(0, 0, **error)])]
    assert kinds(found) == [ERROR]


def test_a_rank_that_ended_by_itself_is_found_unless_it_was_lost() -> None:
    found = [log(0, range(4)), log(1, range(2), CRASHED)]
    assert kinds(found) == [CRASH]
    assert kinds(found, [Loss(-1.0, frozenset([1]))]) == []


def test_groups_of_one_opening_number_that_were_not_there_together_are_different() -> None:
    alone = {"mask": 1 << 5, "participants": 1, "digest": "x"}
    records = [op(number, 0, **alone) for number in range(2)]
    at_once = RankLog(5, "node0", FINISHED, records)
    assert DIFFERENT in kinds([*logs(), at_once])
    later = [replace(each, called=each.called + 9, ended=each.ended + 9) for each in records]
    assert kinds([*logs(), replace(at_once, records=later)]) == []
