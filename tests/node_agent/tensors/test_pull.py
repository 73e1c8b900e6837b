"""Pulls of states from several agents at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread

import pytest

from allfold_agent.tensors.offers import digest_header
from allfold_agent.tensors.pull import ACTIVE_SOURCES, Pull
from allfold_agent.tensors.source import Source
from allfold_core.errors import AllfoldError, PeerLost, PeerMissing, from_dict
from allfold_core.protocol.state_blocks import BLOCK_BYTES, TransferMessage
from tests.node_agent.tensors.holders import HEAD, Holder, Puller, holding, state
from tests.support.credentials import transport
from tests.support.waiting import wait_until

SECONDS = 20.0
BLOCKS = 12
SIZE = HEAD + BLOCKS * BLOCK_BYTES - 17


@contextmanager
def pulling(
    sources: Sequence[Source], *, token: str | None = None, timeout: float = SECONDS
) -> Iterator[Puller]:
    """A pull that runs in a thread, and the rank for whom it is."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(SECONDS)
    window = memoryview(bytearray(4 * BLOCK_BYTES))
    thread = Thread(target=Pull(sources, transport(token), ours, window, timeout).run)
    thread.start()
    try:
        yield Puller(theirs, window)
    finally:
        theirs.close()
        thread.join(SECONDS)
        ours.close()
        assert not thread.is_alive()


def finished(puller: Puller) -> dict[str, int]:
    """Take in all that comes; return how many bytes came from which rank."""
    while True:
        data = puller.channel.recv(1 << 16)
        if data[0] == TransferMessage.DONE:
            return dict(json.loads(data[1:])["bytes_from"])
        if data[0] == TransferMessage.FAILED:
            raise from_dict(json.loads(data[1:]))
        if data[0] == TransferMessage.BLOCK:
            puller.take(data)


def waits_for_another(holders: Sequence[Holder]) -> Callable[[int], None]:
    """Holds blocks back until two holders were asked for some: one may be faster than all others.

    The head does not count, which is of one holder.
    """

    def are_two() -> bool:
        return sum(any(holder.served) for holder in holders) > 1

    def on_block(start: int) -> None:
        if start:
            wait_until(are_two, "another holder is asked as well", SECONDS)

    return on_block


def test_blocks_come_from_all_holders_and_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow a holder is: no block is fetched from two.
    monkeypatch.setattr("allfold_agent.tensors.work.HEDGE_SECONDS", 2 * SECONDS)
    content = state(SIZE)
    with holding(3) as holders:
        for holder in holders:
            holder.offer(content, patience=2 * SECONDS)
            holder.on_block = waits_for_another(holders)
        with pulling([holder.source for holder in holders]) as puller:
            came = finished(puller)
        assert puller.content == content
        assert sum(came.values()) == SIZE
        assert len(came) > 1
        assert puller.starts[0] == 0  # the head is first
        # One that was last to tell of its state may have got nothing to do.
        assert sum(map(len, (holder.served for holder in holders))) == BLOCKS + 1


def test_the_head_comes_from_one_holder() -> None:
    """Small tensors and plain values of a rank belong together."""
    head = 3 * BLOCK_BYTES
    heads = [state(head, seed) for seed in range(3)]
    large = state(5 * BLOCK_BYTES, seed=9)
    with holding(3) as holders:
        for holder, own in zip(holders, heads, strict=True):
            holder.offer(own + large, head=head)
        with pulling([holder.source for holder in holders]) as puller:
            finished(puller)
        assert bytes(puller.content[:head]) in heads
        assert puller.content[head:] == large


def dies_after(holder: Holder, blocks: int, how: Callable[[], None]) -> None:
    """Let a holder give so many blocks, and end when it is asked for another one."""

    def on_block(_: int) -> None:
        if len(holder.served) == blocks + 1:
            how()

    holder.on_block = on_block


