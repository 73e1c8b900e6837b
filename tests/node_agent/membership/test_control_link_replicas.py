"""The control link of an agent to an orchestrator of several replicas."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import pytest

from allfold_cluster.environment import free_address
from tests.node_agent.membership.linked_node import linked_node
from tests.node_agent.membership.scripted_orchestrator import (
    ScriptedOrchestrator,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_where_a_replica_is_silent_the_node_links_to_the_next(
    two: list[ScriptedOrchestrator],
) -> None:
    first, second = two
    async with linked_node(first.url, second.url) as node:
        link = await first.is_linked()
        first.is_silent = True
        await (await second.is_linked()).hears_beats()
        assert node.registration.problem is None
        await until(lambda: link.is_over, "the silent one is given up")
        assert node.client.url == second.url


async def test_a_registration_without_an_answer_is_made_at_the_next_replica(
    two: list[ScriptedOrchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.membership.control_socket.REGISTER_SECONDS", 0.05)
    first, second = two
    first.keeps_registering_waiting = True
    async with linked_node(first.url, second.url):
        await second.is_linked()


async def test_a_node_goes_from_replica_to_replica_as_long_as_need_be(
    two: list[ScriptedOrchestrator],
) -> None:
    first, second = two
    async with linked_node(first.url, second.url):
        await (await first.is_linked()).socket.close(1001)
        await (await second.is_linked()).socket.close(1001)
        await first.is_linked(2)


async def test_the_first_replica_that_answers_is_taken(one: ScriptedOrchestrator) -> None:
    nowhere = f"http://{free_address()}"
    async with linked_node(nowhere, one.url) as node:
        await one.is_linked()
        assert node.client.url == one.url


async def test_an_outage_of_all_replicas_names_them_all() -> None:
    urls = [f"http://{free_address()}" for _ in range(2)]
    async with linked_node(*urls) as node:
        await until(lambda: urls[0] in str(node.registration.problem), "it says so")
        assert urls[1] in str(node.registration.problem)


async def test_links_that_end_at_all_replicas_are_named_together(
    two: list[ScriptedOrchestrator],
) -> None:
    first, second = two
    async with linked_node(first.url, second.url) as node:
        link = await first.is_linked()
        first.is_down = second.is_down = True
        await link.socket.close(1001)
        urls = (first.url, second.url)

        def problem_names(*some: str) -> bool:
            return all((url in str(node.registration.problem)) == (url in some) for url in urls)

        await until(lambda: problem_names(*urls), "it names both")
        second.is_down = False
        link = await second.is_linked()
        first.is_down = False
        second.is_silent = first.is_silent = True
        await until(lambda: problem_names(second.url), "what was before is over")


async def test_a_replica_that_accepts_connections_and_does_nothing_is_left(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts for a process that is stopped."""
    monkeypatch.setattr("allfold_agent.membership.orchestrator_client._CONNECT_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        frozen = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        node = await stack.enter_async_context(linked_node(one.url, url))
        monkeypatch.setattr("allfold_agent.membership.control_socket._OPEN_SECONDS", 0.05)
        await (await one.is_linked()).socket.close(1001)
        await one.is_linked(2)
        assert node.registration.problem is None
