"""The kernel's counters of real connections."""

from __future__ import annotations

import socket
from threading import Thread

import pytest

from allfold_agent.observation import link_observer
from allfold_agent.observation.link_observer import Retransmits, sample
from allfold_core.diagnosis.links import LinkSample

SENT = 8 << 20


def test_the_counters_of_a_connection_grow_with_what_is_sent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as receiver,
    ):
        before = sample(sender)
        reading = Thread(target=_read, args=(receiver,))
        reading.start()
        sender.sendall(bytes(SENT))
        reading.join(timeout=20.0)
        after = sample(sender)
    assert before is not None
    assert after is not None
    assert after.at > before.at
    assert after.segments > before.segments + SENT // 65536
    assert after.rate > 1e6
    assert 0 < after.round_trip < 1
    assert 0 < after.shortest <= 1
    assert after.busy >= before.busy
    assert after.lost <= after.segments


def _read(connected: socket.socket) -> None:
    left = SENT
    while left:
        left -= len(connected.recv(min(left, 1 << 20)))


def test_what_is_no_tcp_connection_or_is_closed_has_no_counters() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert sample(one) is None
    assert sample(one) is None


def test_what_was_sent_again_stays_counted_when_its_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = socket.socket(), socket.socket()
    lost: dict[socket.socket, int] = {}

    def sampled(connected: socket.socket) -> LinkSample | None:
        if connected not in lost:
            return None
        return LinkSample(0.0, 0.0, 0.0, 9, lost[connected], 0.0, False, 0.0, 0.0)

    monkeypatch.setattr(link_observer, "sample", sampled)
    retransmits = Retransmits()
    with first, second:
        lost |= {first: 3, second: 4}
        assert retransmits.count([first, second]) == 7
        lost[second] = 6
        assert retransmits.count([second]) == 9
        del lost[second]  # closed while it was looked at
        assert retransmits.count([second]) == 9
