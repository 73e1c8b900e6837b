"""The client's side of an upgrade: peers that are not there, and servers of another kind."""

import socket
import time

import pytest

from allfold_agent.http.client import upgrade
from allfold_core.errors import PeerError, PeerLost
from allfold_core.protocol.frames import EDGE_PROTOCOL
from tests.node_agent.data_ports import EDGE, answering
from tests.support.credentials import transport


def with_body(body: bytes) -> bytes:
    return b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def test_a_port_that_nobody_listens_on_is_a_lost_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerLost, match=address):
        upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)


def test_a_peer_that_never_answers_is_lost_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PeerLost, match=address):
            upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 0.2)
        assert 0.1 < time.monotonic() - began < 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 101 Switching", b"SSH-2.0-OpenSSH_9\r\n\r\n"])
def test_a_peer_that_does_not_finish_its_answer_is_lost(answer: bytes) -> None:
    with answering(answer) as address, pytest.raises(PeerLost, match=address):
        upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)


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
        upgrade(transport(), address, EDGE.target, EDGE_PROTOCOL, 5)
    assert type(caught.value) is PeerError
