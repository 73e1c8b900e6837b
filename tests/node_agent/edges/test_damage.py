"""A network that damages frames: they are asked for again, and nobody notices but the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import pytest

from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import HEADER_SIZE
from allfold_core.protocol.rank_messages import FIRST_PAIR, Message
from tests.support.fakes.damaged_wire import DamagedWire
from tests.support.fakes.local_groups import LINGER_SECONDS, LocalGroups, local_groups
from tests.support.waiting import wait_until

IN_A_HEADER = 9
IN_A_PAYLOAD = HEADER_SIZE + 100
SMALL, LARGE = 5_000, 300_000


def then_none(places: Sequence[int]) -> Iterator[int | None]:
    return chain(places, repeat(None))


def nothing_is_held(local: LocalGroups) -> None:
    """Also no memory where a damaged frame had landed."""
    for group in local.groups:
        group.close(LINGER_SECONDS)
    wait_until(lambda: local.buffers.held == 0, "all memory is back")


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("strategy", ["direct", "ring"])
@pytest.mark.parametrize("place", [IN_A_HEADER, IN_A_PAYLOAD, HEADER_SIZE + 15_000])
def test_a_damaged_header_or_payload_is_sent_again_and_the_op_is_exact(
    numel: int, strategy: str, place: int
) -> None:
    wire = DamagedWire(then_none([place] * 4))
    with local_groups([[0], [1]], wire=wire) as local:
        given = [np.arange(numel) % 251, np.arange(numel) % 241]
        for seq in range(2):
            local.call_all(seq, given, strategy=strategy)
        for rank in local.ranks:
            assert dict(rank.outcome() for _ in range(2)) == {0: None, 1: None}
            for seq in range(2):
                assert np.array_equal(rank.result(seq), sum(given))
        assert wire.damaged == 4
        assert local.rounds == 0
        nothing_is_held(local)


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("place", [IN_A_HEADER, IN_A_PAYLOAD])
def test_a_damaged_message_is_sent_again(numel: int, place: int) -> None:
    wire = DamagedWire(then_none([place] * 4))
    with local_groups([[0], [1]], wire=wire) as local:
        giver, taker = local.ranks
        right = np.arange(numel, dtype=np.float32)
        giver.exchange(Message.SEND, 0, right, 1)
        taker.exchange(Message.RECV, 0, np.zeros(numel), 0)
        assert giver.outcome() == taker.outcome() == (FIRST_PAIR, None)
        assert np.array_equal(taker.result(FIRST_PAIR), right)
        assert wire.damaged > 0
        assert local.rounds == 0
        nothing_is_held(local)


@pytest.mark.parametrize("place", [IN_A_HEADER, IN_A_PAYLOAD])
def test_a_rank_whose_frames_are_damaged_each_time_is_left_out_and_hears_why(place: int) -> None:
    with local_groups([[0], [1]], wire=DamagedWire(repeat(place))) as local:
        local.call_all(0, [np.ones(SMALL)] * 2)
        for rank in local.ranks:
            _, error = rank.outcome()
            assert isinstance(error, PeerLost)
            assert "cannot receive from node" in error.message
            assert "frame 0 came damaged 5 times in a row" in error.message
            assert "network" in error.message, "where to look"
