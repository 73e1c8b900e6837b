"""The short lane between nodes whose connections break, or of which one has no such lane."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from chaos.fleet import PROXY_HOST, ProxyProcess
from tests.conformance import lane_programs, survival_programs
from tests.conformance.conftest import OP_SECONDS
from tests.conformance.lane_status import await_lane, frames, is_open
from tests.support.processes.ranks import Job, RankPool, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

NODES = ("node0", "node1")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    proxy = ProxyProcess(tmp_path_factory.mktemp("proxy") / "log")
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def services(proxy: ProxyProcess) -> Iterator[Services]:
    """Two nodes, of which each reaches the other through a proxy, over TCP."""
    with Services() as services:
        services.agent_variables["ALLFOLD_AGENT_ADVERTISE"] = PROXY_HOST
        services.start_orchestrator()
        for node in NODES:
            proxy.listen(services.launch_agent(node))
        for node in NODES:
            services.await_agent(node)
        yield services


@pytest.fixture(scope="module")
def pool(services: Services) -> Iterator[RankPool]:
    with RankPool(services) as pool:
        yield pool


def await_use(services: Services, job: Job) -> None:
    """Return once more ops have gone by the lane."""
    before = frames(services, "node0", job.name)
    wait_until(lambda: frames(services, "node0", job.name) != before, "the lane is in use")


@pytest.mark.parametrize("shape", [(0, 1), (0, 0, 1, 1)], ids=["2x1", "2x2"])
@pytest.mark.parametrize("fault", ["reset", "flip"])
def test_broken_and_damaged_connections_cost_no_op_and_the_lane_opens_again(
    pool: RankPool,
    services: Services,
    proxy: ProxyProcess,
    tmp_path: Path,
    shape: tuple[int, ...],
    fault: str,
) -> None:
    """The ranks go on all the time, and are told of nothing."""
    with pool.job(shape, timeout=OP_SECONDS) as job:
        await_lane(services, job)
        calls = job.start_all(survival_programs.train, numel=300, folder=str(tmp_path))
        wait_until(lambda: len(list(tmp_path.iterdir())) >= job.world_size, "ops are done")
        for _ in range(5):
            wait_until(lambda: is_open(services, job, NODES), "the lane is open")
            await_use(services, job)
            assert proxy.ask(fault, [(a, b) for a, b in permutations(NODES, 2)]) > 0
        (tmp_path / "stop").touch()
        told = results(calls)
        assert len({each["done"] for each in told}) == 1
        assert [each["losses"] for each in told] == [[]] * job.world_size
        await_lane(services, job)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(0, 2), (0, 0, 2, 2)], ids=["2x1", "2x2"])
def test_with_a_node_whose_lane_is_off_all_goes_by_the_long_lane(
    pool: RankPool, services: Services, shape: tuple[int, ...]
) -> None:
    if "node2" not in services.agents:
        services.agent_variables["ALLFOLD_AGENT_SHORT_LANE"] = "off"
        del services.agent_variables["ALLFOLD_AGENT_ADVERTISE"]
        services.start_agents("node2")
        del services.agent_variables["ALLFOLD_AGENT_SHORT_LANE"]
    with pool.job(shape, timeout=OP_SECONDS) as job:
        assert job.run(lane_programs.count_posted, count=50) == [0] * job.world_size
        assert job.run(lane_programs.all_kinds, first=0, count=20, numel=100) == (
            [20] * job.world_size
        )
        assert job.run(lane_programs.short_and_long, count=8) == [8] * job.world_size
        assert job.run(lane_programs.burst, count=40) == [40] * job.world_size
        assert services.group_status("node0", job.name)["short_lane"] == "closed"
        off = services.group_status("node2", job.name)["short_lane"]
        assert off == "none: it is switched off"
        assert frames(services, "node0", job.name) == 0
