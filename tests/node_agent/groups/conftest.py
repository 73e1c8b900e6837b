"""The thread that serves the short lane, and connections for the links of that."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from allfold_agent.runtime.lane_thread import LaneThread
from tests.node_agent.groups.lane_ends import MakePair
from tests.support.fakes.damaged_wire import tcp_pair


@pytest.fixture
def thread() -> Iterator[LaneThread]:
    thread = LaneThread("test")
    yield thread
    thread.close()


def pairs(make: MakePair) -> Iterator[MakePair]:
    """Yields what makes connections; closes what a test leaves open."""
    made: list[socket.socket] = []

    def pair() -> tuple[socket.socket, socket.socket]:
        both = make()
        made.extend(both)
        return both

    yield pair
    for each in made:
        each.close()


@pytest.fixture(params=[socket.socketpair, tcp_pair], ids=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[MakePair]:
    """Makes connections of either kind."""
    yield from pairs(request.param)


@pytest.fixture
def unix_pair() -> Iterator[MakePair]:
    """Makes connections over which files can be passed."""
    yield from pairs(socket.socketpair)


@pytest.fixture
def wire() -> Iterator[MakePair]:
    """Makes connections over TCP."""
    yield from pairs(tcp_pair)
