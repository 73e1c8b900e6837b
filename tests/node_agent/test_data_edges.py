"""Edges begin as an HTTP request on the data port; the data port itself has limits."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
from tests.support.waiting import wait_until

from allfold_agent.addresses import parse_address
from allfold_agent.data_server import DataServer, SocketTaker
from allfold_agent.edge_request import EdgeRequest
from allfold_agent.http_client import upgrade
from allfold_agent.link_probe import PROBE_PROTOCOL, PROBE_TARGET
from allfold_agent.tensor_store import TensorStore
from allfold_core.errors import (
    InvalidArgument,
    LocalError,
    PeerError,
    PeerLost,
    PeerMissing,
    RegisterParamsMismatch,
    ServiceError,
)
from allfold_core.frames import EDGE_PROTOCOL

TOKEN = "a-join-token"
EDGE = EdgeRequest("group/ü", epoch=3, src=1, dst=0, from_frame=7)
RAW_EDGE = (
    "GET /v1/groups/g/epochs/3/edges/1/0 HTTP/1.1\r\nHost: a\r\n"
    f"Connection: Upgrade\r\nUpgrade: {EDGE_PROTOCOL}\r\n"
)


def get(target: str) -> str:
    return f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


class Port:
    """A data port that hands the edges it granted to the test."""

    def __init__(self, **options: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.place = listener.getsockname()
        self.address = f"127.0.0.1:{self.place[1]}"
        self.tcp_address = f"localhost:{self.place[1]}"  # a name has no shortcut
        self.taken: SimpleQueue[tuple[EdgeRequest, socket.socket]] = SimpleQueue()
        self.refusal: Exception | None = None
        self.greeting = b""
        options = {"token": None, "tensors": TensorStore()} | options
        self.server = DataServer(listener, open_edge=self._open, **options)
        self.server.start()

    def _open(self, request: EdgeRequest) -> SocketTaker:
        if self.refusal:
            raise self.refusal

        def take(sock: socket.socket) -> None:
            sock.sendall(self.greeting)
            self.taken.put((request, sock))

        return take

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=5)

    def say(self, request: str) -> tuple[int, str, bytes]:
        """Status, head and body of the answer to a raw request, read until the server closes."""
        with self.connect() as sock:
            sock.sendall(request.encode())
            return split_response(read_all(sock))


def read_all(sock: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(65536), b""))
    return b""


def split_response(data: bytes) -> tuple[int, str, bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), body


@contextmanager
def serving(**options: Any) -> Iterator[Port]:
    port = Port(**options)
    try:
        yield port
    finally:
        port.server.close()
        while not port.taken.empty():
            port.taken.get()[1].close()


@pytest.fixture
def port() -> Iterator[Port]:
    with serving() as port:
        yield port


@contextmanager
def answering(response: bytes) -> Iterator[str]:
    """The address of something that answers one connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(response)

        thread = Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def with_body(body: bytes) -> bytes:
    return b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def test_an_edge_gets_the_socket_of_its_request(port: Port) -> None:
    sock, early = upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)
    with sock:
        request, theirs = port.taken.get(timeout=5)
        with theirs:
            assert request == EDGE
            theirs.sendall(b"frame")
            assert early + sock.recv(100) == b"frame"
            sock.sendall(b"ack")
            assert theirs.recv(100) == b"ack"


def test_both_ends_of_an_edge_are_blocking_and_send_small_frames_at_once(port: Port) -> None:
    sock, _ = upgrade(port.tcp_address, EDGE.target, EDGE_PROTOCOL, None, 5)
    _, theirs = port.taken.get(timeout=5)
    for end in (sock, theirs):
        with end:
            assert end.gettimeout() is None
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_edge_inside_one_machine_runs_over_a_unix_socket(port: Port) -> None:
    sock, _ = upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)
    _, theirs = port.taken.get(timeout=5)
    for end in (sock, theirs):
        with end:
            assert end.gettimeout() is None
            assert end.family == socket.AF_UNIX


def test_an_edge_falls_back_to_tcp_where_nothing_listens_beside_the_port() -> None:
    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with answering(answer) as address, pytest.raises(PeerError, match="answered 404"):
        upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 5)


def test_bytes_that_come_with_the_head_of_the_response_are_not_lost() -> None:
    head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: allfold-edge/1\r\n"
    with answering(head + b"\r\nthe first frames") as address:
        sock, early = upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 5)
        with sock:
            whole = early + read_all(sock)
    assert early
    assert whole == b"the first frames"


