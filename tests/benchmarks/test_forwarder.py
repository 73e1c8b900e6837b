"""The forwarder's idea of a line: packets take their turn at its rate, and then the delay."""

from __future__ import annotations

import pytest

from allfold_cluster.network.forwarder import Port, is_lost

PACKET = bytes(1000)


def test_packets_arrive_after_the_delay_and_in_order() -> None:
    port = Port(fd=-1)
    for number in range(3):
        port.accept(bytes([number]), now=number / 10, rate=0.0, delay=1.0)
    assert port.arrived(0.99) == []
    assert port.arrived(1.1) == [b"\0", b"\1"]
    assert port.arrived(2.0) == [b"\2"]


def test_at_a_rate_each_packet_waits_for_the_one_before() -> None:
    port = Port(fd=-1)
    for _ in range(3):
        port.accept(PACKET, now=0.0, rate=8000.0, delay=0.5)  # one packet takes a second
    assert [len(port.arrived(now)) for now in (1.49, 1.51, 2.51, 3.49, 3.51)] == [0, 1, 1, 0, 1]


def test_a_line_that_was_idle_saves_nothing_up() -> None:
    port = Port(fd=-1)
    port.accept(PACKET, now=100.0, rate=8000.0, delay=0.0)
    assert port.arrived(100.9) == []
    assert port.arrived(101.0) == [PACKET]


def test_what_a_full_queue_cannot_hold_is_dropped() -> None:
    port = Port(fd=-1)
    large = bytes(1 << 20)
    for _ in range(70):
        port.accept(large, now=0.0, rate=0.0, delay=1.0)
    assert len(port.arrived(1.0)) == 64
    assert port.queued == 0


def test_a_packet_is_lost_as_often_as_one_of_the_segments_that_it_stands_for() -> None:
    draws = [number / 10_000 for number in range(10_000)]
    for nbytes, segments in ((52, 1), (1448, 1), (1449, 2), (9000, 7)):
        lost = sum(is_lost(nbytes, 0.001, drawn) for drawn in draws)
        assert lost == pytest.approx(10 * segments, abs=1)
    assert not is_lost(9000, 0.0, 0.0)
