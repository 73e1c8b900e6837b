"""Whatever bytes come to a port of an agent, it ends their connection and serves others."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from time import monotonic

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_agent.data_port import DataPort
from allfold_agent.edges.in_edge import InEdge
from allfold_agent.http.client import ClientExchange, get_json, read_error
from allfold_agent.http.server import BadRequest, HttpExchange, read_request
from allfold_agent.http.transport import Transport
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.tensors.offers import Offers
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.protocol.frames import EDGE_PROTOCOL
from allfold_core.protocol.peer_link import LINK_PROTOCOL
from allfold_core.protocol.rank_messages import (
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    SEGMENT,
    Message,
    pack_json,
)
from allfold_core.schedules.schedule import Await, Receive, Slice
from allfold_service.credentials import Credentials, Tokens
from tests.fuzz.effort import tries
from tests.fuzz.mutations import mutated
from tests.fuzz.test_messages import CALLS, DEEP, NUMBERS
from tests.node_agent.data_ports import answering, get
from tests.node_agent.edges.edge_ends import Side, frames_of
from tests.node_agent.local import served_ranks
from tests.support.credentials import certificates, with_tls
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.waiting import wait_until

# Of inputs of some 10 KiB, which Hypothesis prints where one fails.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

SECONDS = 10.0
_EDGE = f"GET /v1/groups/g/openings/3/edges/b/a?from_frame=7 HTTP/1.1\r\nUpgrade: {EDGE_PROTOCOL}"
REQUESTS = [
    get("/v1/tensors/x?wait=0").encode(),
    b"GET /v1/tensors/a%2Fb HTTP/1.1\r\nHost: a\r\nRange: bytes=0-7,9-\r\n\r\n",
    b"PUT /v1/tensors/x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"PUT /v1/tensors/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n0\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost:\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    f"{_EDGE}\r\nConnection: Upgrade\r\nHost: a\r\n\r\n".encode(),
    f"{_EDGE}\r\nConnection: Upgrade\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode(),
    f"GET /v1/link?node=n HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: {LINK_PROTOCOL}\r\n\r\n"
    "".encode(),
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /v1/groups/g/openings/3/ops/4/results/5 HTTP/1.1\r\n"
    b"Host:\r\nExpect: 100-continue\r\n\r\n",
]
RESPONSES = [
    b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"node":"n"}',
    b"HTTP/1.1 404 no\r\nContent-Length: 53\r\n\r\n"
    b'{"error":{"code":"AF100","message":"","details":{}}}',
    b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 no\r\nContent-Length: 99999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n" + DEEP[0],
    b"HTTP/1.1 500 no\r\nContent-Length: 60000\r\n\r\n" + DEEP[0],
]


@tries(150)
@given(mutated(REQUESTS))
def test_a_head_is_read_or_refused(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        try:
            found = read_request(far, b"", idle=SECONDS, timeout=SECONDS)
        except (BadRequest, ConnectionAbortedError):
            return
        assert found is None or isinstance(found, HttpExchange)


@tries(150)
@given(mutated(RESPONSES))
def test_an_answer_is_read_or_refused(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        exchange = ClientExchange("a:1", "GET", "/x", [], Tokens())
        exchange.end_request()
        with suppress(h11.RemoteProtocolError, OSError):
            head = exchange.read_head(far, monotonic() + SECONDS)
            read_error(far, head, "a:1", monotonic() + SECONDS)


@pytest.mark.parametrize("response", RESPONSES)
def test_json_of_another_server_is_an_object_or_an_error(response: bytes) -> None:
    with answering(response) as address:
        try:
            assert get_json(Transport(), address, "/x", SECONDS) == {"node": "n"}
        except (AllfoldError, OSError):
            return


def say_all(sock: socket.socket, data: bytes) -> None:
    """Send something, and that there is no more; the other end may have closed meanwhile."""
    with suppress(ConnectionError):
        sock.sendall(data)
    with suppress(OSError):  # also "not connected"
        sock.shutdown(socket.SHUT_WR)


def hello() -> bytes:
    """The first bytes of a client with TLS."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="allfold").do_handshake()
    return sent.read()


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_data_port_answers_or_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_tls: bool
) -> None:
    credentials = Credentials()
    if has_tls:
        credentials = with_tls(certificates(tmp_path, "a").path / "a")
    transport, listener = Transport(credentials), socket.create_server(("127.0.0.1", 0))
    server = DataPort(
        listener,
        transport=transport,
        open_edge=lambda _: socket.socket.close,
        open_link=lambda _: socket.socket.close,
        offers=Offers(),
    )
    place = listener.getsockname()
    server.start()

    @tries(100)
    @given(mutated([*REQUESTS, hello()]))
    def talks(data: bytes) -> None:
        with socket.create_connection(place, SECONDS) as sock, suppress(ConnectionError):
            say_all(sock, data)
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
            assert b"HTTP/1.1 500" not in answer
            assert has_tls or not answer or answer.startswith(b"HTTP/1.1 ")

    try:
        talks()
        with pytest.raises(AllfoldError) as refusal:  # the port serves others
            get_json(transport, f"127.0.0.1:{place[1]}", "/v1/tensors/x?wait=0", SECONDS)
        assert refusal.value.details["http_status"] == 404
    finally:
        server.close()
        transport.close()
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


