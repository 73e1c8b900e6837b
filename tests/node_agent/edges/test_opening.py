"""Edges begin as an HTTP request on the data port, which hands its socket over."""

import logging
import socket
from itertools import pairwise
from queue import SimpleQueue
from threading import Event
from time import monotonic

import pytest

from allfold_agent.data_port import DataPort
from allfold_agent.edges.opening import EdgeOpener, EdgeRequest
from allfold_agent.http.client import upgrade
from allfold_agent.tensors.offers import Offers
from allfold_core.errors import PeerError, PeerLost, ServiceError
from allfold_core.protocol.frames import EDGE_PROTOCOL
from tests.node_agent.data_ports import EDGE, TOKEN, Port, answering, read_all, serving
from tests.support.credentials import transport
from tests.support.descriptors import no_descriptors_left


def test_an_edge_gets_the_socket_of_its_request(port: Port) -> None:
    sock, early = upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)
    with sock:
        request, theirs = port.taken.get(timeout=5)
        with theirs:
            assert request == EDGE
            theirs.sendall(b"frame")
            assert early + sock.recv(100) == b"frame"
            sock.sendall(b"ack")
            assert theirs.recv(100) == b"ack"


def test_both_ends_of_an_edge_are_blocking_and_send_small_frames_at_once(port: Port) -> None:
    sock, _ = upgrade(transport(), port.tcp_address, EDGE.target, EDGE_PROTOCOL, 5)
    _, theirs = port.taken.get(timeout=5)
    for end in (sock, theirs):
        with end:
            assert end.gettimeout() is None
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_edge_inside_one_machine_runs_over_a_unix_socket(port: Port) -> None:
    sock, _ = upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)
    _, theirs = port.taken.get(timeout=5)
    for end in (sock, theirs):
        with end:
            assert end.gettimeout() is None
            assert end.family == socket.AF_UNIX


def test_an_edge_falls_back_to_tcp_where_nothing_listens_beside_the_port() -> None:
    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with answering(answer) as address, pytest.raises(PeerError, match="answered 404"):
        upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_node_without_file_descriptors_does_not_take_the_other_one_for_lost(
    port: Port, host: str
) -> None:
    address = f"{host}:{port.place[1]}"
    upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)[0].close()
    with no_descriptors_left(), pytest.raises(ServiceError, match="ulimit -n"):
        upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)
    upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)[0].close()


def test_bytes_that_come_with_the_head_of_the_response_are_not_lost() -> None:
    head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: allfold-edge/5\r\n"
    with answering(head + b"\r\nthe first frames") as address:
        sock, early = upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)
        with sock:
            whole = early + read_all(sock)
    assert early
    assert whole == b"the first frames"


def test_an_edge_outlives_the_server_that_handed_it_over(port: Port) -> None:
    sock, _ = upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)
    _, theirs = port.taken.get(timeout=5)
    with sock, theirs:
        port.server.close()
        theirs.sendall(b"still here")
        assert sock.recv(100) == b"still here"


def test_an_edge_whose_taker_fails_is_closed(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    port.greeting = "no bytes"  # type: ignore[assignment]
    sock, _ = upgrade(transport(), port.address, EDGE.target, EDGE_PROTOCOL, 5)
    with sock:
        assert sock.recv(100) == b""
    assert "could not take its connection" in caplog.text


def test_the_largest_numbers_that_a_frame_can_carry_are_good(port: Port) -> None:
    largest = EdgeRequest("g", 2**32 - 1, "b", "a", 2**64 - 1)
    sock, _ = upgrade(transport(), port.address, largest.target, EDGE_PROTOCOL, 5)
    with sock:
        request, theirs = port.taken.get(timeout=5)
        theirs.close()
    assert request == largest


class Pauses(Event):
    """Is never set; notes how long it would have been waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.taken.append(timeout)
        return False


def test_an_edge_that_cannot_be_opened_is_asked_for_again_after_short_pauses() -> None:
    ours, theirs = socket.socketpair()
    answers: list[socket.socket | None] = [None] * 5 + [ours]

    def dial(_from_frame: int) -> tuple[socket.socket, bytes]:
        answer = answers.pop(0)
        if answer is None:
            raise PeerLost("refused")
        return answer, b""

    pauses = Pauses()
    with ours, theirs:
        assert EdgeOpener("test-a-b", dial, pauses).open(0) == (ours, b"")
    assert pauses.taken == [0.0, 0.02, 0.04, 0.05, 0.05, 0.05]


def test_why_an_edge_cannot_be_opened_is_logged_once_per_reason_and_that_it_is_open_at_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    answers = iter(["refused"] * 30 + ["timed out"] * 2 + [None])

    def dial(_from_frame: int) -> tuple[socket.socket, bytes]:
        problem = next(answers)
        if problem is not None:
            raise PeerLost(problem)
        return ours, b""

    with ours, theirs, caplog.at_level(logging.INFO):
        EdgeOpener("test-a-b", dial, Pauses()).open(0)
    assert caplog.messages == [
        "edge test-a-b cannot be opened yet: refused",
        "edge test-a-b cannot be opened yet: timed out",
        "edge test-a-b is open, after 0.0 s",
    ]


def test_the_right_token_opens_an_edge() -> None:
    with serving(token=TOKEN) as port:
        sock, _ = upgrade(transport(TOKEN), port.address, EDGE.target, EDGE_PROTOCOL, 5)
        port.taken.get(timeout=5)[1].close()
        sock.close()


def test_an_edge_opens_over_ipv6() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    socks: SimpleQueue[socket.socket] = SimpleQueue()
    server = DataPort(
        listener, transport=transport(), open_edge=lambda request: socks.put, offers=Offers()
    )
    server.start()
    address = f"[::1]:{listener.getsockname()[1]}"
    upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)[0].close()
    socks.get(timeout=5).close()
    server.close()


def test_a_peer_that_resets_every_connection_does_not_keep_a_core_busy() -> None:
    dialled = []

    def dial(_from_frame: int) -> tuple[socket.socket, bytes]:
        dialled.append(monotonic())
        return socket.socket(), b""

    opener = EdgeOpener("test-a-b", dial, Event())
    for _ in range(10):
        opener.open(0)[0].close()
    assert all(later - earlier >= 0.003 for earlier, later in pairwise(dialled))
