"""A data port for the tests of how connections and edges begin."""

from collections.abc import Iterator

import pytest

from tests.node_agent.data_ports import Port, serving


@pytest.fixture
def port() -> Iterator[Port]:
    with serving() as port:
        yield port
