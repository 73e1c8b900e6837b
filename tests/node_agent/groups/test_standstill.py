"""While nothing can be decided, deadlines stand still, and whoever waits hears what for."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import pytest

from allfold_agent.groups.group import NodeGroup
from allfold_core.errors import PeerMissing
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.protocol.rank_messages import FIRST_PAIR, Message
from allfold_core.survival.reports import Doubt, Reason
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import LocalRank, no_outcome
from tests.support.waiting import wait_until

TIMEOUT = 10.0


@pytest.fixture
def local() -> Iterator[LocalGroups]:
    """Rank 2, on a node of its own, is the one that does not call."""
    with local_groups([[0], [1], [2]]) as local:
        yield local


def call(local: LocalGroups, node: int = 0) -> float:
    """Have all other ranks call; returns when the call of a node's rank counts from."""
    for rank in local.ranks[:2]:
        rank.call(0, [1.0], timeout=TIMEOUT)
    ops = local.groups[node].table.in_flight
    wait_until(lambda: 0 in ops, "the call is there")
    return ops[0].first_call


def told(rank: LocalRank) -> list[tuple[float, str]]:
    return [(round(each["seconds"], 3), each["waits_for"]) for each in rank.holds]


def freeze(group: NodeGroup) -> None:
    """Have a round begin that nothing comes of."""
    group.runs.doubt([Doubt(99, Reason.MISMATCH)])


def test_the_deadline_of_an_op_stands_still_while_a_node_is_silent(local: LocalGroups) -> None:
    began, group = call(local), local.groups[0]
    local.links.cut("node2")
    for after in (1.0, 4.0, 8.0):
        group.deadlines.check(began + after)
    local.links.mend("node2")
    for after in (8.1, TIMEOUT + 6.9):
        group.deadlines.check(began + after)
        assert no_outcome(local.ranks[0], 0.02)
    group.deadlines.check(began + TIMEOUT + 7.1)
    for rank in local.ranks[:2]:
        error = rank.outcome()[1]
        assert isinstance(error, PeerMissing)
        assert error.decided
        assert "rank 2 on node node2 has not called it" in error.message


@pytest.mark.parametrize("numel", [1, 1 << 20])
@pytest.mark.parametrize("kind", [Message.SEND, Message.RECV])
def test_the_deadline_of_a_message_stands_still_too(
    local: LocalGroups, kind: Message, numel: int
) -> None:
    group, rank = local.groups[0], local.ranks[0]
    rank.exchange(kind, 0, [1.0] * numel, 2, timeout=TIMEOUT)
    began = group.p2p.waiting_calls()[0].began
    local.links.cut("node2")
    for after in (1.0, 4.0, 8.0, TIMEOUT + 3.0):
        group.deadlines.check(began + after)
    assert told(rank)[-1] == (12.0, "node node2, which is silent")
    local.links.mend("node2")
    group.deadlines.check(began + 2 * TIMEOUT + 1.9)
    assert no_outcome(rank, 0.02)
    group.deadlines.check(began + 2 * TIMEOUT + 2.1)
    error = rank.outcome()[1]
    assert isinstance(error, PeerMissing)
    assert "timed out after its timeout of 10 s: rank 2 has not" in error.message


def test_many_short_standstills_are_told_as_a_long_one_is(local: LocalGroups) -> None:
    """Without a word of it, who waits would take the agent for stopped at its old deadline."""
    group, rank = local.groups[0], local.ranks[0]
    rank.exchange(Message.RECV, 0, [0.0], 2, timeout=TIMEOUT)
    began = group.p2p.waiting_calls()[0].began
    for after in range(1, 6):
        local.links.cut("node2")
        group.deadlines.check(began + after)
        group.deadlines.check(began + after + 0.6)
        local.links.mend("node2")
        group.deadlines.check(began + after + 0.7)
    assert len(told(rank)) == 2
    assert group.p2p.waiting_calls()[0].extension == pytest.approx(3.0)


def test_a_message_that_comes_after_a_standstill_is_received(local: LocalGroups) -> None:
    group, (taker, _, giver) = local.groups[0], local.ranks
    taker.exchange(Message.RECV, 0, [0.0], 2, timeout=TIMEOUT)
    began = group.p2p.waiting_calls()[0].began
    local.links.cut("node2")
    for after in (1.0, 4 * TIMEOUT):
        group.deadlines.check(began + after)
    local.links.mend("node2")
    group.deadlines.check(began + 4 * TIMEOUT + 0.1)
    giver.exchange(Message.SEND, 0, [5.0], 0)
    for rank in (taker, giver):
        assert rank.outcome()[1] is None
    assert taker.result(FIRST_PAIR) == [5.0]


