"""The places of late ranks: they keep the result, and answer the rank's own call with it."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_agent.execution.op import Arrival
from allfold_agent.execution.stand_ins import StandIn, StandIns
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, Quorum, ReduceOp
from allfold_core.protocol.rank_messages import Message, OpMessage, Outcome, Region
from tests.support.fakes.local_groups import make_plan

NUMEL = 4
REPORT = {"weights": "", "rank": 0, "bytes": 3, "seconds": 1.0}


class Connection:
    """The connection of a rank: keeps what it is sent."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def send_outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def spec(weight: float = 0.0, numel: int = NUMEL) -> OpSpec:
    print_ = Fingerprint(
        Kind.ALL_REDUCE,
        ReduceOp.WEIGHTED_MEAN,
        DType.FLOAT32,
        (numel,),
        -1,
        AUTO,
        factor=weight,
        quorum=Quorum(1, 1.0),
    )
    return OpSpecs(make_plan(((0,),)), 0).of(print_.pack())


def place(seq: int = 7) -> StandIn:
    return StandIn(0, seq, spec(), 0)


def late(connection: Connection, called: OpSpec | None = None) -> tuple[Arrival, bytearray]:
    target = bytearray(NUMEL * 4)
    called = called or spec(2.0)
    region = Region(0, 0)
    message = OpMessage(5, 7, 1.0, region, region, called.packed)
    memory: Any = memoryview(target)
    connected: Any = connection
    return Arrival(0, connected, 5, message, called, memory, memory, 0.0, 0.0), target


def done(seq: int = 7) -> Outcome:
    return Outcome(Message.DONE, 0, seq, 3, 2, dict(REPORT), 1)


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_late_rank_gets_the_result_and_what_is_told_of_it(comes_first: bool) -> None:
    """Whether it calls before the op is done or afterwards."""
    stand_in, connection = place(), Connection()
    arrival, target = late(connection)
    kept: list[bytes] = []

    def keep() -> None:
        kept.append(bytes(target))

    if comes_first:
        stand_in.take(arrival, lambda: 2, keep)
        assert connection.outcomes == []
    stand_in.arrival.target[:] = b"result".ljust(16)  # type: ignore[index]
    stand_in.send_outcome(done())
    if not comes_first:
        stand_in.take(arrival, lambda: 2, keep)
    assert bytes(target) == b"result".ljust(16)
    assert kept == [bytes(16)], "its input, once"
    assert connection.outcomes == [
        Outcome(Message.DONE, 5, 7, 3, 2, {**REPORT, "behind": 2, "kept": True}, 1),
    ]


def test_a_late_rank_gets_the_error_of_the_others() -> None:
    stand_in, connection = place(), Connection()
    stand_in.send_outcome(Outcome(Message.FAILED, 0, 7, 1, body={"code": "AF301"}))
    arrival, target = late(connection)
    stand_in.take(arrival, lambda: 0, None)
    assert connection.outcomes == [Outcome(Message.FAILED, 5, 7, 1, body={"code": "AF301"})]
    assert not any(target)


def test_a_late_rank_that_calls_something_else_is_told_so_alone() -> None:
    stand_in, connection = place(), Connection()
    stand_in.send_outcome(done())
    arrival, target = late(connection, spec(2.0, numel=3))
    kept: list[None] = []
    stand_in.take(arrival, lambda: 0, lambda: kept.append(None))
    assert kept == [], "the caller has it: it would be twice in what follows"
    (outcome,) = connection.outcomes
    assert outcome.kind is Message.FAILED
    assert outcome.body is not None
    assert outcome.body["code"] == "AF200"
    assert "rank 0 called all_reduce(weighted_mean, float32[3]" in outcome.body["message"]
    assert not any(target)


def test_results_that_are_too_many_are_given_up_from_the_oldest_on() -> None:
    """But none of an op that still runs, and never the newest."""
    kept = StandIns(lambda: 3 * NUMEL * 4)
    places = [place(seq) for seq in range(5)]
    for seq in (0, 1, 3):
        places[seq].send_outcome(done(seq))
    for seq, each in enumerate(places):
        kept.add("s", seq, each)
    assert kept.behind("s") == 3
    answers = []
    for seq in range(5):
        found, connection = kept.pop("s", seq), Connection()
        assert found is places[seq]
        if found.is_settled:
            found.take(late(connection)[0], lambda: 0, None)
            answers.append(connection.outcomes[0])
    assert [each.kind for each in answers] == [Message.FAILED, Message.FAILED, Message.DONE]
    assert answers[0].body is not None
    assert "is not kept any more" in answers[0].body["message"]


def test_the_places_of_a_rank_that_has_ended_are_forgotten() -> None:
    kept = StandIns(lambda: 0)
    for session in ("s", "t"):
        kept.add(session, 0, place(0))
    kept.forget("s")
    assert kept.pop("s", 0) is None
    assert kept.pop("t", 0) is not None
    assert kept.pop("t", 0) is None
