"""The rate of a link is that at which payloads come while somebody waits for them."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from allfold_agent.edges import link_rate
from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.link_rate import LinkRate
from tests.support.fakes.damaged_wire import tcp_pair

MIB = 1 << 20


def test_a_rate_is_known_from_several_samples_and_one_odd_sample_does_not_count() -> None:
    rate = LinkRate()
    for seconds in (4.0, 400.0):
        rate.add_sample(4 * MIB, seconds)
        assert rate.bytes_per_second is None
    rate.add_sample(4 * MIB, 4.0)
    assert rate.bytes_per_second == MIB
    assert rate.samples == 3
    for _ in range(3):
        rate.add_sample(4 * MIB, 0.4)
    assert rate.bytes_per_second == pytest.approx(10 * MIB), "the latest ones"


def test_a_link_that_was_not_used_for_long_is_measured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(link_rate, "monotonic", lambda: now)
    rate = LinkRate()
    for _ in range(5):
        rate.add_sample(4 * MIB, 4.0)
    now += 299.0
    rate.add_sample(4 * MIB, 0.4)
    assert rate.bytes_per_second == MIB
    now += 2.0
    rate.add_sample(4 * MIB, 0.4)
    assert rate.bytes_per_second is None, "two samples are too few"
    rate.add_sample(4 * MIB, 0.4)
    assert rate.bytes_per_second == pytest.approx(10 * MIB)


def test_a_slow_link_needs_no_long_payloads_to_be_known() -> None:
    rate = LinkRate()
    for _ in range(3):
        rate.add_sample(64 << 10, 0.5)
    assert rate.bytes_per_second == 128 << 10


@pytest.mark.parametrize(
    ("missing", "pair", "counts"),
    [(4 * MIB, tcp_pair, True), (1000, tcp_pair, False), (4 * MIB, socket.socketpair, False)],
)
def test_long_payloads_from_another_machine_count(
    missing: int, pair: Callable[[], tuple[socket.socket, socket.socket]], counts: bool
) -> None:
    near, far = pair()
    with near, far:
        rate, connection = LinkRate(), InConnection(near)
        rate.end()  # of a payload that was never begun
        for _ in range(5000):
            rate.begin(missing, crosses_a_wire=connection.crosses_a_wire)
            rate.end()
        assert (rate.samples > 0) == counts
