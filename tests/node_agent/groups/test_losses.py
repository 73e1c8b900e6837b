"""Ranks that die or leave: what the nodes agree upon, and what they have to leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.edges.opening import Traffic
from allfold_core.errors import (
    AllfoldError,
    BelowMinWorld,
    PeerLost,
    RootLost,
    ServiceError,
    WorldChanged,
)
from allfold_core.operations import Kind
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.reports import Doubt, Reason
from allfold_core.verdict import LEFT
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.fakes.local_rank import SECONDS, LocalRank, no_outcome
from tests.support.fakes.relays import Dam
from tests.support.waiting import wait_until

LAYOUTS = pytest.mark.parametrize(
    "ranks", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [0, 2]]], ids=str
)


@contextmanager
def shrinking(ranks: Sequence[Sequence[int]], min_world: int = 1) -> Iterator[LocalGroups]:
    """Groups whose ops are redone by those who are left."""
    plan = make_plan(ranks, on_loss="shrink", min_world=min_world)
    with local_groups(ranks, plan=plan) as local:
        yield local


def errors_of(ranks: Sequence[LocalRank], seq: int) -> list[AllfoldError]:
    """The next outcome of each rank, which is an error of this op."""
    outcomes = [rank.outcome() for rank in ranks]
    assert [each for each, _ in outcomes] == [seq] * len(ranks)
    errors = [error for _, error in outcomes if error is not None]
    assert len(errors) == len(ranks)
    assert len({(type(error), str(error)) for error in errors}) == 1, "the same for all"
    return errors


def works(local: LocalGroups, seq: int, ranks: Sequence[LocalRank], numel: int = 5) -> None:
    """Have those who are left do an op."""
    for rank in ranks:
        rank.call(seq, np.full(numel, 1.0 + rank.rank))
    for rank in ranks:
        assert rank.outcome() == (seq, None)
        assert (rank.result(seq) == sum(1.0 + each.rank for each in ranks)).all()
        assert rank.told[seq].participants == len(ranks)
    assert not any(rank.group.evicted for rank in ranks)


# Errors of what cannot be done any more


@LAYOUTS
@pytest.mark.parametrize("victim", range(4))
def test_an_op_that_a_rank_died_without_calling_fails_alike_and_the_next_one_works(
    ranks: list[list[int]], victim: int
) -> None:
    with local_groups(ranks) as local:
        works(local, 0, local.ranks)
        survivors = [rank for rank in local.ranks if rank.rank != victim]
        for rank in survivors:
            rank.call(1, [1.0])
        local.ranks[victim].end()
        error = errors_of(survivors, 1)[0]
        assert isinstance(error, PeerLost)
        node = local.ranks[victim].group.node
        assert f"rank {victim} on node {node}, which ended without leaving the group" in str(error)
        assert error.details["ranks"] == [victim]
        assert [rank.view for rank in survivors] == [1] * 3
        works(local, 2, survivors)


@LAYOUTS
def test_two_ranks_that_die_one_after_the_other_leave_a_group_of_two(
    ranks: list[list[int]],
) -> None:
    with local_groups(ranks) as local:
        local.lose(1)
        local.lose(3)
        survivors = [local.ranks[0], local.ranks[2]]
        for rank in survivors:
            rank.call(0, [1.0])
        error = errors_of(survivors, 0)[0]
        assert isinstance(error, PeerLost)
        assert [rank.view for rank in survivors] == [2, 2]
        works(local, 1, survivors)


def test_a_rank_that_leaves_in_order_is_said_to_have_left() -> None:
    with local_groups([[0], [1]]) as local:
        local.lose(1, how=LEFT)
        local.ranks[0].call(0, [1.0])
        error = errors_of(local.ranks[:1], 0)[0]
        assert error.message == (
            "group 'test' has lost rank 1 on node node1, which left the group; 1 of 2 ranks is left"
        )
        works(local, 1, local.ranks[:1])


def test_a_group_is_over_everywhere_when_its_last_rank_has_left() -> None:
    with local_groups([[0], [1, 2]]) as local:
        local.lose(0, 2, how=LEFT)
        assert local.notes.over == []
        local.lose(1, how=LEFT)
        wait_until(lambda: sorted(local.notes.over) == ["node0", "node1"], "it is over")
        assert all(group.is_empty for group in local.groups)


# on_loss="shrink"


@LAYOUTS
@pytest.mark.parametrize("numel", [5, 100_000], ids=["short", "long"])
def test_an_op_is_redone_by_those_who_are_left(ranks: list[list[int]], numel: int) -> None:
    with shrinking(ranks) as local:
        works(local, 0, local.ranks, numel)
        survivors = [rank for rank in local.ranks if rank.rank != 2]
        for rank in survivors:
            rank.call(1, np.full(numel, 1.0 + rank.rank))
        local.ranks[2].end()
        for rank in survivors:
            assert rank.outcome() == (1, None)
            assert (rank.result(1) == 7.0).all()
            assert (rank.told[1].epoch, rank.told[1].participants) == (1, 3)
        works(local, 2, survivors, numel)


def test_ops_in_flight_are_redone_in_their_order() -> None:
    with shrinking([[0], [1], [2]]) as local:
        survivors = local.ranks[:2]
        for seq in range(50):
            for rank in survivors:
                rank.call(seq, np.full(200, 1.0), strategy="ring" if seq % 2 else "direct")
        local.ranks[2].end()
        for rank in survivors:
            assert dict(rank.outcome() for _ in range(50)) == dict.fromkeys(range(50))
            assert all((rank.result(seq) == 2.0).all() for seq in range(50))


def test_an_attempt_that_fails_after_it_was_given_up_does_not_fail_the_next_one() -> None:
    with shrinking([[0], [1], [2]]) as local:
        group, attempt = local.groups[0], local.groups[0].current.stamp
        local.ranks[0].call(0, [1.0])
        local.lose(2)
        rounds = local.rounds
        group.runs.cannot_run(0, RuntimeError("no memory"), attempt)
        wait_until(lambda: local.rounds > rounds and not local.undecided, "it was judged")
        local.ranks[1].call(0, [2.0])
        for rank in local.ranks[:2]:
            assert rank.outcome() == (0, None)
            assert rank.result(0) == [3.0]


def test_a_call_with_an_older_view_is_good_for_an_op_that_shrinks() -> None:
    with shrinking([[0], [1], [2]]) as local:
        local.lose(2)
        assert [rank.view for rank in local.ranks] == [0, 0, 0]
        works(local, 0, local.ranks[:2])


def test_an_op_whose_tensors_are_made_for_the_world_fails_with_world_changed() -> None:
    with shrinking([[0], [1], [2]]) as local:
        survivors = local.ranks[:2]
        for rank in survivors:
            rank.run(0, Kind.ALL_GATHER, [1.0], 1, 3)
        local.ranks[2].end()
        error = errors_of(survivors, 0)[0]
        assert isinstance(error, WorldChanged)
        assert "made for 3 ranks" in error.message
        for rank in survivors:
            rank.run(1, Kind.ALL_GATHER, [1.0 + rank.rank], 1, 2)
            assert rank.view == 1
        for rank in survivors:
            assert rank.outcome() == (1, None)
            assert list(rank.result(1)) == [1.0, 2.0]


def test_an_op_without_its_root_fails_with_root_lost() -> None:
    with shrinking([[0], [1], [2]]) as local:
        survivors = local.ranks[:2]
        for rank in survivors:
            rank.run(0, Kind.BROADCAST, [], 1, 1, root=2, strategy="centralized")
        local.ranks[2].end()
        error = errors_of(survivors, 0)[0]
        assert isinstance(error, RootLost)
        works(local, 1, survivors)


def test_no_op_is_done_by_fewer_ranks_than_min_world() -> None:
    with shrinking([[0], [1], [2]], min_world=2) as local:
        local.lose(2)
        works(local, 0, local.ranks[:2])
        local.ranks[0].call(1, [1.0])
        local.ranks[1].end()
        error = errors_of(local.ranks[:1], 1)[0]
        assert isinstance(error, BelowMinWorld)


# Links that break meanwhile


def test_a_death_that_was_told_into_a_broken_link_is_told_again() -> None:
    with local_groups([[0], [1]]) as local:
        local.links.cut("node1")
        local.ranks[1].end()
        local.ranks[0].call(0, [1.0])
        assert no_outcome(local.ranks[0], 0.05)
        local.links.mend("node1")
        errors_of(local.ranks[:1], 0)
        works(local, 1, local.ranks[:1])


@pytest.mark.parametrize(
    "lost", [LinkMessageType.FREEZE, LinkMessageType.FROZEN, LinkMessageType.INSTALL]
)
def test_a_round_goes_on_when_the_link_is_up_again(lost: LinkMessageType) -> None:
    """Whichever message went down with it, the other end has it repeated."""
    with local_groups([[0, 1], [2]]) as local:
        survivors = [local.ranks[0], local.ranks[2]]
        for rank in survivors:
            rank.call(0, [1.0])
        local.links.hold(lost)
        local.ranks[1].end()
        wait_until(lambda: local.links.count(lost), "it is on its way")
        local.links.cut("node1")
        local.links.drop()
        local.links.mend("node1")
        errors_of(survivors, 0)
        works(local, 1, survivors)


# Results of other nodes


@contextmanager
def one_side_done(numel: int) -> Iterator[LocalGroups]:
    """Node 0 has handed the result of op 0 to its ranks; what node 1 is to get is stuck."""
    dam = Dam(0, 1, after=1, lane=Traffic.OPS)
    with local_groups([[0], [1, 2]], dam=dam) as local:
        for rank in local.ranks:
            rank.call(0, np.full(numel, 1.0 + rank.rank))
        assert local.ranks[0].outcome() == (0, None)
        yield local


@pytest.mark.parametrize("numel", [5, 100_000], ids=["short", "long"])
@pytest.mark.parametrize("reason", ["its deadline passes", "a rank dies"])
def test_what_one_node_was_handed_the_others_get_from_it(numel: int, reason: str) -> None:
    with one_side_done(numel) as local:
        if reason == "a rank dies":
            local.ranks[2].end()
        else:
            local.groups[1].runs.doubt([Doubt(0, Reason.DEADLINE, SECONDS)])
        second = local.ranks[1]
        assert second.outcome() == (0, None)
        assert (second.result(0) == 6.0).all()
        assert second.told[0].participants == 3


def test_the_result_that_a_dead_rank_was_handed_is_kept_for_the_others() -> None:
    with one_side_done(100_000) as local:
        local.lose(0)
        for rank in local.ranks[1:]:
            assert rank.outcome() == (0, None)
            assert (rank.result(0) == 6.0).all()


@LAYOUTS
def test_nothing_is_kept_when_all_nodes_know_that_all_have_their_results(
    ranks: list[list[int]],
) -> None:
    with shrinking(ranks) as local:
        for seq in range(20):
            works(local, seq, local.ranks, 1000)
        local.lose(1)
        survivors = [rank for rank in local.ranks if rank.rank != 1]
        for seq in range(20, 40):
            works(local, seq, survivors, 1000)

        def idle() -> bool:
            local.links.ping()
            return all(
                (group.results.nbytes, len(group.agreement.machine.ops)) == (0, 0)
                for group in local.groups
            )

        wait_until(idle, "the results are released")
        for group in local.groups:
            machine = group.agreement.machine
            assert (machine.floor, len(machine.epochs)) == (39, 1)
            assert not group.table.in_flight


def test_ranks_that_cannot_be_given_a_result_that_others_have_are_out_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_groups([[0], [1]]) as local:
        works(local, 0, local.ranks)
        real = Operands.hand_out

        def hand_out(operands: Operands, *arguments: Any) -> None:
            if 1 in operands.outputs:
                raise RuntimeError("no memory")
            real(operands, *arguments)

        monkeypatch.setattr(Operands, "hand_out", hand_out)
        first, second = local.ranks
        for rank in local.ranks:
            rank.call(1, [1.0])
        assert first.outcome() == (1, None)
        seq, error = second.outcome()
        assert (seq, type(error)) == (1, ServiceError)
        assert "node node1 could not deliver the result" in str(error)
        second.call(2, [1.0])
        assert "could not be given the result of op 1" in str(second.outcome()[1])
        first.call(2, [1.0])
        assert isinstance(first.outcome()[1], PeerLost)
        works(local, 3, [first])


def test_a_rank_that_does_not_wait_for_its_op_is_refused_it_and_the_others_do_it_again() -> None:
    """Its process lives, so its memory may change: what it has called cannot be used."""
    with shrinking([[0, 1], [2]]) as local:
        first, leaver, last = local.ranks
        for rank in (first, leaver):
            rank.call(0, np.full(5, 1.0 + rank.rank))
        local.groups[0].rank_ended(leaver.session, "left", withdraws=True)
        seq, error = leaver.outcome()
        assert seq == 0
        assert isinstance(error, PeerLost)
        assert "rank 1 on node node0, which left" in error.message
        last.call(0, np.full(5, 3.0))
        for rank in (first, last):
            assert rank.outcome() == (0, None)
            assert (rank.result(0) == 4.0).all()
