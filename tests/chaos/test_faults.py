"""The script of ops, the contents of tensors and the schedule of faults: pure."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from chaos import contents
from chaos.churn import Change, changes_of
from chaos.faults import (
    ENDURED,
    TAKES_A_NODE,
    TAKES_A_RANK,
    Kind,
    leaves_enough,
    parse,
    schedule,
)
from chaos.script import CONTROL, HALF, WORLD, Op, bursts, group_of, op_at

SOME = 2000


def ops(seed: int) -> list[Op]:
    return [op for burst in islice(bursts(seed), SOME) for op in burst.ops]


def test_every_rank_derives_the_same_ops_from_a_seed() -> None:
    assert ops(1) == ops(1)
    assert ops(1) != ops(2)


def test_the_ops_are_numbered_and_of_every_kind_in_all_groups() -> None:
    found = ops(1)
    assert [op.number for op in found] == list(range(len(found)))
    kinds = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "shift"}
    assert {op.kind for op in found} == kinds | {CONTROL}
    assert {op.group for op in found} == {WORLD, HALF}


def test_a_control_op_is_alone_and_asks_all_seats() -> None:
    with_control = [
        burst for burst in islice(bursts(1), SOME) if CONTROL in [op.kind for op in burst.ops]
    ]
    assert with_control
    for burst in with_control:
        assert [op.group for op in burst.ops] == [WORLD]


def test_the_halves_have_the_even_and_the_odd_seats() -> None:
    (half,) = islice((op for op in ops(1) if op.group == HALF), 1)
    assert [group_of(half, seat) for seat in range(3)] == ["even", "odd", "even"]


def test_an_op_of_an_elastic_group_follows_from_its_number_and_suits_every_size() -> None:
    found = [op_at(1, number) for number in range(SOME)]
    assert found == [op_at(1, number) for number in range(SOME)]
    assert found != [op_at(2, number) for number in range(SOME)]
    assert [op.number for op in found] == list(range(SOME))
    kinds = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"}
    assert {op.kind for op in found} == kinds | {CONTROL}
    assert {(op.group, op.root) for op in found} == {(WORLD, 0.0)}


def test_what_takes_ranks_and_nodes_takes_those_of_elastic_groups_too() -> None:
    assert changes_of(ENDURED) == list(Change)
    assert changes_of([Kind.CUT, Kind.KILL_RANK]) == [Change.KILL_RANK, Change.DRAIN_RANK]
    assert changes_of([]) == [Change.DRAIN_RANK]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_a_sum_tells_who_is_in_it_in_every_dtype(dtype: str) -> None:
    everybody = range(contents.MOST_SEATS)
    total = sum(contents.of_seat(seat, 7, 100, dtype) for seat in everybody)
    assert contents.read(np.asarray(total), 7) == contents.Reading(0xFFFF, True)
    some = np.asarray(sum(contents.of_seat(seat, 7, 100, dtype) for seat in (0, 3, 5)))
    assert contents.read(some, 7) == contents.Reading(0b101001, True)
    assert contents.read(some[30:], 7, start=30) == contents.Reading(0b101001, True)


@pytest.mark.parametrize("position", [0, 50, 99])
def test_one_wrong_element_is_seen(position: int) -> None:
    total = contents.of_seat(0, 7, 100, "float32") + contents.of_seat(1, 7, 100, "float32")
    total[position] += 1
    assert not contents.read(total, 7).exact


def test_what_was_only_moved_must_be_of_a_single_seat() -> None:
    assert contents.read_one(contents.of_seat(3, 7, 10, "int32"), 7) == contents.Reading(8, True)
    assert not contents.read_one(contents.of_seat(3, 7, 10, "int32") * 3, 7).exact
    assert not contents.read_one(np.zeros(10, "int32"), 7).exact


def test_the_blocks_of_a_gather_must_be_in_the_order_of_the_seats() -> None:
    blocks = [contents.of_seat(seat, 7, 10, "int64") for seat in (0, 2, 3)]
    assert contents.read_blocks(np.concatenate(blocks), 7, 3) == contents.Reading(0b1101, True)
    assert not contents.read_blocks(np.concatenate(blocks[::-1]), 7, 3).exact
    assert not contents.read_blocks(np.concatenate([blocks[0], *blocks[:2]]), 7, 3).exact


def test_the_blocks_of_ranks_that_joined_in_any_order_must_be_of_different_seats() -> None:
    blocks = [contents.of_seat(seat, 7, 10, "int64") for seat in (3, 0, 18)]
    found = contents.read_blocks(np.concatenate(blocks), 7, 3, ordered=False)
    assert found == contents.Reading(0b1101, True)
    twice = np.concatenate([blocks[0], *blocks[:2]])
    assert not contents.read_blocks(twice, 7, 3, ordered=False).exact


def test_a_digest_depends_on_every_byte() -> None:
    one = np.zeros(100, np.float32)
    other = one.copy()
    other[99] = -0.0
    assert contents.digest([one]) == contents.digest([one.copy()])
    assert contents.digest([one]) != contents.digest([other])


def test_a_schedule_follows_from_its_seed_and_has_every_kind() -> None:
    found = list(islice(schedule(1, ENDURED), 300))
    assert found == list(islice(schedule(1, ENDURED), 300))
    assert found != list(islice(schedule(2, ENDURED), 300))
    assert {fault.kind for fault in found[: len(ENDURED)]} == set(ENDURED)


def test_second_faults_come_while_the_first_is_mended() -> None:
    gaps = [fault.after for fault in islice(schedule(1, tuple(Kind)), 300)]
    soon = [gap for gap in gaps if gap <= 0.05]
    assert len(soon) > 50
    assert all(0.5 <= gap <= 2.0 for gap in gaps if gap not in soon)


def test_what_takes_somebody_for_good_does_not_end_by_itself() -> None:
    for fault in islice(schedule(1, tuple(Kind)), 300):
        takes = fault.kind in (*TAKES_A_RANK, *TAKES_A_NODE)
        assert (fault.lasts > 0) == (not takes and fault.kind not in (Kind.RESET, Kind.FLIP))


def test_no_kinds_are_no_faults() -> None:
    assert list(schedule(1, ())) == []


def test_names_of_faults_are_parsed() -> None:
    assert parse("reset,kill-rank") == (Kind.RESET, Kind.KILL_RANK)
    assert (parse("endured"), parse("all"), parse("none")) == (ENDURED, tuple(Kind), ())
    with pytest.raises(ValueError, match="fire"):
        parse("fire")


def test_a_node_may_be_killed_as_long_as_one_is_left() -> None:
    assert leaves_enough(Kind.KILL_AGENT, nodes=2, silent=0)
    assert not leaves_enough(Kind.KILL_AGENT, nodes=1, silent=0)


def test_nodes_that_are_heard_outnumber_those_that_are_silent() -> None:
    assert leaves_enough(Kind.STOP_AGENT, nodes=3, silent=0)
    assert not leaves_enough(Kind.STOP_AGENT, nodes=2, silent=0)
    assert not leaves_enough(Kind.PART, nodes=3, silent=1)
    assert not leaves_enough(Kind.KILL_AGENT, nodes=2, silent=1)
    assert leaves_enough(Kind.KILL_RANK, nodes=1, silent=1)