def test_an_op_that_is_overdue_is_judged_even_where_the_look_at_the_links_fails(
    local: LocalGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: float) -> None:
        raise ZeroDivisionError

    began, group = call(local), local.groups[0]
    monkeypatch.setattr(group.link_watch, "look", fail)
    with pytest.raises(ZeroDivisionError):
        group.deadlines.check(began + TIMEOUT + 0.1)
    assert isinstance(local.ranks[0].outcome()[1], PeerMissing)


def test_a_rank_that_calls_during_the_standstill_does_not_end_the_extension(
    local: LocalGroups,
) -> None:
    began, group = call(local, 1), local.groups[1]
    local.links.cut("node2")
    for after in (1.0, 6.0):
        group.deadlines.check(began + after)
    (op,) = group.table.in_flight.values()
    (session, arrival), *_ = op.calls.items()
    op.add(session, arrival, arrival)
    assert op.next_deadline == op.deadline == op.first_call + TIMEOUT + 5.0


def test_the_deadline_of_an_op_stands_still_during_a_round(local: LocalGroups) -> None:
    local.links.hold(LinkMessageType.FROZEN)
    began, group = call(local), local.groups[0]
    freeze(group)
    wait_until(lambda: local.links.count(LinkMessageType.FROZEN) == 2, "the others have reported")
    wait_until(lambda: group.agreement.machine.frozen, "and so has the leader")
    for after in (1.0, 7.0):
        group.deadlines.check(began + after)
    local.links.release()
    wait_until(lambda: not local.undecided, "the round is over")
    group.deadlines.check(began + TIMEOUT + 5.9)
    assert no_outcome(local.ranks[0], 0.02)
    group.deadlines.check(began + TIMEOUT + 6.1)
    assert isinstance(local.ranks[0].outcome()[1], PeerMissing)


def test_ranks_that_wait_hear_once_a_second_for_whom(local: LocalGroups) -> None:
    began, group = call(local), local.groups[0]
    for after in (0.5, 1.0):
        group.deadlines.check(began + after)
    local.links.cut("node2")
    for after in (2.0, 2.5, 3.0, 3.9):
        group.deadlines.check(began + after)
    local.links.orchestrator_problem = "http://o:7400 does not answer"
    local.links.cut("node1")
    for after in (4.0, 4.1):
        group.deadlines.check(began + after)
    both = "node node1, which is silent and node node2, which is silent"
    assert told(local.ranks[0]) == [
        (1.0, "node node2, which is silent"),
        (2.0, f"{both}; the orchestrator cannot be asked: http://o:7400 does not answer"),
    ]
    assert told(local.ranks[1]) == [], "its own node tells it"


def test_a_new_standstill_is_counted_from_its_own_beginning(local: LocalGroups) -> None:
    began, group = call(local), local.groups[0]
    for after in (1.0, 3.0):
        local.links.cut("node2")
        group.deadlines.check(began + after)
        group.deadlines.check(began + after + 1.25)
        local.links.mend("node2")
        group.deadlines.check(began + after + 1.3)
    assert [seconds for seconds, _ in told(local.ranks[0])] == [1.25, 1.25]


def test_a_time_in_which_no_op_waited_extends_no_deadline(local: LocalGroups) -> None:
    group = local.groups[1]
    local.links.cut("node2")
    group.deferred.add((local.ranks[1].session, 0))
    group.deadlines.check(monotonic() - 100.0)
    group.deferred.clear()
    group.deadlines.check(monotonic() - 99.0)  # the last look, as nothing waits any more
    began = call(local)
    wait_until(lambda: group.table.in_flight, "the op is there")
    for after in (0.0, 2.0):
        group.deadlines.check(began + after)
    (op,) = group.table.in_flight.values()
    assert op.extension == pytest.approx(2.0)


def test_in_a_round_ranks_hear_whose_word_it_needs(local: LocalGroups) -> None:
    local.links.hold(LinkMessageType.FROZEN)
    began = call(local)
    freeze(local.groups[0])
    for group in local.groups:
        wait_until(lambda: group.agreement.machine.frozen, "all are in the round")  # noqa: B023
        for after in (1.0, 2.1):
            group.deadlines.check(began + after)
    assert told(local.ranks[0]) == [(1.1, "the word of node node1 and node node2")]
    assert told(local.ranks[1]) == [(1.1, "the word of node node0")]
    assert told(local.ranks[2]) == [], "it waits for nothing"
    local.links.release()


def test_a_call_that_waits_for_its_gpu_is_reason_enough_to_look(local: LocalGroups) -> None:
    group = local.groups[0]
    assert not group.waiting
    assert group.deadlines.waits_for() == ""
    group.deferred.add((local.ranks[0].session, 0))
    assert group.waiting
    local.links.cut("node2")
    began = monotonic()
    for after in (0.0, 1.5):
        group.deadlines.check(began + after)
    assert group.deadlines.waits_for() == "node node2, which is silent"
    assert group.deadlines.held_for(began + 2.0) == pytest.approx(2.0)
