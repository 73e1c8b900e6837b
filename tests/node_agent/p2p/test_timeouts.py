"""Messages whose sender or receiver gives up: both sides have one outcome."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest

from allfold_agent.p2p.messages import PARCEL_BYTES
from allfold_core.errors import AllfoldError, PeerLost, PeerMissing
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.rank_messages import FIRST_PAIR
from tests.node_agent.p2p.message_steps import (
    LARGE,
    LATER,
    LONG,
    RECV,
    SEND,
    amid_a_message,
    assert_idle,
    content,
    expire,
    expire_again_and_again,
    same,
    works,
)
from tests.support.fakes.local_groups import local_groups
from tests.support.fakes.local_rank import no_outcome
from tests.support.fakes.relays import Dam
from tests.support.waiting import wait_until


@pytest.mark.parametrize("numel", [3, LARGE])
@pytest.mark.parametrize("known", [False, True], ids=["before any message", "later"])
def test_a_message_whose_sender_has_given_up_is_received_by_nobody(numel: int, known: bool) -> None:
    """Also where it has not even left the sender's node, because nobody had asked for any."""
    with local_groups([[0], [1]]) as local:
        giver, taker = local.ranks
        if known:
            works(local, 9)
        giver.exchange(SEND, 0, np.ones(numel), 1)
        expire(local, 0)
        seq, error = giver.outcome()
        assert seq == FIRST_PAIR
        assert isinstance(error, PeerMissing)
        assert error.details["missing_ranks"] == [1]
        assert "rank 1 has not received it" in error.message
        if known:  # the word of it passes no later message
            giver.exchange(SEND, 7, [1.0], 1, tag=7)
            taker.exchange(RECV, 7, [0.0], 0, tag=7)
            assert giver.outcome() == taker.outcome() == (FIRST_PAIR + 7, None)
        taker.exchange(RECV, 0, np.zeros(numel), 0)
        assert no_outcome(taker, 0.2)
        right = content(0, 1, 1, numel)
        giver.exchange(SEND, 1, right, 1)
        assert taker.outcome() == (FIRST_PAIR, None)
        assert giver.outcome() == (FIRST_PAIR + 1, None)
        assert same(taker.result(FIRST_PAIR), right)
        assert_idle(local)


@pytest.mark.parametrize("ranks", [[[0, 1]], [[0], [1]]], ids=str)
def test_a_receive_that_has_given_up_takes_nothing(ranks: list[list[int]]) -> None:
    with local_groups(ranks) as local:
        giver, taker = local.ranks
        for number, source in enumerate((0, ANY_SOURCE)):
            taker.exchange(RECV, number, np.zeros(3), source)
            expire(local, len(ranks) - 1)
            _, error = taker.outcome()
            assert isinstance(error, PeerMissing)
            assert error.details["missing_ranks"] == ([0] if source == 0 else [])
            assert "sent it" in error.message
        works(local, 5, 3)
        assert no_outcome(giver, 0.05)


def test_a_receive_may_give_up_while_the_content_is_coming() -> None:
    """Its memory is its rank's again at once: what still comes is thrown away."""
    with amid_a_message() as (local, dam):
        giver, taker = local.ranks
        expire(local, 1)
        _, error = taker.outcome()
        assert isinstance(error, PeerMissing)
        assert f"recv(float32[{LONG}], from rank 0" in error.message
        taken = taker.result(FIRST_PAIR)
        taken[:] = 7
        taker._bytes[: taken.nbytes] = 7
        _, told = giver.outcome()
        assert str(told) == str(error), "the sender hears why"
        dam.opened.set()
        works(local, 1)
        assert (taker._bytes[: taken.nbytes] == 7).all()


def test_a_sender_that_gives_up_while_the_content_is_on_its_way_has_the_receivers_outcome() -> None:
    with amid_a_message() as (local, dam):
        giver, taker = local.ranks
        expire(local, 0)
        assert no_outcome(giver, 0.05), "the message may have been received"
        dam.opened.set()
        (_, error), (_, told) = giver.outcome(), taker.outcome()
        assert isinstance(error, PeerMissing)
        assert f"send(float32[{LONG}], to rank 1" in error.message
        assert str(told) == str(error)
        works(local, 1)


def test_a_sender_does_not_wait_for_ever_for_the_receivers_outcome() -> None:
    with amid_a_message() as (local, dam):
        expire(local, 0)
        expire(local, 0)
        _, error = local.ranks[0].outcome()
        assert isinstance(error, PeerMissing)
        dam.opened.set()
        assert str(local.ranks[1].outcome()[1]) == str(error)


