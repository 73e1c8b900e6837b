"""Ranks that are lost while the group goes on: what they were to send or receive fails, no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from allfold_agent.p2p.messages import PARCEL_BYTES
from allfold_core.errors import PeerLost
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.rank_messages import FIRST_PAIR
from tests.node_agent.p2p.message_steps import LARGE, LONG, RECV, SEND, assert_idle, works
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import LocalRank, no_outcome
from tests.support.fakes.relays import Dam
from tests.support.waiting import wait_until

LAYOUTS = pytest.mark.parametrize("ranks", [[[0, 1, 2]], [[0], [1], [2]], [[0, 2], [1]]], ids=str)
LOSS = PeerLost("rank 2 is gone", ranks=[2])


def lose(local: LocalGroups, seat: int, *, fail_any_source: bool = False) -> None:
    """Tell the groups of all nodes that a rank is lost."""
    for group in local.groups:
        group.p2p.seat_lost(seat, LOSS, fail_any_source=fail_any_source)


def assert_lost(rank: LocalRank, number: int) -> None:
    seq, error = rank.outcome()
    assert (seq, str(error)) == (FIRST_PAIR + number, str(LOSS))


@LAYOUTS
@pytest.mark.parametrize("numel", [3, LARGE])
def test_what_waits_for_a_lost_rank_fails_and_the_others_go_on(
    ranks: list[list[int]], numel: int
) -> None:
    with local_groups(ranks) as local:
        first, second = local.ranks[:2]
        first.exchange(SEND, 0, np.ones(numel), 2)
        first.exchange(RECV, 1, np.zeros(numel), 2)
        second.exchange(RECV, 0, np.zeros(numel), 0)
        lose(local, 2)
        assert {str(first.outcome()[1]), str(first.outcome()[1])} == {str(LOSS)}
        first.exchange(SEND, 2, np.ones(numel), 1)
        assert first.outcome() == (FIRST_PAIR + 2, None)
        assert second.outcome() == (FIRST_PAIR, None)
        for number, kind in ((3, SEND), (4, RECV)):
            first.exchange(kind, number, np.ones(numel), 2)
            assert_lost(first, number)
        works(local, 5)
        assert_idle(local)


@LAYOUTS
def test_a_message_of_a_lost_rank_that_has_come_in_full_is_received_and_no_other(
    ranks: list[list[int]],
) -> None:
    with local_groups(ranks) as local:
        first, _, lost = local.ranks
        works(local, 9)
        lost.exchange(SEND, 0, [5.0], 0, tag=1)
        lost.exchange(SEND, 1, np.ones(LARGE), 0, tag=2)
        of_another_node = local.groups[0] is not lost.group
        if of_another_node:
            first.exchange(RECV, 2, [0.0], 2, tag=3)
            lost.exchange(SEND, 2, [1.0], 0, tag=3)
            assert first.outcome() == (FIRST_PAIR + 2, None), "so the others are here as well"
        lose(local, 2)
        first.exchange(RECV, 3, [0.0], 2, tag=1)
        if of_another_node:
            assert first.outcome() == (FIRST_PAIR + 3, None)
            assert first.result(FIRST_PAIR + 3) == [5.0]
            first.exchange(RECV, 4, [0.0], 2, tag=1)
            assert_lost(first, 4)
        else:
            assert_lost(first, 3)  # its memory is that of the lost rank
        first.exchange(RECV, 5, np.zeros(LARGE), 2, tag=2)
        assert_lost(first, 5)
        assert_idle(local)


@LAYOUTS
@pytest.mark.parametrize("told", [True, False])
def test_a_receive_from_anyone_fails_if_told_or_if_nobody_is_left(
    ranks: list[list[int]], told: bool
) -> None:
    with local_groups(ranks) as local:
        first, second = local.ranks[:2]
        first.exchange(RECV, 0, [0.0], ANY_SOURCE)
        lose(local, 2, fail_any_source=told)
        if told:
            assert_lost(first, 0)
            first.exchange(RECV, 0, [0.0], ANY_SOURCE)
        second.exchange(SEND, 0, [5.0], 0)
        assert first.outcome() == second.outcome() == (FIRST_PAIR, None)
        first.exchange(RECV, 1, [0.0], ANY_SOURCE)
        assert no_outcome(first, 0.02)
        lose(local, 1)
        assert_lost(first, 1)
        first.exchange(RECV, 2, [0.0], ANY_SOURCE)
        assert_lost(first, 2)
        assert_idle(local)


@contextmanager
def amid_a_message_of_a_rank_that_is_lost() -> Iterator[LocalGroups]:
    """Rank 0 receives from anyone, and has got the first parcels of a message of rank 2."""
    dam = Dam(2, 0, after=PARCEL_BYTES + 1000)
    with local_groups([[0], [1], [2]], dam=dam) as local:
        first, _, lost = local.ranks
        first.exchange(RECV, 0, np.full(LONG, -1.0), ANY_SOURCE)
        first.exchange(RECV, 1, np.full(LONG, -1.0), ANY_SOURCE)
        lost.exchange(SEND, 0, np.ones(LONG), 0)
        wait_until(lambda: first.result(FIRST_PAIR)[0] != -1, "the first parcel is there")
        yield local
        dam.opened.set()
        assert_idle(local)


def test_a_receive_from_anyone_whose_message_breaks_off_takes_the_next_one_in_its_turn() -> None:
    with amid_a_message_of_a_rank_that_is_lost() as local:
        first, second = local.ranks[:2]
        lose(local, 2)
        for number, value in enumerate((7.0, 8.0)):
            second.exchange(SEND, number, np.full(LONG, value), 0)
            assert first.outcome() == second.outcome() == (FIRST_PAIR + number, None)
            assert (first.result(FIRST_PAIR + number) == value).all()


def test_a_receive_from_anyone_whose_message_breaks_off_fails_if_told() -> None:
    with amid_a_message_of_a_rank_that_is_lost() as local:
        first = local.ranks[0]
        lose(local, 2, fail_any_source=True)
        assert {first.outcome()[0], first.outcome()[0]} == {FIRST_PAIR, FIRST_PAIR + 1}


def test_a_receive_from_anyone_that_a_living_rank_serves_goes_on() -> None:
    dam = Dam(1, 0, after=PARCEL_BYTES + 1000)
    with local_groups([[0], [1], [2]], dam=dam) as local:
        first, second = local.ranks[:2]
        first.exchange(RECV, 0, np.full(LONG, -1.0), ANY_SOURCE)
        second.exchange(SEND, 0, np.ones(LONG), 0)
        wait_until(lambda: first.result(FIRST_PAIR)[0] != -1, "the first parcel is there")
        lose(local, 2, fail_any_source=True)
        dam.opened.set()
        assert first.outcome() == second.outcome() == (FIRST_PAIR, None)
        assert_idle(local)


def test_an_offer_of_a_lost_rank_that_comes_late_is_for_nobody() -> None:
    dam = Dam(2, 0, after=1)
    with local_groups([[0], [1], [2]], dam=dam) as local:
        first, _, lost = local.ranks
        first.exchange(RECV, 0, [0.0], ANY_SOURCE)
        lost.exchange(SEND, 0, [5.0], 0)
        moved = local.groups[0].p2p.edges.frames_moved
        before = moved("node2")
        out = local.groups[2].p2p.edges.out("node0")
        wait_until(lambda: out._frames.next_number, "the offer is on its way")
        lose(local, 2)
        dam.opened.set()
        wait_until(lambda: moved("node2") > before, "the offer is there")
        assert no_outcome(first, 0.02)
        local.ranks[1].exchange(SEND, 0, [6.0], 0)
        assert first.outcome() == (FIRST_PAIR, None)
        assert first.result(FIRST_PAIR) == [6.0]
