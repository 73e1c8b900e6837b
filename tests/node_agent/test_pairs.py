"""Messages between the ranks of several nodes: over breaking connections, and what fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from time import monotonic

import numpy as np
import pytest
from tests.support.local_groups import (
    SECONDS,
    CountedPool,
    Dam,
    LocalGroups,
    LocalRank,
    local_groups,
    no_outcome,
)
from tests.support.waiting import wait_until

from allfold_agent.letters import PARCEL_BYTES
from allfold_agent.pairs import EAGER_BYTES, KEPT_BYTES
from allfold_core.errors import (
    InvalidArgument,
    MismatchError,
    PeerLost,
    PeerMissing,
    PeerSentIncoherentTensor,
)
from allfold_core.frames import FrameHeader, FrameType
from allfold_core.local_wire import FIRST_PAIR, Message
from allfold_core.mailbox import ANY_SOURCE

SEND, RECV = Message.SEND, Message.RECV
EAGER = EAGER_BYTES // 4
# In float32: nothing, little, around what travels with its offer, and what does not.
SIZES = (0, 1, 100, EAGER - 1, EAGER, EAGER + 1, 30_000)
LARGE = 5 * PARCEL_BYTES // 16
# So much more than sockets hold that its sender is not yet done when its first bytes have come.
LONG = 2 * PARCEL_BYTES
MESSAGES = 25
LATER = 1000.0


def content(source: int, target: int, number: int, numel: int) -> np.ndarray:
    """Whole numbers that no other message has."""
    return (np.arange(numel) % 50 + 100 * (number + 100 * (target + 10 * source))).astype(
        np.float32
    )


def same(got: np.ndarray, right: np.ndarray) -> bool:
    return bool(np.array_equal(got, right))


class Mail:
    """Calls of one rank, and what has become of them."""

    def __init__(self, rank: LocalRank) -> None:
        self._rank = rank
        self._count = 0

    def call(self, kind: Message, values: np.ndarray, peer: int, *, tag: int = 0) -> int:
        number = self._count
        self._count += 1
        self._rank.exchange(kind, number, values, peer, tag=tag)
        return FIRST_PAIR + number

    def outcomes(self) -> dict[int, Exception | None]:
        return dict(self._rank.outcome() for _ in range(self._count))


# Over connections that break


@pytest.mark.parametrize("ranks", [[[0], [1]], [[0, 1], [2]], [[0], [1], [2]]], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_messages_arrive_once_and_in_order_however_often_connections_break(
    ranks: list[list[int]], seed: int
) -> None:
    """Between all pairs in both directions; what was sent first under a tag comes first."""
    dice = random.Random(seed)
    with local_groups(ranks, random.Random(seed)) as local:
        mails = [Mail(rank) for rank in local.ranks]
        calls: list[Callable[[], None]] = []
        received: dict[tuple[int, int], np.ndarray] = {}

        def send(source: int, target: int, number: int, numel: int, tag: int) -> None:
            mails[source].call(SEND, content(source, target, number, numel), target, tag=tag)

        def receive(source: int, target: int, number: int, numel: int, tag: int) -> None:
            seq = mails[target].call(RECV, np.zeros(numel), source, tag=tag)
            received[target, seq] = content(source, target, number, numel)

        for source, target in permutations(range(len(local.ranks)), 2):
            for number in range(MESSAGES):
                about = (source, target, number, SIZES[number % len(SIZES)], number % 2)
                calls += [partial(send, *about), partial(receive, *about)]
        for call in in_some_order(calls, dice):
            call()
        for mail in mails:
            assert set(mail.outcomes().values()) == {None}
        for (target, seq), right in received.items():
            assert same(local.ranks[target].result(seq), right)
        assert local.connections > 2 * len(ranks), "they should have broken"
        assert local.notes.losses == []
        assert_idle(local)


def in_some_order(
    calls: list[Callable[[], None]], dice: random.Random
) -> Iterator[Callable[[], None]]:
    """Sends and receives alternate in the list; those of each kind keep their order."""
    queues = [calls[::2], calls[1::2]]
    while any(queues):
        yield dice.choice([queue for queue in queues if queue]).pop(0)


def assert_idle(local: LocalGroups) -> None:
    """Nothing is kept of what is over, and all memory is back in the pool."""
    pool = local.buffers
    assert isinstance(pool, CountedPool)
    wait_until(lambda: pool.held == 0, "all memory is given back")
    for group in local.groups:
        pairs = group.pairs
        assert not pairs.waiting
        kept = (pairs._sends, pairs._queued, pairs._letters)
        assert kept == ({}, {}, {})


@pytest.mark.parametrize("seed", range(3))
def test_a_receive_of_any_source_gets_each_message_of_every_other_rank_once(seed: int) -> None:
    with local_groups([[0, 1], [2], [3]], random.Random(seed)) as local:
        target, others = Mail(local.ranks[0]), [Mail(rank) for rank in local.ranks[1:]]
        numel = 12_000
        seqs = [target.call(RECV, np.zeros(numel), ANY_SOURCE) for _ in range(30)]
        for number in range(10):
            for source, mail in enumerate(others, start=1):
                mail.call(SEND, content(source, 0, number, numel), 0)
        for mail in (target, *others):
            assert set(mail.outcomes().values()) == {None}
        numbers = {source: iter(range(10)) for source in (1, 2, 3)}
        for seq in seqs:
            source = local.ranks[0].sources[seq]
            right = content(source, 0, next(numbers[source]), numel)
            assert same(local.ranks[0].result(seq), right)


@pytest.mark.parametrize("numel", [1, EAGER, EAGER + 1, 3 * LARGE + 1])
@pytest.mark.parametrize("ranks", [[[0, 1]], [[0], [1]]], ids=str)
@pytest.mark.parametrize("first", [SEND, RECV])
def test_it_does_not_matter_who_calls_first(
    ranks: list[list[int]], numel: int, first: Message
) -> None:
    with local_groups(ranks) as local:
        giver, taker = local.ranks
        right = content(0, 1, 0, numel)
        calls: list[Callable[[], None]] = [
            lambda: giver.exchange(SEND, 0, right, 1),
            lambda: taker.exchange(RECV, 0, np.zeros(numel), 0),
        ]
        for call in calls if first is SEND else reversed(calls):
            call()
        assert giver.outcome() == taker.outcome() == (FIRST_PAIR, None)
        assert same(taker.result(FIRST_PAIR), right)
        assert taker.sources == {FIRST_PAIR: 0}
        assert_idle(local)


@pytest.mark.parametrize("seed", [None, 1])
def test_of_many_messages_that_nobody_has_received_yet_only_some_are_kept(
    seed: int | None,
) -> None:
    """The content of the others is asked for again; all arrive once, and in their order."""
    cuts = None if seed is None else random.Random(seed)
    count = KEPT_BYTES // EAGER_BYTES + 30
    with local_groups([[0], [1]], cuts) as local:
        giver, taker = local.ranks
        for number in range(count):
            giver.exchange(SEND, number, content(0, 1, number, EAGER), 1)
        giver.exchange(SEND, count, [1.0], 1, tag=1)
        taker.exchange(RECV, count, [0.0], 0, tag=1)
        last = FIRST_PAIR + count, None
        assert giver.outcome() == taker.outcome() == last, "all offers are there"
        pairs = local.groups[1].pairs
        letters = [letter for _, letter in pairs._mailbox._messages[1]]
        kept = sum(len(letter.content) for letter in letters if letter.content is not None)
        assert len(letters) == count
        assert KEPT_BYTES - EAGER_BYTES < kept == pairs._kept_bytes <= KEPT_BYTES
        for number in range(count):
            taker.exchange(RECV, number, np.zeros(EAGER), 0)
        for rank in local.ranks:
            outcomes = [rank.outcome() for _ in range(count)]
            assert sorted(outcomes) == [(FIRST_PAIR + number, None) for number in range(count)]
        for number in range(count):
            assert same(taker.result(FIRST_PAIR + number), content(0, 1, number, EAGER))
        assert pairs._kept_bytes == 0
        assert local.notes.losses == []
        assert_idle(local)


def test_a_message_that_is_withdrawn_or_taken_makes_room_for_others() -> None:
    with local_groups([[0], [1]]) as local:
        works(local, 9)
        giver, taker = local.ranks
        giver.exchange(SEND, 0, np.ones(EAGER), 1)
        giver.exchange(SEND, 1, np.ones(EAGER), 1, timeout=LATER * 2, tag=1)
        giver.exchange(SEND, 2, np.ones(0), 1, timeout=LATER * 2, tag=2)
        pairs = local.groups[1].pairs
        wait_until(lambda: pairs._kept_bytes == 2 * 4 * EAGER, "both are kept")
        expire(local, 0)
        assert isinstance(giver.outcome()[1], PeerMissing)
        assert pairs._kept_bytes == 4 * EAGER
        for number, numel in ((1, EAGER), (2, 0)):
            taker.exchange(RECV, number, np.zeros(numel), 0, tag=number)
            assert giver.outcome() == taker.outcome() == (FIRST_PAIR + number, None)
        assert pairs._kept_bytes == 0
        assert_idle(local)


def test_messages_and_ops_do_not_wait_for_each_other() -> None:
    with local_groups([[0], [1]]) as local:
        first, second = local.ranks
        first.exchange(SEND, 0, np.ones(LARGE), 1)
        local.call_all(0, [np.ones(5), np.ones(5)])
        assert first.outcome() == second.outcome() == (0, None)
        second.call(1, np.ones(5))
        second.exchange(RECV, 0, np.zeros(LARGE), 0)
        assert first.outcome() == second.outcome() == (FIRST_PAIR, None)
        first.call(1, np.ones(5))
        assert first.outcome() == second.outcome() == (1, None)


# Who gives up


def expire(local: LocalGroups, node: int) -> None:
    """Let the deadlines of a node's ranks pass."""
    local.groups[node].pairs.expire(monotonic() + LATER)


