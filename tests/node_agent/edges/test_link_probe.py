"""The link to another agent is measured, or it is said why not, and never for long."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from allfold_agent.data_port import DataPort
from allfold_agent.edges import link_probe
from allfold_agent.edges.link_probe import (
    PROBE_PROTOCOL,
    PROBE_TARGET,
    MeasuredLink,
    measure,
    worse,
)
from allfold_agent.http.client import upgrade
from allfold_agent.tensors.offers import Offers
from allfold_core.errors import AllfoldError, LocalError, PeerLost
from tests.support.credentials import transport
from tests.support.waiting import wait_until

TOKEN = "a-join-token"
GRANTED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: allfold-probe/1\r\n\r\n"
)
NO_SUCH_PATH = b'{"error": {"code": "AF100", "message": "the data port has no /v1/probe"}}'
NOT_FOUND = (
    b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(NO_SUCH_PATH) + NO_SUCH_PATH
)
# Far more than a measurement may take, and still an end.
BOUND_SECONDS = 30.0


@contextmanager
def serving(token: str | None = None) -> Iterator[int]:
    """The port of an agent's data server."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = DataPort(
        listener,
        transport=transport(token),
        open_edge=lambda _: socket.socket.close,
        offers=Offers(),
    )
    server.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


@contextmanager
def played(play: Callable[[socket.socket], None], answer: bytes = GRANTED) -> Iterator[str]:
    """The address of something that answers one request, and then plays a peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def act() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.settimeout(BOUND_SECONDS)
                connected.recv(65536)
                connected.sendall(answer)
                play(connected)

        actor = Thread(target=act)
        actor.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            actor.join(BOUND_SECONDS)
            assert not actor.is_alive()


def is_sensible(link: MeasuredLink) -> bool:
    return 0 < link.latency < 10 and 0 < link.bandwidth < math.inf


def open_probe(port: int) -> socket.socket:
    connected, _ = upgrade(transport(), f"127.0.0.1:{port}", PROBE_TARGET, PROBE_PROTOCOL, 5)
    connected.settimeout(BOUND_SECONDS)
    return connected


# A peer that is an agent


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # a name has no shortcut
def test_latency_and_bandwidth_of_a_link_are_measured(host: str) -> None:
    with serving() as port:
        assert is_sensible(measure(transport(), f"{host}:{port}"))


def test_the_join_token_opens_a_probe_and_another_one_does_not() -> None:
    with serving(TOKEN) as port:
        assert is_sensible(measure(transport(TOKEN), f"127.0.0.1:{port}"))
        for wrong in (None, "another"):
            with pytest.raises(LocalError, match="token") as caught:
                measure(transport(wrong), f"127.0.0.1:{port}")
            assert caught.value.details["http_status"] == 401


@pytest.mark.parametrize("rubbish", [b"", b"p" * 1000, b"b", b"\0", b"GET / HTTP/1.1\r\n\r\n"])
def test_whatever_a_peer_says_the_next_one_can_measure(
    rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), serving() as port:
        with open_probe(port) as connected:
            connected.sendall(rubbish)
        assert is_sensible(measure(transport(), f"127.0.0.1:{port}"))
    assert caplog.messages == []


class Turns:
    """The lock of those who measure; counts how often it was taken."""

    def __init__(self) -> None:
        self._lock = link_probe._one_at_a_time
        self.begun = 0

    def acquire(self, timeout: float) -> bool:
        taken = self._lock.acquire(timeout=timeout)
        self.begun += taken
        return taken

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("said", [b"", b"p", b"b"], ids=["silent", "hesitant", "never reads"])
def test_a_peer_that_does_not_use_its_turn_loses_it(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_probe, "_PATIENCE", 0.5)

    def is_measured() -> bool:
        try:
            return is_sensible(measure(transport(), f"127.0.0.1:{port}"))
        except PeerLost:
            return False

    turns = Turns()
    monkeypatch.setattr(link_probe, "_one_at_a_time", turns)
    with serving() as port, open_probe(port) as connected:
        # Or else the one that measures may overtake it, and it gets its turn afterwards.
        wait_until(lambda: turns.begun, "its turn has come", BOUND_SECONDS)
        connected.sendall(said)
        wait_until(is_measured, "its turn is over", BOUND_SECONDS)
        assert sum(map(len, iter(lambda: connected.recv(1 << 20), b""))) < 16 << 20


# A peer that is none, or fails


def shut_up(connected: socket.socket) -> None:
    """Until the other side has enough."""
    while connected.recv(1):
        pass


def answer_wrongly(connected: socket.socket) -> None:
    while (asked := connected.recv(1)) == b"p":
        connected.sendall(b"q")
    if asked == b"b":
        connected.sendall(bytes(16 << 20))


def answer_until_bulk(connected: socket.socket) -> None:
    while (asked := connected.recv(1)) == b"p":
        connected.sendall(asked)


def begin_bulk(connected: socket.socket) -> None:
    answer_until_bulk(connected)
    connected.sendall(bytes(1000))


def stall_in_bulk(connected: socket.socket) -> None:
    begin_bulk(connected)
    shut_up(connected)


@pytest.mark.parametrize(
    "play",
    [
        socket.socket.close,
        shut_up,
        answer_wrongly,
        answer_until_bulk,
        begin_bulk,
        stall_in_bulk,
        lambda connected: connected.sendall(b"p" * 100),
    ],
    ids=["closes", "silent", "wrong", "no bulk", "short bulk", "stalls", "hasty"],
)
def test_a_peer_that_does_not_keep_to_the_protocol_is_lost_in_time(
    play: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_probe, "_PATIENCE", 0.5)
    began = time.monotonic()
    with played(play) as address, pytest.raises(PeerLost, match=address):
        measure(transport(), address)
    assert time.monotonic() - began < BOUND_SECONDS


def test_a_peer_that_closes_amid_the_zeros_is_lost_at_once() -> None:
    with played(begin_bulk) as address, pytest.raises(PeerLost, match="was closed"):
        measure(transport(), address)


def test_bytes_that_come_along_with_the_grant_are_no_answer() -> None:
    with (
        played(socket.socket.close, GRANTED + b"p" * 20) as address,
        pytest.raises(PeerLost, match="before a question"),
    ):
        measure(transport(), address)


def test_an_agent_without_the_protocol_is_not_measured() -> None:
    with (
        played(socket.socket.close, NOT_FOUND) as address,
        pytest.raises(LocalError, match="the data port has no"),
    ):
        measure(transport(), address)


def test_a_peer_that_never_grants_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PeerLost, match=address):
            measure(transport(), address)
        assert time.monotonic() - began < BOUND_SECONDS


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:0", "nowhere.invalid:1"])
def test_an_address_that_leads_nowhere_is_an_error(address: str) -> None:
    with pytest.raises(AllfoldError):
        measure(transport(), address)


# Long links, and turns


def test_over_a_long_link_few_questions_are_asked() -> None:
    asked = []

    def answer_late(connected: socket.socket) -> None:
        while connected.recv(1) == b"p":
            asked.append(Event().wait(0.25))
            connected.sendall(b"p")
        connected.sendall(bytes(16 << 20))

    with played(answer_late) as address:
        link = measure(transport(), address)
    assert link.latency > 0.1
    assert len(asked) == 2


def test_waiting_for_its_turn_does_not_count_as_latency() -> None:
    def answer_when_it_is_time(connected: socket.socket) -> None:
        Event().wait(1.0)
        answer_until_bulk(connected)
        connected.sendall(bytes(16 << 20))

    with played(answer_when_it_is_time) as address:
        assert measure(transport(), address).latency < 0.5


def test_of_two_links_the_worse_has_the_faults_of_both() -> None:
    assert worse(None, MeasuredLink(1.0, 2.0)) == MeasuredLink(1.0, 2.0)
    assert worse(MeasuredLink(1.0, 2.0), MeasuredLink(3.0, 4.0)) == MeasuredLink(3.0, 2.0)
    assert worse(MeasuredLink(3.0, 4.0), MeasuredLink(1.0, 2.0)) == MeasuredLink(3.0, 2.0)
