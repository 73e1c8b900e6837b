"""One Allfold of two nodes for all tests of the backend, and workers that play its ranks.

Each module has workers of its own: what ranks count must be the same on all, and depends on what
they have done before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.fake_agent import FakeAgent
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import Call, Program, RankPool, results
from tests.support.processes.services import Services

SHAPES = {"1x2": (0, 0), "2x2": (0, 0, 1, 1)}
PROGRAM_SECONDS = 60.0

services = services_with("node0", "node1", scope="package")
pool = pool_of_ranks()


class TorchJob:
    """Ranks that form a torch group in each of their programs."""

    def __init__(
        self, services: Services, pool: RankPool, nodes: Sequence[int], ending: ExitStack
    ) -> None:
        self._services = services
        self._pool = pool
        self._nodes = nodes
        self._ending = ending

    def run(self, program: Program, **arguments: Any) -> list[Any]:
        """Let all ranks run a program inside a group of their own; their results in rank order."""
        return results(self.start(program, **arguments), PROGRAM_SECONDS)

    def start(self, program: Program, **arguments: Any) -> list[Call]:
        """Like :meth:`run`, without waiting for the results."""
        job = self._ending.enter_context(self._pool.unregistered(self._nodes))
        store = str(self._services.folder / f"store-{job.name}")
        return [
            job.ranks[rank].start(
                program,
                rank=rank,
                world_size=len(self._nodes),
                agent=self._services.socket_of(f"node{node}"),
                store=store,
                **arguments,
            )
            for rank, node in enumerate(self._nodes)
        ]


@pytest.fixture(params=SHAPES)
def torch_job(
    request: pytest.FixtureRequest, services: Services, pool: RankPool
) -> Iterator[TorchJob]:
    with ExitStack() as ending:
        yield TorchJob(services, pool, SHAPES[request.param], ending)


@pytest.fixture
def two_nodes(services: Services, pool: RankPool) -> Iterator[TorchJob]:
    with ExitStack() as ending:
        yield TorchJob(services, pool, SHAPES["2x2"], ending)


@pytest.fixture
def one_node(services: Services, pool: RankPool) -> Iterator[TorchJob]:
    with ExitStack() as ending:
        yield TorchJob(services, pool, SHAPES["1x2"], ending)


# For tests of one process, whose agent is scripted


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    """A scripted agent, which this process finds by its environment."""
    with FakeAgent(tmp_path) as agent:
        monkeypatch.setenv("ALLFOLD_SOCKET", agent.path)
        yield agent


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread for a call that waits for the agent."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
