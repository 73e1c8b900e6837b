"""A data port for the tests of how edges begin."""

from collections.abc import Iterator

import pytest

from tests.node_agent.edges.data_ports import Port, serving


@pytest.fixture
def port() -> Iterator[Port]:
    with serving() as port:
        yield port
