"""Agents that come one after another measure their links, and plans are made for those."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from tests.support.services import Services

from allfold_core.plan import LinkModel

pytestmark = pytest.mark.slow


def post(services: Services, path: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {services.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{services.orchestrator_url}{path}", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=5.0) as response:
        assert response.status == 200


def links_of_a_plan(services: Services) -> LinkModel:
    """What the plan of a group of all nodes reckons with."""
    nodes = services.get(f"{services.orchestrator_url}/v1/nodes")["nodes"]
    for rank, node in enumerate(nodes):
        seat = {
            "rank": rank,
            "node": node["node"],
            "incarnation": node["incarnation"],
            "session": f"s{rank}",
            "world_size": len(nodes),
            "timeout": 30.0,
            "strategies": {},
        }
        post(services, "/v1/groups/links/ranks", seat)
    plan = f"{services.orchestrator_url}/v1/groups/links/plan?epoch=1&session=s0&wait=5"
    return LinkModel(**services.get(plan)["plan"]["links"])


def test_two_agents_and_the_plan_has_the_link_between_them() -> None:
    with Services() as services:
        services.start_orchestrator()
        services.start_agents("node0")
        services.start_agents("node1")
        links = links_of_a_plan(services)
    assert (links.latency, links.seconds_per_byte) != (
        LinkModel().latency,
        LinkModel().seconds_per_byte,
    )
    assert 0 < links.latency < 1
    assert 0 < links.seconds_per_byte < 1


def test_an_agent_alone_is_assumed_to_have_the_default_links() -> None:
    with Services() as services:
        services.start_orchestrator()
        services.start_agents("node0")
        assert links_of_a_plan(services) == LinkModel()
