"""Messages of ranks that leave the group, and of nodes that die."""

from __future__ import annotations

import random
from time import monotonic

import numpy as np
import pytest

from allfold_core.errors import PeerLost
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.rank_messages import FIRST_PAIR
from tests.node_agent.p2p.message_steps import LARGE, LATER, RECV, SEND, assert_idle, content, works
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import SECONDS, no_outcome
from tests.support.fakes.relays import Dam


def test_a_node_that_dies_fails_what_waits_for_it_or_anybody_and_the_others_go_on() -> None:
    with local_groups([[0], [1], [2]]) as local:
        works(local, 9)
        first = local.ranks[0]
        first.exchange(SEND, 0, np.ones(LARGE), 1)
        first.exchange(RECV, 1, [0.0], ANY_SOURCE, tag=7)
        local.lose_node(1)
        for _ in range(2):
            assert isinstance(first.outcome()[1], PeerLost)
        third = local.ranks[2]
        first.exchange(SEND, 2, [1.0], 1 if first.view else 2)
        third.exchange(RECV, 0, [0.0], 0)
        assert first.outcome()[1] is third.outcome()[1] is None


def leave(local: LocalGroups, rank: int) -> None:
    """Tell the groups of all ranks that a rank has left in order."""
    for group in local.groups:
        group.p2p.rank_left(rank)


@pytest.mark.parametrize("ranks", [[[0, 1, 2]], [[0], [1], [2]]], ids=str)
def test_who_waits_for_a_rank_that_has_left_is_told_so(ranks: list[list[int]]) -> None:
    with local_groups(ranks) as local:
        first, second = local.ranks[:2]
        first.exchange(SEND, 0, [1.0], 2)
        second.exchange(RECV, 0, [0.0], 2)
        second.exchange(RECV, 1, [0.0], ANY_SOURCE)
        leave(local, 2)
        for rank in (first, second):
            seq, error = rank.outcome()
            assert (seq, type(error)) == (FIRST_PAIR, PeerLost)
            assert "in group 'test' can never be done: rank 2 left the group" in str(error)
        assert no_outcome(second, 0.05), "another rank may still send to it"
        first.exchange(SEND, 1, [5.0], 1)
        assert first.outcome() == second.outcome() == (FIRST_PAIR + 1, None)
        first.exchange(SEND, 2, [1.0], 2)
        assert isinstance(first.outcome()[1], PeerLost), "nor is it sent to later"
        second.exchange(RECV, 2, [0.0], ANY_SOURCE)
        leave(local, 0)
        _, error = second.outcome()
        assert isinstance(error, PeerLost)
        assert "every other rank left the group" in error.message
        assert_idle(local)


def test_who_takes_a_message_and_leaves_at_once_has_taken_it() -> None:
    """The word of the departure takes another way, and may come before that of the message."""
    dam = Dam(1, 0, after=1)
    with local_groups([[0], [1]], dam=dam) as local:
        giver, taker = local.ranks
        for number in (0, 1):
            giver.exchange(SEND, number, [5.0], 1, tag=number)
        taker.exchange(RECV, 0, [0.0], 0, tag=0)
        taker.exchange(RECV, 1, [0.0], 0, tag=1)
        both = {(FIRST_PAIR, None), (FIRST_PAIR + 1, None)}
        assert {taker.outcome(), taker.outcome()} == both, "else one is left that was not taken"
        leave(local, 1)
        assert no_outcome(giver, 0.05)
        dam.opened.set()
        assert {giver.outcome(), giver.outcome()} == both
        assert_idle(local)


def test_a_message_that_who_leaves_has_not_taken_fails_soon() -> None:
    with local_groups([[0], [1]]) as local:
        works(local, 9)
        giver = local.ranks[0]
        giver.exchange(SEND, 0, [5.0], 1, timeout=LATER)
        leave(local, 1)
        local.groups[0].p2p.expire(monotonic() + SECONDS)
        _, error = giver.outcome()
        assert isinstance(error, PeerLost)
        assert "in group 'test' can never be done: rank 1 left the group" in error.message


@pytest.mark.parametrize("seed", range(4))
def test_who_leaves_first_still_owes_the_others_their_messages(seed: int) -> None:
    """The word that a message was taken reaches its sender, also over a breaking connection."""
    with local_groups([[0], [1]], random.Random(seed)) as local:
        giver, taker = local.ranks
        for number in range(10):
            giver.exchange(SEND, number, content(0, 1, number, 20_000), 1)
            taker.exchange(RECV, number, np.zeros(20_000), 0)
        assert dict(taker.outcome() for _ in range(10)) == dict.fromkeys(
            range(FIRST_PAIR, FIRST_PAIR + 10)
        )
        local.groups[1].close(SECONDS)
        assert dict(giver.outcome() for _ in range(10)) == dict.fromkeys(
            range(FIRST_PAIR, FIRST_PAIR + 10)
        )
        assert local.rounds == 0
