"""Ops of the lane whose result is in parts: each node says that it holds its own before."""

from __future__ import annotations

import numpy as np
import pytest

from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameType
from tests.node_agent.groups.lane_exchanges import FIRST, Exchanges

SPREAD = Fingerprint(Kind.REDUCE_SCATTER, ReduceOp.SUM, DType.FLOAT32, (2,), -1, AUTO)
TO_FIRST = Fingerprint(Kind.REDUCE, ReduceOp.SUM, DType.FLOAT32, (4,), 0, AUTO)


@pytest.fixture(autouse=True)
def _nodes_get_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the ops were long: of so short ones, each node gets the whole result."""
    monkeypatch.setattr("allfold_agent.groups.lane.program.sends_everything", lambda *_: False)


@pytest.fixture
def two() -> Exchanges:
    group = Exchanges(((0,), (1,)))
    group.open()
    return group


def post(group: Exchanges, seq: int, fingerprint: Fingerprint = SPREAD) -> None:
    for rank in (0, 1):
        group.nodes.post(rank, seq, fingerprint, np.full(4, rank + 1, np.float32).tobytes())


def words(group: Exchanges) -> list[str]:
    """Return the nodes whose word is on its way."""
    return [each.source for each in group.on_the_way if each.header.type is FrameType.SIGNAL]


def test_a_part_is_handed_out_once_all_nodes_have_said_that_they_hold_theirs(
    two: Exchanges,
) -> None:
    post(two, FIRST)
    two.step()
    two.deliver()
    two.step()
    assert words(two) == two.names
    assert two.published(FIRST) == [False, False]
    two.deliver(1)
    two.step()
    assert two.published(FIRST) == [True, False]
    two.run()
    assert two.published(FIRST) == [True, True]
    for rank in (0, 1):
        found = two.nodes.found(rank, FIRST % 8, SPREAD, 8)
        assert np.frombuffer(found, np.float32).tolist() == [3.0, 3.0]


def test_who_gets_nothing_holds_it_from_the_first_frame_on(two: Exchanges) -> None:
    post(two, FIRST, TO_FIRST)
    two.step()
    two.deliver()
    two.step()
    assert words(two) == ["node0"]
    assert two.published(FIRST) == [True, False], "the root need not wait for a word"
    two.run()
    assert two.published(FIRST) == [True, True]


def test_of_an_op_whose_words_are_missing_the_silent_nodes_are_named(two: Exchanges) -> None:
    post(two, FIRST)
    two.step()
    two.deliver()
    two.step()
    assert two.all[0].silent_nodes(FIRST) == ("node1",)


def test_a_part_that_is_held_as_the_lane_is_closed_is_found_then(two: Exchanges) -> None:
    post(two, FIRST)
    two.step()
    two.deliver()
    two.step()
    two.close(0)
    two.run()
    assert two.published(FIRST) == [False, True]
    found = two.all[0].take_held_part()
    assert found is not None
    seq, result = found
    assert seq == FIRST
    assert result.kept.array(0, 2).tolist() == [3.0, 3.0]
    assert two.all[0].take_held_part() is None


def test_an_op_of_which_this_node_has_not_said_that_it_holds_its_part_is_not_held(
    two: Exchanges,
) -> None:
    post(two, FIRST)
    two.step()
    two.close(0)
    two.deliver()
    two.step()
    assert "node0" not in words(two)
    assert two.all[0].take_held_part() is None


def test_parts_are_remembered_until_they_are_final_everywhere(two: Exchanges) -> None:
    for seq in range(FIRST, FIRST + 64):
        post(two, seq)
        two.run()
    last = FIRST + 63
    assert [seq for seq, _ in two.all[0].results.parts()] == [last]
    assert two.finals[0] == [last]
    assert two.all[0].results.known_final == last


def test_parts_behind_an_open_op_of_the_long_lane_are_remembered_but_not_without_end(
    two: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.groups.lane.exchange._MOST_PARTS", 128)
    two.are_final = False
    for seq in range(FIRST, FIRST + 150):
        post(two, seq)
        two.run()
    assert len(two.all[0].results.parts()) == 128
    assert not two.finals[0]
    assert len(two.troubles[0]) == 1
    assert "an earlier one is still open" in two.troubles[0][0]
