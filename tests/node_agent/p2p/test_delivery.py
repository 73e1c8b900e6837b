"""Messages between the ranks of several nodes: each arrives once, over breaking connections too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations

import numpy as np
import pytest

from allfold_agent.p2p.matching import KEPT_BYTES
from allfold_agent.p2p.outbox import EAGER_BYTES
from allfold_core.errors import PeerMissing
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.rank_messages import FIRST_PAIR, Message
from tests.node_agent.p2p.message_steps import (
    EAGER,
    LARGE,
    LATER,
    RECV,
    SEND,
    assert_idle,
    content,
    expire,
    same,
    works,
)
from tests.support.fakes.local_groups import local_groups
from tests.support.fakes.local_rank import LocalRank
from tests.support.waiting import wait_until

# In float32: nothing, little, around what travels with its offer, and what does not.
SIZES = (0, 1, 100, EAGER - 1, EAGER, EAGER + 1, 30_000)
MESSAGES = 25


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
        assert local.rounds == 0
        assert_idle(local)


def in_some_order(
    calls: list[Callable[[], None]], dice: random.Random
) -> Iterator[Callable[[], None]]:
    """Sends and receives alternate in the list; those of each kind keep their order."""
    queues = [calls[::2], calls[1::2]]
    while any(queues):
        yield dice.choice([queue for queue in queues if queue]).pop(0)


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
        pairs = local.groups[1].p2p
        transfers = [transfer for _, transfer in pairs._inbox._mailbox._messages[1]]
        kept = sum(len(transfer.content) for transfer in transfers if transfer.content is not None)
        assert len(transfers) == count
        assert KEPT_BYTES - EAGER_BYTES < kept == pairs._inbox.kept_bytes <= KEPT_BYTES
        for number in range(count):
            taker.exchange(RECV, number, np.zeros(EAGER), 0)
        for rank in local.ranks:
            outcomes = [rank.outcome() for _ in range(count)]
            assert sorted(outcomes) == [(FIRST_PAIR + number, None) for number in range(count)]
        for number in range(count):
            assert same(taker.result(FIRST_PAIR + number), content(0, 1, number, EAGER))
        assert pairs._inbox.kept_bytes == 0
        assert local.rounds == 0
        assert_idle(local)


def test_a_message_that_is_withdrawn_or_taken_makes_room_for_others() -> None:
    with local_groups([[0], [1]]) as local:
        works(local, 9)
        giver, taker = local.ranks
        giver.exchange(SEND, 0, np.ones(EAGER), 1)
        giver.exchange(SEND, 1, np.ones(EAGER), 1, timeout=LATER * 2, tag=1)
        giver.exchange(SEND, 2, np.ones(0), 1, timeout=LATER * 2, tag=2)
        pairs = local.groups[1].p2p
        wait_until(lambda: pairs._inbox.kept_bytes == 2 * 4 * EAGER, "both are kept")
        expire(local, 0)
        assert isinstance(giver.outcome()[1], PeerMissing)
        assert pairs._inbox.kept_bytes == 4 * EAGER
        for number, numel in ((1, EAGER), (2, 0)):
            taker.exchange(RECV, number, np.zeros(numel), 0, tag=number)
            assert giver.outcome() == taker.outcome() == (FIRST_PAIR + number, None)
        assert pairs._inbox.kept_bytes == 0
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
