"""The checks around every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allfold_agent.runtime import locks


@pytest.fixture(autouse=True)
def locks_are_taken_in_order() -> Iterator[None]:
    """No thread of this process has taken locks of the agent out of order."""
    yield
    found, locks.violations[:] = list(locks.violations), []
    assert not found, found
