"""Caps on what agents send over a line: never exceeded, changed while an op runs, results right."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from allfold_agent.traffic.rates import CHUNK_SECONDS
from allfold_cluster.http import put
from allfold_core.protocol.traffic import LEAST_RATE
from tests.conformance import programs
from tests.support.processes.ranks import Job, RankPool
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ADMIN = "admin"
NODES = ("node0", "node1")
NBYTES = 2 << 20
# A name instead of an address of this machine: so agents speak TCP, as between machines.
OVER_TCP = {"ALLFOLD_AGENT_ADVERTISE": "localhost"}


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services(variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}, agent_variables=OVER_TCP) as services:
        services.start_orchestrator()
        services.start_agents(*NODES)
        yield services


def cap(services: Services, group: str, rate: int | str | None) -> None:
    """Set the cap of a group, and wait until both agents keep to it."""
    body = {"group": group, "rate": rate}
    limits = put(f"{services.orchestrator_url}/v1/limits", body, ADMIN)["limits"]
    texts = [each["text"] for each in limits]

    def is_told() -> bool:
        return all(services.status(node)["limits"] == texts for node in NODES)

    wait_until(is_told, f"the agents keep to {texts}")


def sent(services: Services, job: Job) -> dict[str, int]:
    """By node, the bytes of all whole frames that it has written."""
    return {
        node: sum(
            each["payload_bytes"]
            for each in services.group_status(node, job.name)["edges"]
            if each["direction"] == "out"
        )
        for node in NODES
    }


def test_a_group_sends_no_more_than_its_cap_and_its_op_ends_once_that_is_higher(
    services: Services,
) -> None:
    with RankPool(services) as pool, pool.job((0, 1), timeout=120.0) as job:
        cap(services, job.name, LEAST_RATE)
        before, began = sent(services, job), time.monotonic()
        calls = job.start_all(programs.call, shape=[NBYTES // 4], strategy="ring")
        while time.monotonic() < began + 1.0:
            now = sent(services, job)
            most = LEAST_RATE * (time.monotonic() - began + CHUNK_SECONDS)
            assert all(now[node] - before[node] <= most for node in NODES)
            time.sleep(0.05)
        assert not any(call.poll() for call in calls)
        cap(services, job.name, None)
        for call in calls:
            assert call.result() == [3.0] * (NBYTES // 4)


@pytest.mark.parametrize("traffic", ["background", "normal", "high"])
@pytest.mark.parametrize("strategy", ["auto", "ring"])
def test_results_are_right_with_caps_and_classes_in_both_lanes(
    services: Services, traffic: str, strategy: str
) -> None:
    with RankPool(services) as pool, pool.job((0, 0, 1), timeout=60.0, traffic=traffic) as job:
        cap(services, job.name, "40Mbit")
        for numel in (1, 1000, 100_000):
            summed = job.run(programs.call, shape=[numel], strategy=strategy)
            assert summed == [[6.0] * numel] * 3
            sent = job.run(programs.call, kind="broadcast", root=2, shape=[numel])
            assert sent == [[3.0] * numel] * 3
        group = services.get(f"{services.orchestrator_url}/v1/groups/{job.name}")
        assert group["traffic"] == traffic
        cap(services, job.name, None)
