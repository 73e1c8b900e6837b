"""The data port itself: what it answers, its limits, and how it survives its clients."""

import json
import logging
import socket
import time
from contextlib import suppress
from threading import Thread

import pytest

from allfold_agent.http.client import upgrade
from allfold_agent.http.connections import ConnectionLimits
from allfold_core.errors import ServiceError
from allfold_core.protocol.frames import EDGE_PROTOCOL
from tests.node_agent.data_ports import (
    EDGE,
    TOKEN,
    Port,
    begin,
    get,
    read_all,
    serving,
    split_response,
    status,
)
from tests.support.credentials import transport
from tests.support.descriptors import no_descriptors_left
from tests.support.waiting import wait_until

# Far more than it takes to cut a connection off, and less than a peer may pause inside a request.
LONG = 20.0


def test_unknown_paths_are_not_found_and_the_connection_goes_on(port: Port) -> None:
    with port.connect() as sock:
        for _ in range(2):
            sock.sendall(b"GET /v2/nothing HTTP/1.1\r\nHost: a\r\n\r\n")
            status, _, body = split_response(sock.recv(65536))
            assert status == 404
            assert "/v2/nothing" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("complete nonsense\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET /%ff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET /?a=1&a=2 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: a\r\nX: {'x' * 70_000}", 431),
        (f"POST {EDGE.target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 405),
    ],
)
def test_what_is_no_request_gets_an_error_as_json(
    port: Port, request_text: str, status: int
) -> None:
    got, _, body = port.say(request_text)
    assert got == status
    assert json.loads(body)["error"]["message"]


def test_hundreds_of_idle_connections_do_not_keep_a_peer_from_opening_its_edge() -> None:
    with serving(token=TOKEN) as port:
        strangers = [port.connect() for _ in range(300)]
        sock, _ = upgrade(transport(TOKEN), port.tcp_address, EDGE.target, EDGE_PROTOCOL, 5)
        port.taken.get(timeout=5)[1].close()
        for each in (sock, *strangers):
            each.close()


def test_who_says_too_long_nothing_is_let_go_of_and_so_is_who_shows_no_token() -> None:
    limits = ConnectionLimits(greeting_seconds=0.2)
    with serving(token=TOKEN, limits=limits) as port, port.connect() as silent:
        assert silent.recv(1) == b""
        with port.connect() as wrong:
            answers = 0
            with suppress(ConnectionError):
                while True:  # each is answered, but none of them buys more time
                    wrong.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                    if not wrong.recv(65536):
                        break
                    answers += 1
        assert answers > 0


def test_the_oldest_stranger_of_the_address_that_brings_most_of_them_makes_room() -> None:
    with serving(token=TOKEN, limits=ConnectionLimits(strangers=3)) as port:
        with port.connect() as first:
            others = [port.connect() for _ in range(3)]
            assert first.recv(1) == b""
        for sock in others:
            sock.sendall(get("/").encode())
            assert split_response(read_all(sock))[0] == 401
            sock.close()


def test_requests_beyond_the_limit_are_refused_until_one_ends_and_edges_are_not() -> None:
    limits = ConnectionLimits(served=2)
    with serving(limits=limits) as port, begin(port) as first, begin(port) as second:
        assert status(first) == status(second) == 404
        answer = port.say(get("/"))
        assert answer[0] == 503
        assert "serves 2 connections" in json.loads(answer[2])["error"]["message"]
        upgrade(transport(), port.tcp_address, EDGE.target, EDGE_PROTOCOL, 5)[0].close()
        port.taken.get(timeout=5)[1].close()
        first.close()
        wait_until(lambda: port.say(get("/"))[0] == 404, "there is room again")


def test_one_address_does_not_take_the_room_of_all() -> None:
    limits = ConnectionLimits(served_per_address=1)
    with serving(limits=limits) as port, begin(port) as first:
        assert status(first) == 404
        with begin(port) as greedy, begin(port, "127.0.0.2") as other:
            assert [status(greedy), status(other)] == [503, 404]


def test_edges_that_wait_for_their_group_are_limited_too() -> None:
    with (
        serving(limits=ConnectionLimits(opening=0)) as port,
        pytest.raises(ServiceError, match="opens 0 edges at a time"),
    ):
        upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)


def test_an_edge_that_was_handed_over_leaves_its_place_to_others() -> None:
    with serving(limits=ConnectionLimits(strangers=1, opening=1)) as port:
        socks = []
        for _ in range(3):
            socks.append(upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)[0])
            socks.append(port.taken.get(timeout=5)[1])
        for sock in socks:
            sock.close()


def test_without_descriptors_the_port_waits_and_says_so_once(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.socket() as sock:
        sock.settimeout(10)
        with no_descriptors_left():
            sock.connect(port.place)
            sock.sendall(get("/").encode())
            wait_until(lambda: "Too many open files" in caplog.text, "it is noticed")
            with suppress(TimeoutError):  # a few more attempts
                sock.settimeout(0.5)
                sock.recv(1)
        sock.settimeout(10)
        assert split_response(read_all(sock))[0] == 404
    assert caplog.text.count("Too many open files") == 1
    wait_until(lambda: "accepts connections again" in caplog.text, "so is the end of it")


def test_a_connection_without_requests_is_closed_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with serving(limits=ConnectionLimits(greeting_seconds=0.1)) as port, port.connect() as sock:
        assert sock.recv(1) == b""
    with serving(idle_timeout=0.1) as port, begin(port) as sock:
        assert status(sock) == 404
        assert sock.recv(1) == b""
    assert not caplog.records


def test_a_head_that_drips_in_is_cut_off() -> None:
    limits = ConnectionLimits(greeting_seconds=0.3)
    with serving(limits=limits) as port, port.connect() as sock:
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began + LONG:
                sock.sendall(b"G")
                sock.settimeout(0.05)
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert time.monotonic() - began < LONG


def test_a_machine_without_threads_left_loses_a_client_and_not_the_port(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        status, _, body = port.say("")
        assert status == 503, "so that a peer asks again"
        assert "cannot start the thread" in json.loads(body)["error"]["message"]
    assert port.say(get("/"))[0] == 404
    assert "can't start new thread" in caplog.text


def test_closing_the_port_ends_its_connections_and_threads(port: Port) -> None:
    with port.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(65536)
        port.server.close()
        assert sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        port.connect()


def test_a_broken_connection_is_no_more_than_a_line_in_the_log(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with port.connect() as sock:
        sock.sendall(b"GET / HT")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
    wait_until(lambda: "broke" in caplog.text, "it is logged")
    assert all(record.levelno < logging.WARNING for record in caplog.records)
