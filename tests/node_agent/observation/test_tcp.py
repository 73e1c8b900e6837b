"""The kernel's counters of real connections."""

from __future__ import annotations

import socket
from threading import Thread

from allfold_agent.observation.tcp import sample

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
