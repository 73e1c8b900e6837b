"""Steps that tests of messages between ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from time import monotonic

import numpy as np

from allfold_agent.p2p.messages import PARCEL_BYTES
from allfold_agent.p2p.outbox import EAGER_BYTES
from allfold_core.protocol.rank_messages import FIRST_PAIR, Message
from tests.support.fakes.counted_pool import CountedPool
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.relays import Dam
from tests.support.waiting import wait_until

SEND, RECV = Message.SEND, Message.RECV
EAGER = EAGER_BYTES // 4
LARGE = 5 * PARCEL_BYTES // 16
# So much more than sockets hold that its sender is not yet done when its first bytes have come.
LONG = 2 * PARCEL_BYTES
LATER = 1000.0


def content(source: int, target: int, number: int, numel: int) -> np.ndarray:
    """Whole numbers that no other message has."""
    return (np.arange(numel) % 50 + 100 * (number + 100 * (target + 10 * source))).astype(
        np.float32
    )


def same(got: np.ndarray, right: np.ndarray) -> bool:
    return bool(np.array_equal(got, right))


def assert_idle(local: LocalGroups) -> None:
    """Nothing is kept of what is over, and all memory is back in the pool."""
    pool = local.buffers
    assert isinstance(pool, CountedPool)
    wait_until(lambda: pool.held == 0, "all memory is given back")
    for group in local.groups:
        pairs = group.p2p
        assert not pairs.waiting
        kept = (pairs._outbox._sends, pairs._outbox._queued, pairs._transfers)
        assert kept == ({}, {}, {})


def expire(local: LocalGroups, node: int) -> None:
    """Let the deadlines of a node's ranks pass."""
    local.groups[node].p2p.expire(monotonic() + LATER)


def expire_again_and_again(local: LocalGroups, node: int) -> Iterator[None]:
    """Let the deadlines of a node's ranks pass, and those that it set instead."""
    for times in count(1):
        local.groups[node].p2p.expire(monotonic() + times * LATER)
        yield


def works(local: LocalGroups, number: int, numel: int = LARGE) -> None:
    """A message of rank 0 to rank 1."""
    giver, taker = local.ranks[:2]
    right = content(0, 1, number, numel)
    giver.exchange(SEND, number, right, 1)
    taker.exchange(RECV, number, np.zeros(numel), 0)
    assert giver.outcome() == taker.outcome() == (FIRST_PAIR + number, None)
    assert same(taker.result(FIRST_PAIR + number), right)
    assert_idle(local)


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
