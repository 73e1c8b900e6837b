"""The checks around every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from allfold_agent.runtime import locks


@pytest.fixture(autouse=True)
def locks_are_taken_in_order() -> Iterator[None]:
    """No thread of this process has taken locks of the agent out of order."""
    yield
    found, locks.violations[:] = list(locks.violations), []
    assert not found, found


@pytest.fixture(autouse=True)
def sigterm_is_handled_as_before() -> Iterator[None]:
    """Give the next test SIGTERM as this one found it: a service's `main` keeps it for good."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