def works(local: LocalGroups, number: int, numel: int = LARGE) -> None:
    """A message of rank 0 to rank 1."""
    giver, taker = local.ranks[:2]
    right = content(0, 1, number, numel)
    giver.exchange(SEND, number, right, 1)
    taker.exchange(RECV, number, np.zeros(numel), 0)
    assert giver.outcome() == taker.outcome() == (FIRST_PAIR + number, None)
    assert same(taker.result(FIRST_PAIR + number), right)
    assert_idle(local)


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


@contextmanager
def amid_a_message() -> Iterator[tuple[LocalGroups, Dam]]:
    """Rank 1 has got the first parcels of a message of rank 0, and no more come."""
    dam = Dam(0, 1, after=PARCEL_BYTES + 1000)
    with local_groups([[0], [1]], dam=dam) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, content(0, 1, 0, LONG), 1)
        taker.exchange(RECV, 0, np.full(LONG, -1.0), 0)
        begun = taker.result
        wait_until(lambda: begun(FIRST_PAIR)[0] != -1, "the first parcel is there")
        yield local, dam


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


def test_what_a_rank_writes_after_its_send_has_ended_is_not_received() -> None:
    with amid_a_message() as (local, dam):
        giver, taker = local.ranks
        expire(local, 0)
        expire(local, 0)
        giver.outcome()
        giver._bytes.fill_(7)
        dam.opened.set()
        assert taker.outcome()[1] is not None
        assert 7 not in taker._bytes


