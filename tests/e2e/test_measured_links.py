"""Agents that come one after another measure their links, and plans are made for those."""

from __future__ import annotations

import pytest

from allfold_core.topology import LinkModel
from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services

pytestmark = pytest.mark.slow


def links_of_a_plan(services: Services, *nodes: int) -> LinkModel:
    """Return the link model in the plan of a group with one rank on each node."""
    with RankPool(services) as pool, pool.job(nodes, "links"):
        group = services.get(f"{services.orchestrator_url}/v1/groups/links")
    return LinkModel(**group["links"])


def test_an_agent_alone_has_the_default_links_and_two_have_the_link_between_them() -> None:
    with Services() as services:
        services.start_orchestrator()
        services.start_agents("node0")
        assert links_of_a_plan(services, 0) == LinkModel()
        services.start_agents("node1")
        links = links_of_a_plan(services, 0, 1)
    usual = LinkModel()
    assert (links.latency, links.seconds_per_byte) != (usual.latency, usual.seconds_per_byte)
    assert 0 < links.latency < 1
    assert 0 < links.seconds_per_byte < 1
