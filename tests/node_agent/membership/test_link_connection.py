"""A connection of a link ends once, whatever happens to it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.membership.link_connection import LinkConnection
from allfold_agent.membership.links import PeerLinks
from allfold_agent.runtime.reactor import Reactor
from tests.node_agent.membership.link_nodes import Node, link, nodes


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("not started")
    yield reactor
    reactor.close()


def test_the_end_of_a_connection_is_told_once(reactor: Reactor) -> None:
    """Twice, and the link would dial twice."""
    owner: Any = create_autospec(PeerLinks, instance=True)
    ours, theirs = socket.socketpair()
    with theirs:
        connection = LinkConnection(ours, reactor, owner)
        connection.open(b"hello", b"")
        connection.end("the first reason")
        connection.end("the second reason")
        owner.on_end.assert_called_once_with(connection, "the first reason")
        assert theirs.recv(100) == b"hello"
        assert theirs.recv(100) == b""


@pytest.mark.parametrize("earlier_fails", [True, False], ids=["accepted", "dialled"])
def test_a_connection_that_cannot_be_served_is_closed_and_the_next_one_is_the_link(
    earlier_fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(node: Node) -> None:
        register = node.reactor.register

        def fail(*_: object) -> None:
            monkeypatch.setattr(node.reactor, "register", register)
            raise OSError(errno.ENOSPC, "no room for one more")

        monkeypatch.setattr(node.reactor, "register", fail)

    with nodes("a", "b") as (a, b):
        fail_once(a if earlier_fails else b)
        link(a, b)
        for node in (a, b):
            node.await_connections(1)
            assert len(node.sockets) > 1