def test_an_edge_outlives_the_server_that_handed_it_over(port: Port) -> None:
    sock, _ = upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)
    _, theirs = port.taken.get(timeout=5)
    with sock, theirs:
        port.server.close()
        theirs.sendall(b"still here")
        assert sock.recv(100) == b"still here"


def test_a_refused_edge_raises_the_refusal_at_the_peer(port: Port) -> None:
    port.refusal = RegisterParamsMismatch("epoch 3 is over", epoch=3)
    with pytest.raises(RegisterParamsMismatch, match="epoch 3 is over") as caught:
        upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)
    assert caught.value.details == {"epoch": 3}


def test_a_refusal_that_is_also_an_os_error_is_still_the_refusal(port: Port) -> None:
    port.refusal = PeerMissing("nobody came")
    with pytest.raises(PeerMissing, match="nobody came"):
        upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)


def test_a_bug_behind_the_port_is_logged_and_answered_without_its_text(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    port.refusal = KeyError("secret")
    status, _, body = port.say(RAW_EDGE.replace("Upgrade\r", "Upgrade, close\r", 1) + "\r\n")
    assert status == 500
    assert b"secret" not in body
    assert "secret" in caplog.text


def test_an_edge_whose_taker_fails_is_closed(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    port.greeting = "no bytes"  # type: ignore[assignment]
    sock, _ = upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)
    with sock:
        assert sock.recv(100) == b""
    assert "could not take its connection" in caplog.text


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("/v1/groups/g/epochs/-1/edges/0/1", "epoch"),
        ("/v1/groups/g/epochs/4294967296/edges/0/1", "epoch"),
        ("/v1/groups/g/epochs/0/edges/x/1", "src"),
        ("/v1/groups/g/epochs/0/edges/0/%C2%B2", "dst"),
        ("/v1/groups/g/epochs/0/edges/0/1?from_frame=", "from_frame"),
        ("/v1/groups/g/epochs/0/edges/0/1?from_frame=18446744073709551616", "from_frame"),
        ("/v1/groups/g/epochs/0/edges/0/1?from_fram=1", "from_fram"),
        ("/v1/groups/g/epochs/0/edges/1/1", "itself"),
        ("/v1/groups//epochs/0/edges/0/1", "group"),
    ],
)
def test_bad_numbers_of_an_edge_are_named(port: Port, target: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        upgrade(port.address, target, EDGE_PROTOCOL, None, 5)


def test_the_largest_numbers_that_a_frame_can_carry_are_good(port: Port) -> None:
    largest = EdgeRequest("g", 2**32 - 1, 2**31 - 1, 0, 2**64 - 1)
    sock, _ = upgrade(port.address, largest.target, EDGE_PROTOCOL, None, 5)
    with sock:
        request, theirs = port.taken.get(timeout=5)
        theirs.close()
    assert request == largest


def test_an_edge_without_upgrade_is_told_to_upgrade(port: Port) -> None:
    status, head, body = port.say(get(EDGE.target))
    assert status == 426
    assert f"upgrade: {EDGE_PROTOCOL}" in head
    assert json.loads(body)["error"]["code"] == LocalError.code


def test_a_probe_without_upgrade_is_told_to_upgrade(port: Port) -> None:
    status, head, body = port.say(get(PROBE_TARGET))
    assert status == 426
    assert f"upgrade: {PROBE_PROTOCOL}" in head
    assert PROBE_PROTOCOL in json.loads(body)["error"]["message"]


def test_one_protocol_is_not_granted_where_another_one_is_spoken(port: Port) -> None:
    for target, protocol in ((PROBE_TARGET, EDGE_PROTOCOL), (EDGE.target, PROBE_PROTOCOL)):
        with pytest.raises(LocalError, match="needs Upgrade") as caught:
            upgrade(port.address, target, protocol, None, 5)
        assert caught.value.details["http_status"] == 426


def test_bytes_sent_before_an_edge_was_granted_are_refused(port: Port) -> None:
    assert port.say(RAW_EDGE + "\r\nacknowledgement")[0] == 400
    assert port.taken.empty()


@pytest.mark.parametrize("token", [None, "another", TOKEN + "x", TOKEN[:-1]])
def test_a_wrong_token_opens_nothing(token: str | None) -> None:
    with serving(token=TOKEN) as port:
        with pytest.raises(LocalError, match="token") as caught:
            upgrade(port.address, EDGE.target, EDGE_PROTOCOL, token, 5)
        assert caught.value.details["http_status"] == 401
        assert port.taken.empty()


def test_the_right_token_opens_an_edge() -> None:
    with serving(token=TOKEN) as port:
        sock, _ = upgrade(port.address, EDGE.target, EDGE_PROTOCOL, TOKEN, 5)
        port.taken.get(timeout=5)[1].close()
        sock.close()


def test_without_the_token_nobody_learns_what_exists() -> None:
    with serving(token=TOKEN) as port:
        for path in ("/", "/v1/tensors/a", EDGE.target):
            status, head, _ = port.say(get(path))
            assert status == 401
            assert "www-authenticate: bearer" in head


def test_a_port_that_nobody_listens_on_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLost, match=address):
        upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 5)


