"""The beginnings and ends of state transfers, as a rank sees them on its socket."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from allfold_agent.local.rank_connection import LocalMembership
from allfold_agent.local.state_transfers import StateTransfers, _sources
from allfold_agent.tensors.offers import Offer, Offers
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    PeerLost,
    PeerMissing,
    WorldChanged,
    from_dict,
)
from allfold_core.protocol.state_blocks import BLOCK_BYTES, WINDOW_BLOCKS, TransferMessage
from tests.support.credentials import transport
from tests.support.waiting import wait_until

OFFER = {"role": "offer", "id": "s", "head": 10, "total": 20, "layout": "x"}
PULL = {"role": "pull", "epoch": 0, "sources": [[0, "s"]], "timeout": 5.0}


def membership(**epochs: Any) -> LocalMembership:
    """The seat of a rank whose agent knows some epochs."""
    known = {int(name.removeprefix("e")): epoch for name, epoch in epochs.items()}
    return cast(LocalMembership, SimpleNamespace(group=SimpleNamespace(name="g", epochs=known)))


@contextmanager
def begun(
    transfers: StateTransfers,
    start: object,
    *,
    size: int = BLOCK_BYTES,
    seals: int = fcntl.F_SEAL_SHRINK,
    kind: int = TransferMessage.START,
) -> Iterator[socket.socket]:
    """A transfer that a rank has begun; with a size of 0 without a window."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10.0)
    window = os.memfd_create("window", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(window, size)
        fcntl.fcntl(window, fcntl.F_ADD_SEALS, seals)
        message = bytes([kind]) + json.dumps(start).encode()
        socket.send_fds(ours, [message], [window] if size else [])
    finally:
        os.close(window)
    with ours:
        transfers.begin(membership(), theirs.detach())
        yield ours


def refusal(rank: socket.socket) -> AllfoldError:
    data = rank.recv(1 << 16)
    assert data[0] == TransferMessage.FAILED
    assert rank.recv(1) == b""  # and that is its end
    return from_dict(json.loads(data[1:]))


@pytest.mark.parametrize(
    ("start", "options", "match"),
    [
        (OFFER, {"size": 0}, "begins with START and a window"),
        (OFFER, {"kind": TransferMessage.DONE}, "begins with START"),
        (OFFER, {"seals": 0}, "not sealed"),
        (OFFER, {"size": BLOCK_BYTES + 1}, "is not acceptable"),
        (OFFER, {"size": (WINDOW_BLOCKS + 1) * BLOCK_BYTES}, "is not acceptable"),
        ({**OFFER, "id": "a/b"}, {}, "state id"),
        ({"role": "offer"}, {}, "not a transfer"),
        (["role"], {}, "not a transfer"),
        ({**PULL, "timeout": -1}, {}, "timeout"),
    ],
)
def test_a_transfer_that_begins_badly_is_refused(
    start: object, options: dict[str, int], match: str
) -> None:
    with begun(StateTransfers(Offers(), transport()), start, **options) as rank:
        error = refusal(rank)
    assert isinstance(error, InvalidArgument)
    assert match in error.message


def test_a_pull_in_an_epoch_that_is_long_over_is_refused() -> None:
    with begun(StateTransfers(Offers(), transport()), PULL) as rank:
        assert isinstance(refusal(rank), WorldChanged)


def is_offered(offers: Offers) -> bool:
    try:
        offers.get("s")
    except PeerMissing:
        return False
    return True


def test_an_offer_ends_with_its_rank() -> None:
    offers = Offers()
    with begun(StateTransfers(offers, transport()), OFFER) as rank:
        assert rank.recv(1 << 16)[0] == TransferMessage.READY
        wait_until(lambda: is_offered(offers), "the offer stands")
    wait_until(lambda: not is_offered(offers), "the offer is over")


def test_an_agent_that_ends_ends_its_transfers() -> None:
    transfers = StateTransfers(Offers(), transport())
    with begun(transfers, OFFER) as rank:
        assert rank.recv(1 << 16)[0] == TransferMessage.READY
        transfers.close()
        assert rank.recv(1) == b""


def test_sources_of_all_nodes_are_asked_before_a_second_one_of_any() -> None:
    members = [
        SimpleNamespace(data_address="a", ranks=(0, 1, 2)),
        SimpleNamespace(data_address="b", ranks=(3, 4)),
        SimpleNamespace(data_address="c", ranks=(5,)),
    ]
    seat = membership(e7=SimpleNamespace(plan=SimpleNamespace(members=members)))
    found = _sources(seat, 7, [[rank, f"s{rank}"] for rank in range(6)])
    assert [each.rank for each in found] == [0, 3, 5, 1, 4, 2]
    assert [each.address for each in found] == ["a", "b", "c", "a", "b", "a"]


def test_a_rank_hears_that_its_offer_stands_before_it_is_asked_for_a_block() -> None:
    """Another rank may wait for the state already, and ask for its first block at once."""

    class Hurried(Offers):
        def add(self, offer: Offer) -> None:
            super().add(offer)
            assert has_rank.wait(5)
            asking = Thread(target=ask, args=(offer,), daemon=True)
            asking.start()
            readable = select.poll()
            readable.register(rank, select.POLLIN)
            assert readable.poll(5000)
            is_told.set()

    def ask(offer: Offer) -> None:
        with suppress(PeerLost), offer.block(0, 10, monotonic() + 5.0):
            pass

    has_rank, is_told = Event(), Event()
    with begun(StateTransfers(Hurried(), transport()), OFFER) as rank:
        has_rank.set()
        assert is_told.wait(10)  # reading earlier would take away what the poll waits for
        kinds = [rank.recv(1 << 16)[0] for _ in range(2)]
    assert kinds == [TransferMessage.READY, TransferMessage.BLOCK]
