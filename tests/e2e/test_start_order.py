"""Ranks, agents and the orchestrator are started in any order, and find each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allfold_core.errors import OrchestratorUnreachable
from tests.conformance import programs
from tests.support.processes.ranks import RankPool, failures
from tests.support.processes.services import Services

pytestmark = pytest.mark.slow

NODES = (0, 1)


@pytest.fixture
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture
def pool(services: Services) -> Iterator[RankPool]:
    with RankPool(services) as pool:
        yield pool


def test_ranks_first_then_agents_then_the_orchestrator(services: Services, pool: RankPool) -> None:
    with pool.unregistered(NODES) as job:
        calls = job.start_entering(services, timeout=15.0, init_timeout=60.0)
        services.launch_agent("node0")
        services.launch_agent("node1")
        services.await_agent("node1", registered=False)
        services.start_orchestrator()
        job.entered(calls)
        assert job.run(programs.call) == [[3] * 4] * 2


def test_agents_without_an_orchestrator_say_so_until_it_is_there(
    services: Services, pool: RankPool
) -> None:
    """The address of the orchestrator may come without its scheme."""
    services.launch_agent("node0", orchestrator=services.orchestrator_url.partition("//")[2])
    services.await_agent("node0", registered=False)
    with pool.unregistered([0]) as job:
        (failure,) = failures(job.start_entering(services, init_timeout=1.0))
        assert isinstance(failure.error, OrchestratorUnreachable)
        assert failure.seconds < 1.0 + 4.0
        status = services.status("node0")
        assert not status["ready"]
        assert "orchestrator" in status["waiting_for"]
        services.start_orchestrator()
        services.await_agent("node0")
        job.enter(services, timeout=15.0)
        assert job.run(programs.call) == [[1] * 4]