def test_a_deadline_is_that_of_each_side_alone() -> None:
    with local_groups([[0], [1]]) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, [1.0], 1, timeout=5.0)
        giver.exchange(SEND, 1, [2.0], 1, timeout=LATER * 2, tag=1)
        local.groups[0].pairs.expire(monotonic() + 4.0)
        assert no_outcome(giver, 0.02)
        local.groups[0].pairs.expire(monotonic() + 6.0)
        seq, error = giver.outcome()
        assert (seq, type(error)) == (FIRST_PAIR, PeerMissing)
        assert "timeout of 5 s" in str(error)
        taker.exchange(RECV, 0, [0.0], 0, tag=1)
        assert taker.outcome() == (FIRST_PAIR, None)
        assert giver.outcome() == (FIRST_PAIR + 1, None)


# What does not fit


@pytest.mark.parametrize("ranks", [[[0, 1]], [[0], [1]]], ids=str)
@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_size_that_does_not_fit_is_told_to_both_sides_and_the_next_message_works(
    ranks: list[list[int]], numel: int
) -> None:
    with local_groups(ranks) as local:
        giver, taker = local.ranks
        giver.exchange(SEND, 0, np.ones(numel), 1)
        taker.exchange(RECV, 0, np.zeros(numel + 1), 0)
        (_, ours), (_, theirs) = giver.outcome(), taker.outcome()
        assert isinstance(ours, MismatchError)
        assert str(ours) == str(theirs)
        assert f"float32[{numel}]" in ours.message
        assert f"float32[{numel + 1}]" in ours.message
        assert (taker.result(FIRST_PAIR) == 0).all()
        works(local, 1)


