"""Data ports for one test each."""

from collections.abc import Iterator

import pytest

from tests.node_agent.tensors import service as services
from tests.node_agent.tensors import source as sources


@pytest.fixture
def source() -> Iterator[sources.Source]:
    with sources.serving() as source:
        yield source


@pytest.fixture
def service() -> Iterator[services.Service]:
    with services.serving() as service:
        yield service
