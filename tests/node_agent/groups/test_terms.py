"""Nodes that are lost: the terms that the orchestrator announces, and what the others do then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from allfold_agent.edges.out_edge import OutEdge
from allfold_core.errors import Evicted, PeerLost, ServiceError, WorldChanged
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.operations import Kind, ReduceOp
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.protocol.rank_messages import Message
from allfold_core.survival.judge import packed
from allfold_core.survival.plans import first_record
from allfold_core.survival.reports import Doubt, Reason
from allfold_core.verdict import LEFT
from tests.node_agent.groups.test_losses import errors_of, shrinking, works
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.fakes.local_rank import LocalRank, no_outcome
from tests.support.waiting import wait_until

MODES: pytest.MarkDecorator = pytest.mark.parametrize("on_loss", ["raise", "shrink"])
VICTIMS = pytest.mark.parametrize("victim", [0, 2], ids=["the leader", "another"])
LAYOUT = [[0, 1], [2], [3, 4]]


def opened(on_loss: Literal["raise", "shrink"], ranks: Sequence[Sequence[int]] = LAYOUT) -> Any:
    return local_groups(ranks, plan=make_plan(ranks, on_loss=on_loss))


def survivors_of(local: LocalGroups, *victims: int) -> list[LocalRank]:
    gone = {f"node{victim}" for victim in victims}
    return [rank for rank in local.ranks if rank.group.node not in gone]


def call(ranks: Sequence[LocalRank], seq: int, numel: int = 5, **options: Any) -> None:
    for rank in ranks:
        rank.call(seq, np.full(numel, 1.0 + rank.rank), **options)


def agreed_upon(ranks: Sequence[LocalRank]) -> bool:
    """Return True if these ranks alone are the members of the current epoch."""
    return all(len(rank.group.current.record.seats) == len(ranks) for rank in ranks)


@VICTIMS
@pytest.mark.parametrize("numel", [5, 100_000], ids=["short", "long"])
def test_an_op_that_lacks_a_lost_node_fails_alike_and_the_next_one_works(
    victim: int, numel: int
) -> None:
    with opened("raise") as local:
        left = survivors_of(local, victim)
        works(local, 0, local.ranks, numel)
        call(left, 1, numel)
        local.lose_node(victim)
        error = errors_of(left, 1)[0]
        assert isinstance(error, PeerLost)
        assert f"on node node{victim}, which refuses connections" in error.message
        works(local, 2, left, numel)
        assert all(rank.group.current.ordinal == 1 for rank in left)


@VICTIMS
@pytest.mark.parametrize("numel", [5, 100_000], ids=["short", "long"])
def test_an_op_that_lacks_a_lost_node_is_redone_by_the_others(victim: int, numel: int) -> None:
    with opened("shrink") as local:
        left = survivors_of(local, victim)
        call(left, 0, numel)
        local.lose_node(victim)
        for rank in left:
            assert rank.outcome() == (0, None)
            assert (rank.result(0) == sum(1.0 + each.rank for each in left)).all()
        works(local, 1, left, numel)


@MODES
def test_what_one_survivor_was_handed_all_others_get(on_loss: Literal["raise", "shrink"]) -> None:
    """The lost node had given everything, and only one other node has got it all."""
    with opened(on_loss, [[0], [1], [2]]) as local:
        for kind in (LinkMessageType.FREEZE, LinkMessageType.FROZEN):
            assert local.links.count(kind) == 0
        call(local.ranks, 0, 1000, strategy="centralized")
        assert local.ranks[0].outcome() == (0, None)
        local.lose_node(2)
        assert local.ranks[1].outcome() == (0, None)
        assert (local.ranks[1].result(0) == 6.0).all()
        if on_loss == "raise":  # of which the ranks have not heard yet
            call(local.ranks[:2], 1)
            errors_of(local.ranks[:2], 1)
        works(local, 2, local.ranks[:2])


@MODES
def test_nodes_that_are_lost_one_after_the_other_leave_a_group_that_works(
    on_loss: Literal["raise", "shrink"],
) -> None:
    with opened(on_loss, [[0], [1], [2], [3, 4]]) as local:
        for seq, victims in enumerate([(0,), (0, 1), (0, 1, 2)]):
            left = survivors_of(local, *victims)
            local.lose_node(victims[-1])
            wait_until(partial(agreed_upon, left), "the others have agreed")
            if on_loss == "shrink":
                works(local, seq, left)
        assert {rank.group.current.ordinal for rank in left} == {3}


def test_a_node_that_is_lost_while_a_round_waits_for_it_is_waited_for_no_more() -> None:
    with opened("shrink") as local:
        left = [rank for rank in survivors_of(local, 2) if rank.rank != 1]
        local.links.cut("node2")
        call(left, 0)
        local.ranks[1].end()
        wait_until(lambda: local.undecided, "the round waits")
        assert no_outcome(left[0], 0.02)
        local.lose_node(2)
        for rank in left:
            assert rank.outcome() == (0, None)
            assert rank.told[0].participants == len(left)


def test_a_second_node_is_lost_while_the_first_one_is_got_over() -> None:
    """Its report is missing, so nothing is decided until the next term."""
    with opened("shrink", [[0], [1], [2], [3]]) as local:
        left = survivors_of(local, 0, 1)
        call(left, 0)
        local.links.cut("node1")
        local.lose_node(0)
        assert no_outcome(left[0], 0.02)
        local.kill(1)
        local.announce(local.term_without(0, 1), 2, 3)
        for rank in left:
            assert rank.outcome() == (0, None)
            assert rank.told[0].participants == 2


def test_a_report_that_comes_before_its_leader_may_take_the_term_counts() -> None:
    """The leader has yet to register with the store that has announced it."""
    with opened("shrink", [[0], [1], [2]]) as local:
        left = survivors_of(local, 0)
        call(left, 0)
        local.kill(0)
        local.links.cut("node0")
        term = local.term_without(0)
        generation = term.generation + 1
        local.groups[2].registered(generation)
        local.announce(term, 2, generation=generation)
        wait_until(lambda: local.links.count(LinkMessageType.FROZEN) == 1, "node2 has reported")
        assert no_outcome(left[1], 0.02)
        local.groups[1].registered(generation)
        local.announce(term, 1, generation=generation)
        for rank in left:
            assert rank.outcome() == (0, None)


@pytest.mark.parametrize("told", [1, 2], ids=["the leader", "another"])
def test_a_node_that_the_orchestrator_cannot_tell_of_a_term_learns_of_it_from_the_others(
    told: int,
) -> None:
    with opened("shrink", [[0], [1], [2]]) as local:
        left = survivors_of(local, 0)
        call(left, 0)
        local.kill(0)
        local.links.cut("node0")
        local.announce(local.term_without(0), told)
        for rank in left:
            assert rank.outcome() == (0, None)
            assert rank.told[0].participants == 2


@pytest.mark.parametrize("told", [1, 2], ids=["the leader", "another"])
def test_what_others_say_of_a_term_is_repeated_when_the_link_is_up_again(told: int) -> None:
    with opened("shrink", [[0], [1], [2], [3]]) as local:
        left = survivors_of(local, 0)
        call(left, 0)
        local.kill(0)
        local.links.cut("node0")
        local.links.hold(LinkMessageType.TERM, LinkMessageType.FROZEN)
        local.announce(local.term_without(0), told, 3)
        kinds = (LinkMessageType.TERM, LinkMessageType.FROZEN)
        expected = [2, 1] if told == 1 else [0, 2]
        wait_until(lambda: [*map(local.links.count, kinds)] == expected, "the others tell of it")
        local.links.drop()
        assert no_outcome(left[0], 0.02)
        local.links.mend(f"node{3 - told}")
        local.links.mend("node3")
        for rank in left:
            assert rank.outcome() == (0, None)


def test_the_generation_of_a_store_that_announces_a_term_again_is_passed_on() -> None:
    with opened("shrink", [[0], [1], [2]]) as local:
        left = survivors_of(local, 0)
        call(left, 0)
        local.kill(0)
        local.links.cut("node0")
        term = local.term_without(0)
        local.groups[1].registered(term.generation + 1)
        local.announce(term, 2)
        wait_until(lambda: local.links.count(LinkMessageType.FROZEN) == 1, "node2 has reported")
        assert no_outcome(left[1], 0.02)
        local.groups[2].registered(term.generation + 1)
        local.announce(term, 2, generation=term.generation + 1)
        wait_until(lambda: local.groups[2].agreement.announced > term.generation, "it is known")
        local.links.mend("node2")
        for rank in left:
            assert rank.outcome() == (0, None)


def test_a_rank_that_dies_when_its_node_has_reported_is_left_out_by_the_next_round() -> None:
    """Its new leader may not know the term yet, and then takes no word of a death."""
    with opened("shrink", [[0], [1], [2, 3]]) as local:
        local.kill(0)
        local.links.cut("node0")
        term = local.term_without(0)
        local.announce(term, 2)
        wait_until(lambda: local.links.count(LinkMessageType.FROZEN) == 1, "node2 has reported")
        local.ranks[3].end()
        wait_until(lambda: local.links.count(LinkMessageType.DOWN) == 1, "node2 has told of it")
        left = local.ranks[1:3]
        call(left, 0)
        local.announce(term, 1)
        for rank in left:
            assert rank.outcome() == (0, None)
            assert rank.told[0].participants == 2


def test_what_the_last_leader_was_to_judge_the_new_one_judges() -> None:
    error = ServiceError("it cannot be done here")
    with opened("shrink", [[0], [1], [2]]) as local:
        local.links.cut("node0")
        left = survivors_of(local, 0)
        call(left[:1], 0)
        left[0].group.runs.doubt([Doubt(0, Reason.FAILED, error=packed(error))])
        local.lose_node(0)
        # Before the other one calls: among the two that are left the op could be done meanwhile.
        wait_until(lambda: all(each.group.failure(0) for each in left), "the op is judged")
        call(left[1:], 0)
        assert {error.message for error in errors_of(left, 0)} == {error.message}
        works(local, 1, left)


def test_a_node_without_ranks_is_left_out_and_nothing_else_changes() -> None:
    with opened("raise") as local:
        local.lose(2, how=LEFT)
        left = survivors_of(local, 1)
        call(left, 0)
        errors_of(left, 0)
        works(local, 1, left)
        local.lose_node(1)
        wait_until(lambda: len(local.groups[0].agreement.term.voters) == 2, "the term is there")
        works(local, 2, left)
        assert {rank.told[2].epoch for rank in left} == {1}
        assert local.notes.left_out == {"node0": {"node1"}, "node2": {"node1"}}


@pytest.mark.parametrize(("kind", "given"), [(Kind.ALL_GATHER, 1), (Kind.REDUCE_SCATTER, 3)])
def test_an_op_shaped_by_the_world_size_fails_also_where_others_are_redone(
    kind: Kind, given: int
) -> None:
    with shrinking([[0], [1], [2]]) as local:
        left = survivors_of(local, 2)
        for rank in left:
            op = ReduceOp.SUM if kind is Kind.REDUCE_SCATTER else None
            rank.run(0, kind, [1.0] * given, given, 4 - given, op=op)
        local.lose_node(2)
        assert isinstance(errors_of(left, 0)[0], WorldChanged)
        works(local, 1, left)


# The node that is left out


def test_a_node_that_is_left_out_tells_its_ranks_why() -> None:
    with opened("shrink") as local:
        call(local.ranks[2:3], 0)
        local.announce(local.term_without(1, how="was silent"), 1)
        _, error = local.ranks[2].outcome()
        assert isinstance(error, Evicted)
        assert "goes on without node node1, which was silent" in error.message
        call(local.ranks[2:3], 1)
        assert isinstance(local.ranks[2].outcome()[1], Evicted)


def test_a_node_that_has_not_heard_of_it_learns_from_the_others_that_it_is_left_out() -> None:
    with opened("shrink") as local:
        local.announce(local.term_without(2, how="was silent"), 0, 1)
        wait_until(lambda: not local.undecided, "the others have agreed")
        local.ranks[3].end()  # which its node tells the leader
        call(local.ranks[4:], 0)
        assert isinstance(local.ranks[4].outcome()[1], Evicted)
        works(local, 0, local.ranks[:3])


def test_what_becomes_complete_on_a_node_that_is_left_out_has_failed_already() -> None:
    with opened("shrink", [[0], [1]]) as local:
        rank, group = local.ranks[0], local.groups[0]
        call([rank], 0)
        group.evict(Evicted("the group goes on without this node"))
        assert isinstance(rank.outcome()[1], Evicted)
        group.runs.completed(0, group.current.record.stamp, -1)
        assert group.agreement.machine.watermark == -1
        assert no_outcome(rank, 0.02)
        call([rank], 1)
        assert isinstance(rank.outcome()[1], Evicted)


def test_a_term_that_an_earlier_store_announces_is_not_taken() -> None:
    with opened("shrink") as local:
        term = local.term_without(2)
        for group in local.groups[:2]:
            group.registered(term.generation + 1)
        local.announce(term, 0, 1)
        works(local, 0, local.ranks)
        assert all(group.agreement.term.number < term.number for group in local.groups)
        local.announce(term, 0, 1, generation=term.generation + 1)
        wait_until(lambda: local.groups[0].agreement.term == term, "it is taken")


def test_the_record_of_a_term_is_kept_as_soon_as_the_term_is_taken() -> None:
    with opened("shrink") as local:
        term = local.term_without(2)
        group = local.groups[0]
        first = group.record
        assert first == first_record(group.plan)
        local.announce(term, 0, generation=term.generation + 1)
        works(local, 0, local.ranks)
        assert group.record is first
        local.announce(term, 0)
        wait_until(lambda: group.record is not first, "it is taken")
        assert group.record.term.voters == ("node0", "node1")


def test_the_record_of_a_term_that_another_node_told_of_is_made_from_the_last_one() -> None:
    with opened("shrink", [[0], [1], [2]]) as local:
        group = local.groups[2]
        known = group.record
        generation = known.generation + 1
        for each in local.groups:
            each.registered(generation)
        local.announce(local.term_without(0), 1, generation=generation)
        wait_until(lambda: group.record is not known, "node2 has learned of the term")
        assert group.record == replace(
            known,
            term=group.agreement.term,
            voters={node: known.voters[node] for node in ("node1", "node2")},
            generation=generation,
        )


def test_a_receive_from_any_rank_opens_no_edge_to_a_lost_node() -> None:
    with opened("shrink", [[0], [1], [2]]) as local:
        left, group = local.ranks[:2], local.groups[0]
        local.lose_node(2)
        wait_until(lambda: group.members.life_of("node2") is None, "the edges are closed")
        left[0].exchange(Message.RECV, 0, [0.0], ANY_SOURCE)
        left[1].exchange(Message.SEND, 0, [7.0], 0)
        assert [rank.outcome()[1] for rank in left] == [None, None]
        assert "node2" not in group.p2p.edges._in
        group._edges.edge_lost("node2", PeerLost("it refuses connections"))
        works(local, 0, left)


def ends(edge: OutEdge) -> bool:
    """Return True if an edge takes no connection any more."""
    try:
        edge.attach(edge.acknowledged())
    except PeerLost:
        return True
    return False


def test_the_edges_of_a_lost_node_are_closed_and_it_gets_no_new_ones() -> None:
    with opened("shrink", [[0], [1], [2]]) as local:
        works(local, 0, local.ranks, 1000)
        group = local.groups[0]
        out = group.edges.out("node2")
        local.announce(local.term_without(2), 0, 1)
        wait_until(lambda: ends(out), "the edge has ended")
        works(local, 1, local.ranks[:2], 1000)
