"""Ops that the short lane between nodes cannot do: said once, and nothing is published."""

from __future__ import annotations

import pytest

from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from tests.node_agent.groups.lane_exchanges import (
    FIRST,
    Exchanges,
    frame,
    in_trouble,
    summing,
)


@pytest.fixture
def two() -> Exchanges:
    return Exchanges(((0,), (1,)))


@pytest.mark.parametrize(
    "other", [summing(op=ReduceOp.MAX), summing(2), summing(5)], ids=["op", "shorter", "longer"]
)
def test_different_calls_on_two_nodes_are_trouble_on_both(
    two: Exchanges, other: Fingerprint
) -> None:
    two.open()
    two.post(0, FIRST)
    two.post(1, FIRST, other)
    in_trouble(two, 0, 1)


def test_a_payload_of_another_size_is_trouble(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST)
    header, payload = frame(FIRST)
    two.take(0, "node1", header, payload[:-4])
    in_trouble(two, 0)
    assert "12 bytes at 0 are no chunk of it" in two.troubles[0][0]


def test_different_calls_on_one_node_are_trouble_there_and_nothing_is_sent() -> None:
    group = Exchanges(((0, 1), (2,), (3,)))
    group.open()
    group.post(0, FIRST)
    group.post(1, FIRST, summing(op=ReduceOp.MAX))
    group.post(2, FIRST)
    group.post(3, FIRST)
    in_trouble(group, 0)
    assert "node0" not in {each.source for each in group.sent}


def test_an_op_that_is_done_here_in_the_long_lane_and_there_in_the_short_one_is_trouble(
    two: Exchanges,
) -> None:
    """Whichever is known first: the message of the local rank, or the frame of the other node."""
    two.open()
    assert not two.all[0].note_message(FIRST)
    two.post(1, FIRST)
    two.run()
    assert len(two.troubles[0]) == 1
    two = Exchanges(((0,), (1,)))
    two.open()
    two.post(1, FIRST)
    two.run()
    assert two.all[0].note_message(FIRST)
    assert not two.all[0].note_message(FIRST + 1)


def test_ops_of_the_long_lane_are_forgotten_once_they_are_over(two: Exchanges) -> None:
    two.open()
    for seq in range(FIRST, FIRST + 5000):
        two.all[0].note_message(seq)
    assert len(two.all[0]._messages) <= 4096


def test_a_call_that_no_agent_can_do_is_trouble(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST, Fingerprint(Kind.BROADCAST, None, DType.FLOAT32, (4,), 9, AUTO))
    in_trouble(two, 0)


def test_a_failure_of_the_arithmetic_is_trouble_and_is_logged(
    two: Exchanges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not my day")

    monkeypatch.setattr("allfold_agent.groups.lane.program.LaneProgram.finish", fail)
    two.open()
    two.post_all(FIRST)
    in_trouble(two, 0, 1)
    assert "not my day" in caplog.text


def test_after_trouble_the_lane_works_once_it_is_opened_again(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST)
    two.post(1, FIRST, summing(5))
    in_trouble(two, 0, 1)
    for node in (0, 1):
        two.close(node)
    two.open(FIRST + 8)
    two.post_all(FIRST + 8)
    two.run()
    assert two.published(FIRST + 8) == [True, True]
    assert [len(each) for each in two.troubles] == [1, 1]
