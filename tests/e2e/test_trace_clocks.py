"""``allfold trace`` of agents on different clocks, as agents of two machines have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import programs
from tests.e2e.test_trace import LARGE, allfold_trace
from tests.support import trace_format
from tests.support.processes.fixtures import pool_of_ranks
from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services
from tests.support.require import requires

AHEAD_SECONDS = 5000

pool = pool_of_ranks()


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    requires("time-namespaces")
    with Services(clocks_ahead={"node1": AHEAD_SECONDS}) as services:
        # Ranks read their own clock in the short lane, which is not their agent's here.
        services.agent_variables["ALLFOLD_AGENT_SHORT_LANE"] = "off"
        services.start_orchestrator()
        services.start_agents("node0", "node1")
        yield services


def test_no_op_ends_on_a_node_before_all_nodes_have_called_it(
    services: Services, pool: RankPool
) -> None:
    with pool.job((0, 1)) as job:
        job.run(programs.calls, count=20, shape=LARGE)
        trace = trace_format.parse(allfold_trace(services, "--group", job.name, "--output", "-"))
    clocks = trace["otherData"]["clocks"]
    assert clocks["node0"]["uncertainty"] == 0.0
    sure = clocks["node1"]["uncertainty"] * 1e6
    assert sure > 0.0
    calls: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and "what" in event["args"]:
            calls.setdefault(event["args"]["seq"], []).append(event)
    assert len(calls) == 20
    for both in calls.values():
        assert len({event["pid"] for event in both}) == 2
        last_call = max(event["ts"] for event in both)
        first_end = min(event["ts"] + event["dur"] for event in both)
        assert first_end >= last_call - sure