@pytest.mark.parametrize("part", ["rank", "agent"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_pull_goes_on_elsewhere_when_a_source_dies(part: str, blocks: int) -> None:
    content = state(SIZE)
    with holding(2) as holders:
        for holder in holders:
            holder.offer(content)
        dying = holders[0]
        # The end of an agent waits for those who wait for its rank.
        ends = Thread(target=dying.die, daemon=True).start
        dies_after(dying, blocks, dying.end_rank if part == "rank" else ends)
        with pulling([holder.source for holder in holders]) as puller:
            finished(puller)
        assert puller.content == content


def test_a_holder_in_reserve_is_asked_when_all_others_have_died() -> None:
    content = state(SIZE)
    with holding(ACTIVE_SOURCES + 1) as holders:
        for holder in holders[:-1]:
            holder.offer(content)
            dies_after(holder, 1, holder.end_rank)
        holders[-1].offer(content)
        with pulling([holder.source for holder in holders]) as puller:
            finished(puller)
        assert puller.content == content
        assert holders[-1].served


def test_what_a_stopped_source_was_asked_for_comes_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allfold_agent.tensors.source.STALL_SECONDS", 2 * SECONDS)
    content = state(SIZE)
    release = Event()
    with holding(2) as holders:
        for holder in holders:
            holder.offer(content, patience=2 * SECONDS)

        def stop(start: int) -> None:
            if start:
                release.wait(SECONDS)

        holders[0].on_block = stop
        with pulling([holder.source for holder in holders]) as puller:
            finished(puller)
        release.set()
        assert puller.content == content


def test_a_source_in_reserve_is_asked_when_nothing_comes_from_the_others() -> None:
    """The sources before it are connected, and have nothing to offer yet."""
    content = state(SIZE)
    with holding(ACTIVE_SOURCES + 1) as holders:
        holders[-1].offer(content)
        with pulling([holder.source for holder in holders]) as puller:
            finished(puller)
        assert puller.content == content


def test_damaged_blocks_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    content = state(SIZE)
    damaged: list[bytes] = []

    def damage(view: memoryview) -> str:
        if len(damaged) < 2 and len(view) == BLOCK_BYTES:
            damaged.append(bytes(view[:4]))
            return "xxh3-64=:wrong:"
        return digest_header(view)

    monkeypatch.setattr("allfold_agent.tensors.source.digest_header", damage)
    with holding(1) as (holder,):
        holder.offer(content)
        with pulling([holder.source]) as puller:
            finished(puller)
        assert len(damaged) == 2
        assert puller.content == content
        assert len(holder.served) > BLOCKS + 1


def failed(sources: Sequence[Source], **options: float) -> AllfoldError:
    with pulling(sources, **options) as puller, pytest.raises(AllfoldError) as caught:  # type: ignore[arg-type]
        finished(puller)
    return caught.value


def test_a_pull_without_any_source_that_lives_says_who_was_asked() -> None:
    with holding(2) as holders:
        content = state(SIZE)
        for holder in holders:
            holder.offer(content)
            dies_after(holder, 2, holder.end_rank)
        error = failed([holder.source for holder in holders])
    assert isinstance(error, PeerLost)
    assert error.details["ranks"] == [0, 1]
    assert f"of {SIZE} bytes missing" in error.message
    assert holders[1].address in error.message


def test_a_state_that_nobody_offers_is_missing_after_the_deadline() -> None:
    with holding(1) as (holder,):
        error = failed([holder.source], timeout=0.3)
    assert isinstance(error, (PeerMissing, PeerLost))
    assert "nobody has told its size" in error.message


def test_a_pull_waits_for_holders_that_are_late() -> None:
    content = state(SIZE)
    with holding(1) as (holder,), pulling([holder.source]) as puller:
        holder.offer(content)
        finished(puller)
        assert puller.content == content


def test_nobody_is_pulled_from_who_has_another_layout() -> None:
    content = state(SIZE)
    with holding(2) as holders:
        holders[0].offer(content)
        with pulling([holders[0].source, holders[1].source]) as puller:
            data = puller.channel.recv(1 << 16)
            assert data[0] == TransferMessage.READY
            holders[1].offer(state(SIZE, seed=5), layout="other")
            came = finished(puller)
        assert puller.content == content
        assert list(came) == ["0"]


def test_a_refusal_ends_a_pull_at_once() -> None:
    with holding(1, token="token") as (holder,):
        holder.offer(state(SIZE))
        error = failed([holder.source])
        assert "status 401" in error.message
        with pulling([replace(holder.source)], token="token") as puller:
            finished(puller)


def test_a_rank_that_hangs_up_ends_its_pull() -> None:
    with holding(1) as (holder,):
        holder.offer(state(SIZE))
        with pulling([holder.source]) as puller:
            assert puller.channel.recv(1 << 16)
        # ``pulling`` has checked that the thread has ended.
