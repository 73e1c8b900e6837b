"""One Allfold of five nodes for all conformance tests, and the ranks that use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes.ranks import Job, RankPool
from tests.support.processes.services import Services

NODES = 5
# A rank imports torch with its first bfloat16 tensor: on a busy machine the others wait for long.
OP_SECONDS = 45.0

# Rank r is on node SHAPES[...][r]. The last one has 1, 2 and 3 ranks per node, out of order.
SHAPES: dict[str, tuple[int, ...]] = {
    "1x3": (0, 0, 0),
    "2x2": (0, 0, 1, 1),
    "3x1": (0, 1, 2),
    "5x1": (0, 1, 2, 3, 4),
    "1+2+3": (2, 0, 2, 1, 2, 1),
}

# Ranks of one node use no strategy, whatever they ask for. Three nodes are in 1+2+3 as well, and
# nodes of one rank in 5x1.
STRATEGIES_OF_SHAPES = {"1x3": ("auto",), "3x1": ()}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another shape tests as well: strategies are run on 2x2, 5x1 and 1+2+3."""
    same = [item for item in items if _is_tested_by_another_shape(item)]
    if same:
        config.hook.pytest_deselected(items=same)
        items[:] = [item for item in items if item not in same]


def _is_tested_by_another_shape(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    wanted = STRATEGIES_OF_SHAPES.get(str(parameters.get("shared_job")))
    return "strategy" in parameters and wanted is not None and parameters["strategy"] not in wanted


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    with Services() as services:
        services.start_orchestrator()
        services.start_agents(*(f"node{number}" for number in range(NODES)))
        yield services


@pytest.fixture(autouse=True)
def _all_agents_live(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the agents again that a test has killed: the job of the next module needs them."""
    yield
    if "services" in request.fixturenames:
        request.getfixturevalue("services").restart_dead_agents()


@pytest.fixture(scope="session")
def pool(services: Services) -> Iterator[RankPool]:
    with RankPool(services) as pool:
        yield pool


@pytest.fixture(scope="module", params=SHAPES)
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    """A registered group of each shape, for all tests of a module."""
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


@pytest.fixture
def job(request: pytest.FixtureRequest, shared_job: Job, pool: RankPool) -> Iterator[Job]:
    """The shared group; after a test that failed, a new one takes its place."""
    failed_before = request.session.testsfailed
    yield shared_job
    if request.session.testsfailed > failed_before:
        pool.replace(shared_job, timeout=OP_SECONDS)