_NUMBER = {"request": 1, "number": 0, "seq": 0, "boundary": 0}
RANK_MESSAGES = [
    *CALLS,
    *(bytes([kind]) + data for kind in (Message.LEAVE, Message.LOOK) for data in DEEP + NUMBERS),
    *(pack_json(kind, _NUMBER) for kind in Message),
    pack_json(Message.JOIN, {**_NUMBER, "group": "g", "rank": 0, "session": "s"}),
    pack_json(Message.LOOK, {**_NUMBER, "seq": float("inf")}),
    pack_json(Message.ABANDON, {**_NUMBER, "seq": 1 << 63, "call": "reduce", "reason": "x" * 9000}),
    pack_json(Message.ABANDON, {**_NUMBER, "call": 3, "reason": None}),
    pack_json(Message.LEAVE, {**_NUMBER, "request": [[{}]], "how": 7}),
    pack_json(Message.EXPLAIN, {**_NUMBER, "kind": None, "nbytes": float("nan")}),
    pack_json(Message.SHARE, {**_NUMBER, "size": -1, "uuid": 3, "proof": "zz"}),
    SEGMENT.pack(Message.SEGMENT, 0, 4096),
    SEGMENT.pack(Message.SEGMENT, 0, 2**63),
]


def test_the_local_socket_answers_or_lets_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = os.memfd_create("fuzz")
    hello = pack_json(Message.HELLO, {"protocol": PROTOCOL_VERSION})

    @tries(150)
    @given(
        st.booleans(), st.lists(mutated(RANK_MESSAGES).filter(len), max_size=6), st.integers(0, 3)
    )
    def talks(greets: bool, messages: list[bytes], files: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
            rank.settimeout(SECONDS)
            rank.connect(str(tmp_path / "agent.sock"))
            with suppress(BrokenPipeError, ConnectionResetError):
                for message in [hello] * greets + messages:
                    socket.send_fds(rank, [message[:MAX_MESSAGE]], [file] * files)
                rank.shutdown(socket.SHUT_WR)
                while rank.recv(MAX_MESSAGE):
                    pass

    registrar = served_ranks.empty_registrar()
    with served_ranks.serving(tmp_path, registrar) as (server, _):
        talks()
        wait_until(lambda: not server.processes, "all are gone")
        with served_ranks.greeted(tmp_path):
            pass
    os.close(file)
    bugs = [each.getMessage() for each in caplog.records if each.exc_info]
    assert bugs == []


NUMEL, CHUNK = 300, 100


@tries(30)
@given(mutated([b"".join(frames_of(NUMEL, CHUNK))]), st.booleans())
def test_an_edge_takes_frames_or_ends_their_connection(data: bytes, is_tcp: bool) -> None:
    side = Side(1, (Receive(Slice(0, NUMEL), 0), Await(0)), 1, numel=NUMEL, chunk=CHUNK)
    near, far = tcp_pair() if is_tcp else socket.socketpair()
    connections = [far]

    def dial(_: int) -> tuple[socket.socket, bytes]:
        if not connections:
            side.problem.set()
            raise PeerLost("there is no other one")
        return connections.pop(), b""

    reactor = Reactor("test")
    reactor.start()
    with near:
        edge = InEdge("a", "fuzz-a-b", dial, side, reactor)
        try:
            near.settimeout(SECONDS)
            say_all(near, data)
            assert side.problem.wait(SECONDS), "the end of the connection was not noticed"
        finally:
            edge.close()
            reactor.close()
    assert not [each for each in side.lost if "failed" in each.message]