def test_a_peer_that_never_answers_is_lost_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PeerLost, match=address):
            upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 0.2)
        assert 0.1 < time.monotonic() - began < 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 101 Switching", b"SSH-2.0-OpenSSH_9\r\n\r\n"])
def test_a_peer_that_does_not_finish_its_answer_is_lost(answer: bytes) -> None:
    with answering(answer) as address, pytest.raises(PeerLost, match=address):
        upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 5)


@pytest.mark.parametrize(
    "answer",
    [
        with_body(b"not found"),
        with_body(b"[]"),
        with_body(b'{"error": "no"}'),
        with_body(b'{"error": {"message": "another kind", "type": "x"}}'),
        with_body(b'{"error": {"code": 1}}'),
        with_body(b'{"error": {"code": "AF101", "details": [1]}}'),
        b"HTTP/1.1 500 Oh\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 101 Hm\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_another_kind_of_server_is_named_as_such(answer: bytes) -> None:
    with answering(answer) as address, pytest.raises(PeerError, match=address) as caught:
        upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 5)
    assert type(caught.value) is PeerError


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
    ],
)
def test_addresses_are_host_and_port(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "::1:80", "h:0", "h:65536", "h:x"])
def test_other_addresses_are_invalid(address: str) -> None:
    with pytest.raises(InvalidArgument):
        upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 1)


@pytest.mark.parametrize("token", ["secret\r\nlines", "secret\0", "secret ü", "secret two", ""])
def test_a_token_that_a_header_cannot_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidArgument, match="token") as caught:
        upgrade("127.0.0.1:1", EDGE.target, EDGE_PROTOCOL, token, 1)
    assert "secret" not in str(caught.value)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(InvalidArgument, match="token"),
    ):
        DataServer(
            listener, token=token, open_edge=lambda _: socket.socket.close, tensors=TensorStore()
        )


def test_an_edge_opens_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    socks: SimpleQueue[socket.socket] = SimpleQueue()
    server = DataServer(
        listener, token=None, open_edge=lambda request: socks.put, tensors=TensorStore()
    )
    server.start()
    address = f"[::1]:{listener.getsockname()[1]}"
    upgrade(address, EDGE.target, EDGE_PROTOCOL, None, 5)[0].close()
    socks.get(timeout=5).close()
    server.close()


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


def test_connections_beyond_the_limit_are_told_so_until_one_ends() -> None:
    with serving(max_connections=2) as port:
        first, second = port.connect(), port.connect()
        with pytest.raises(ServiceError, match="2 connections"):
            upgrade(port.tcp_address, EDGE.target, EDGE_PROTOCOL, None, 5)
        first.close()
        deadline = time.monotonic() + 5
        sock = None
        while sock is None and time.monotonic() < deadline:
            with suppress(ServiceError):
                sock, _ = upgrade(port.tcp_address, EDGE.target, EDGE_PROTOCOL, None, 5)
        assert sock is not None
        sock.close()
        second.close()


def test_an_edge_that_was_handed_over_leaves_its_place_to_others() -> None:
    with serving(max_connections=1) as port:
        socks = []
        for _ in range(3):
            socks.append(upgrade(port.address, EDGE.target, EDGE_PROTOCOL, None, 5)[0])
            socks.append(port.taken.get(timeout=5)[1])
        for sock in socks:
            sock.close()


def test_a_connection_without_requests_is_closed_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with serving(idle_timeout=0.1) as port, port.connect() as sock:
        assert sock.recv(1) == b""
    assert not caplog.records


def test_a_head_that_drips_in_is_cut_off() -> None:
    with serving(stall_timeout=0.3) as port, port.connect() as sock:
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began + 5:
                sock.sendall(b"G")
                sock.settimeout(0.05)
                with suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        assert time.monotonic() - began < 2


def test_a_machine_without_threads_left_loses_a_client_and_not_the_port(
    port: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        with port.connect() as sock:
            assert sock.recv(1) == b""
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