def test_a_message_that_leaves_while_it_is_withdrawn_has_one_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is sent by whoever has the edge, which does not ask whoever withdraws it."""
    with local_groups([[0], [1]]) as local:
        works(local, 9)
        giver, taker = local.ranks
        pairs = local.groups[0].p2p
        conclude = pairs._outbox.conclude

        def conclude_late(number: int, error: AllfoldError | None) -> None:
            pairs.edges.out("node1").kick()  # between the decision that it is unsent and its end
            conclude(number, error)

        taker.exchange(RECV, 0, [0.0], 0)
        with monkeypatch.context() as patch:
            patch.setattr(pairs.edges, "kick", lambda _: None)
            giver.exchange(SEND, 0, [1.0], 1)
        monkeypatch.setattr(pairs._outbox, "conclude", conclude_late)
        expire(local, 0)
        assert isinstance(giver.outcome()[1], PeerMissing)
        assert no_outcome(taker, 0.2)
        expire(local, 1)
        assert isinstance(taker.outcome()[1], PeerMissing)


@pytest.mark.parametrize("answers", [True, False])
def test_a_withdrawn_message_that_was_received_is_no_failure_of_its_sender_alone(
    answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its word comes late, or its node is lost; without it nobody can say what came of it."""
    dam = Dam(1, 0, after=1)
    with local_groups([[0], [1]], dam=dam) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, [5.0], 1)
        taker.exchange(RECV, 0, [0.0], 0)
        assert taker.outcome() == (FIRST_PAIR, None)
        expire(local, 0)
        assert no_outcome(giver, 0.05)
        tries = expire_again_and_again(local, 0)
        wait_until(lambda: (next(tries), "send has no outcome" in caplog.text)[1], "it is said")
        assert "has not said for 10 s whether it has received it" in caplog.text
        assert no_outcome(giver, 0.05)
        if answers:
            dam.opened.set()
            assert giver.outcome() == (FIRST_PAIR, None)
            assert local.rounds == 0
            return
        local.lose_node(1)
        assert isinstance(giver.outcome()[1], PeerLost)


def test_a_withdrawal_does_not_wait_for_the_content_of_later_messages() -> None:
    """Else a node that receives as fast as it can would seem not to answer."""
    dam, numel = Dam(0, 1, after=PARCEL_BYTES + 1000), 2 * LONG
    with local_groups([[0], [1]], dam=dam) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, [5.0], 1, tag=1, timeout=1.0)
        giver.exchange(SEND, 1, np.ones(numel), 1)
        taker.exchange(RECV, 0, np.zeros(numel), 0)
        wait_until(lambda: taker.result(FIRST_PAIR)[0] == 1, "the first parcel is there")
        local.groups[0].p2p.expire(monotonic() + 2.0)
        assert no_outcome(giver, 0.05), "the message may have been received"
        dam.opened.set()
        seq, error = giver.outcome()
        assert (seq, type(error)) == (FIRST_PAIR, PeerMissing)
        assert giver.outcome() == (FIRST_PAIR + 1, None)
        assert taker.outcome() == (FIRST_PAIR, None)
        assert_idle(local)


def test_the_time_that_a_node_has_for_its_answer_begins_anew_when_its_edges_move() -> None:
    """On a slow link an answer takes as long as what was sent before it."""
    dam = Dam(1, 0, after=1)
    with local_groups([[0], [1]], dam=dam) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, [5.0], 1)
        taker.exchange(RECV, 0, [0.0], 0)
        assert taker.outcome() == (FIRST_PAIR, None)
        pairs = local.groups[0].p2p

        def send_more(number: int) -> None:
            before = pairs.edges.frames_moved("node1")
            giver.exchange(SEND, number, [5.0], 1, timeout=LATER * LATER)
            wait_until(lambda: pairs.edges.frames_moved("node1") > before, "it has arrived")

        tries = expire_again_and_again(local, 0)
        next(tries)
        for number in (1, 2, 3):
            send_more(number)
            next(tries)
            assert no_outcome(giver, 0.01)
        dam.opened.set()
        assert giver.outcome() == (FIRST_PAIR, None)


def test_what_a_rank_writes_after_its_send_has_ended_is_not_received() -> None:
    with amid_a_message() as (local, dam):
        giver, taker = local.ranks
        expire(local, 0)
        expire(local, 0)
        giver.outcome()
        giver._bytes.fill(7)
        dam.opened.set()
        assert taker.outcome()[1] is not None
        assert 7 not in taker._bytes


def test_a_deadline_is_that_of_each_side_alone() -> None:
    with local_groups([[0], [1]]) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, [1.0], 1, timeout=5.0)
        giver.exchange(SEND, 1, [2.0], 1, timeout=LATER * 2, tag=1)
        local.groups[0].p2p.expire(monotonic() + 4.0)
        assert no_outcome(giver, 0.02)
        local.groups[0].p2p.expire(monotonic() + 6.0)
        seq, error = giver.outcome()
        assert (seq, type(error)) == (FIRST_PAIR, PeerMissing)
        assert "timed out after its timeout of 5 s" in str(error)
        taker.exchange(RECV, 0, [0.0], 0, tag=1)
        assert taker.outcome() == (FIRST_PAIR, None)
        assert giver.outcome() == (FIRST_PAIR + 1, None)
