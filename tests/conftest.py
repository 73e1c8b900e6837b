"""The checks around every test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator

import pytest

from allfold_agent.runtime import locks
from tests.support import tiers
from tests.support.budget import Budget, by_time
from tests.support.processes import forked
from tests.tiers import GATE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-times", action="store_true", help="write the time of each test to tests/times.tsv"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of the process that gathers all reports
        config.pluginmanager.register(Budget(config))
    forked.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: all that is made here stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tier of each case, before `-m` selects; what takes longest begins first."""
    tiers.mark(config, items, GATE)
    items[:] = by_time(items)


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
