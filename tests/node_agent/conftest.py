"""A data port for the tests of how connections and edges begin, and a reactor."""

from collections.abc import Iterator

import pytest

from allfold_agent.runtime.reactor import Reactor
from tests.node_agent.data_ports import Port, serving


@pytest.fixture
def port() -> Iterator[Port]:
    with serving() as port:
        yield port


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("test")
    reactor.start()
    yield reactor
    reactor.close()