@pytest.mark.parametrize("peer", [1, 2, -2])
def test_a_rank_that_is_not_another_one_is_refused(peer: int) -> None:
    with local_groups([[0], [1]]) as local:
        for number, kind in enumerate((SEND, RECV)):
            own = local.ranks[1]
            own.exchange(kind, number, [1.0], peer)
            assert isinstance(own.outcome()[1], InvalidArgument)
        local.ranks[1].exchange(SEND, 2, [1.0], ANY_SOURCE)
        assert isinstance(local.ranks[1].outcome()[1], InvalidArgument), "nobody sends to anyone"
        works(local, 3)


def test_frames_that_cannot_be_are_refused() -> None:
    """A parcel beyond the message that it is of, a note too long to be one, data of an op."""
    with amid_a_message() as (local, _):
        pairs = local.groups[1].pairs
        for kind, offset, length in (
            (FrameType.PARCEL, 4 * LONG - 3, 4),
            (FrameType.PARCEL, 0, 4 * LONG + 1),
            (FrameType.OFFER, 0, 1 << 20),
            (FrameType.DATA, 0, 4),
            (FrameType.SIGNAL, 0, 0),
        ):
            header = FrameHeader(kind, 3, 9, 0, offset, length, 0, 0)
            with pytest.raises(PeerSentIncoherentTensor, match=f"a {kind.name} of {length} bytes"):
                pairs.admit(0, header)
        late = FrameHeader(FrameType.PARCEL, 3, 9, 77, 0, 4, 0, 0)
        assert pairs.admit(0, late) is None, "of a message that was withdrawn"


# Who is gone


def test_a_node_that_dies_fails_what_waits_for_anybody_and_whatever_comes() -> None:
    """A group that has lost a member is over, for messages as for ops."""
    with local_groups([[0], [1], [2]]) as local:
        works(local, 9)
        first = local.ranks[0]
        first.exchange(SEND, 0, np.ones(LARGE), 1)
        first.exchange(RECV, 1, [0.0], ANY_SOURCE, tag=7)
        local.kill(1)
        wait_until(lambda: local.notes.losses, "the loss is noticed")
        for _ in range(2):
            assert isinstance(first.outcome()[1], PeerLost)
        first.exchange(SEND, 2, [1.0], 2)
        assert isinstance(first.outcome()[1], PeerLost)


def leave(local: LocalGroups, rank: int) -> None:
    """What the others hear when a rank has left in order."""
    for group in local.groups:
        group.rank_left(rank, -1)


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
            assert "rank 2 has left group 'test'" in str(error)
        assert no_outcome(second, 0.05), "another rank may still send to it"
        first.exchange(SEND, 1, [5.0], 1)
        assert first.outcome() == second.outcome() == (FIRST_PAIR + 1, None)
        first.exchange(SEND, 2, [1.0], 2)
        assert isinstance(first.outcome()[1], PeerLost), "nor is it sent to later"
        second.exchange(RECV, 2, [0.0], ANY_SOURCE)
        leave(local, 0)
        _, error = second.outcome()
        assert isinstance(error, PeerLost)
        assert "every other rank has left" in error.message
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
        local.groups[0].pairs.expire(monotonic() + SECONDS)
        _, error = giver.outcome()
        assert isinstance(error, PeerLost)
        assert "rank 1 has left group 'test'" in error.message


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
        assert local.notes.losses == []
