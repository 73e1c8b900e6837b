"""States that ranks offer, without HTTP."""

from __future__ import annotations

from threading import Event, Thread
from time import monotonic

import pytest

from allfold_agent.tensors.offers import Offers
from allfold_core.errors import InvalidArgument, PeerLost, PeerMissing
from allfold_core.protocol.state_blocks import BLOCK_BYTES
from tests.node_agent.tensors.holders import STATE_ID, holding, state

SOON = 10.0


def waits(event: Event) -> None:
    event.wait(SOON)


def test_a_block_is_copied_by_the_rank_when_somebody_wants_it() -> None:
    content = state(10_000)
    with holding() as (holder,):
        offer = holder.offer(content)
        assert holder.served == []
        with offer.block(100, 9000, monotonic() + SOON) as block:
            assert bytes(block) == content[100:9000]
        assert holder.served == [100]


def test_who_finds_all_slots_in_use_waits_for_one() -> None:
    content = state(3 * BLOCK_BYTES)
    with holding() as (holder,):
        offer = holder.offer(content, blocks=1)
        got: list[bytes] = []

        def second() -> None:
            with offer.block(5, 10, monotonic() + SOON) as block:
                got.append(bytes(block))

        with offer.block(0, 5, monotonic() + SOON) as block:
            with pytest.raises(PeerMissing, match="too many"), offer.block(5, 10, monotonic()):
                pass
            thread = Thread(target=second)
            thread.start()
            assert bytes(block) == content[:5]
        thread.join(SOON)
        assert got == [content[5:10]]


def test_an_offer_whose_rank_has_ended_fails_and_is_over() -> None:
    with holding() as (holder,):
        offer = holder.offer(state(100))
        holder.end_rank()
        offer.await_end()
        with pytest.raises(PeerLost, match="is gone"), offer.block(0, 10, monotonic() + SOON):
            pass


def test_a_rank_that_does_not_answer_ends_its_offer() -> None:
    with holding() as (holder,):
        never = Event()
        holder.on_block = lambda _: waits(never)
        offer = holder.offer(state(100), patience=0.05)
        with pytest.raises(PeerLost, match="timed out"), offer.block(0, 10, monotonic() + SOON):
            pass
        offer.await_end()
        never.set()  # the thread of the rank ends


def test_who_asks_early_waits_for_the_offer() -> None:
    with holding() as (holder,):
        found: list[object] = []
        thread = Thread(target=lambda: found.append(holder.offers.get(STATE_ID, SOON)))
        thread.start()
        offer = holder.offer(state(100))
        thread.join(SOON)
        assert found == [offer]


def test_an_offer_that_nobody_makes_is_missing() -> None:
    with pytest.raises(PeerMissing, match="no rank of this node"):
        Offers().get("none")
    with pytest.raises(PeerMissing):
        Offers().get("none", SOON, wanted=lambda: False)


def test_a_new_offer_takes_the_place_of_an_old_one() -> None:
    with holding() as (holder,):
        old = holder.offer(state(100, seed=1))
        new = holder.offer(state(100, seed=2))
        old.await_end()
        holder.offers.remove(old)
        assert holder.offers.get(STATE_ID) is new
        holder.offers.remove(new)
        with pytest.raises(PeerMissing):
            holder.offers.get(STATE_ID)


@pytest.mark.parametrize("state_id", ["", ".", "..", "a/b", "a b", "x" * 257])
def test_an_id_that_a_path_cannot_have_is_refused(state_id: str) -> None:
    with pytest.raises(InvalidArgument, match="state id"):
        Offers().get(state_id)
