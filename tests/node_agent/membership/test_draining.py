"""Draining a node: whom it asks to leave, whom it waits for, and what it refuses meanwhile."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from allfold_agent.membership.draining import NodeDrain
from allfold_core.errors import NodeDraining
from allfold_core.group_options import GroupOptions
from tests.node_agent.membership.linked_node import NotedByListener, linked_node
from tests.node_agent.membership.scripted_orchestrator import ScriptedOrchestrator
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


def group(name: str, nodes: str, max_world: int | None) -> Any:
    """A group with one rank on each of these nodes, by their letters, as node a sees it."""
    seats = [SimpleNamespace(node=node) for node in nodes]
    current = SimpleNamespace(record=SimpleNamespace(seats=seats))
    plan = SimpleNamespace(options=GroupOptions(1.0, max_world=max_world))
    return SimpleNamespace(name=name, node="a", plan=plan, current=current)


def leave(of: Any) -> None:
    """Let the last rank of a group leave."""
    of.current.record.seats.pop()


async def test_a_node_asks_its_ranks_once_and_then_refuses_others() -> None:
    asked: list[str] = []
    draining = NodeDrain("a", list, asked.append)
    draining.check()
    assert draining.problem is None
    draining.begin("an operator drains it")
    draining.begin("its agent was told to end")
    assert asked == ["node a drains, as an operator drains it"]
    with pytest.raises(NodeDraining, match="no rank can join here: node a drains, as an operator"):
        draining.check()


async def test_a_node_that_drains_refuses_those_who_wait_for_a_seat() -> None:
    draining, asked = NodeDrain("a", list, lambda _: None), asyncio.Event()

    async def wait() -> None:
        async with draining.refusing():
            asked.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await within(10.0, asked.wait())
    draining.begin("an operator drains it")
    with pytest.raises(NodeDraining, match="no rank can join here: node a drains"):
        await within(10.0, waiting)
    with pytest.raises(NodeDraining):
        await within(10.0, wait())


async def test_a_node_that_drains_refuses_nobody_who_has_a_seat() -> None:
    draining = NodeDrain("a", list, lambda _: None)
    async with draining.refusing():
        pass
    draining.begin("an operator drains it")
    with pytest.raises(TimeoutError):  # of another clock
        async with asyncio.timeout(0.0):
            await asyncio.Event().wait()


async def test_a_timeout_of_who_waits_for_a_seat_is_no_refusal() -> None:
    draining = NodeDrain("a", list, lambda _: None)
    with pytest.raises(TimeoutError):
        async with draining.refusing():
            raise TimeoutError


async def test_a_node_waits_until_the_last_rank_has_left_that_can() -> None:
    elastic, fixed = group("grows", "aba", 4), group("fixed", "ab", None)
    draining = NodeDrain("a", lambda: [elastic, fixed], lambda _: None)
    waiting = asyncio.create_task(draining.wait(60.0))
    for _ in range(2):
        leave(elastic)  # a rank of node a, and the one of node b
        draining.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    leave(elastic)
    draining.look()
    assert await within(10.0, waiting)


async def test_a_node_does_not_wait_for_ranks_of_groups_that_are_not_elastic() -> None:
    fixed = group("fixed", "ab", None)
    assert await within(10.0, NodeDrain("a", lambda: [fixed], lambda _: None).wait(60.0))


async def test_a_node_waits_for_them_too_where_it_is_to_wait_for_all() -> None:
    fixed = group("fixed", "a", None)
    draining = NodeDrain("a", lambda: [fixed], lambda _: None)
    ending = asyncio.create_task(draining.end(60.0, "all"))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not ending.done()
    leave(fixed)
    draining.look()
    await within(10.0, ending)


async def test_a_node_whose_ranks_do_not_leave_in_time_says_how_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draining = NodeDrain("a", lambda: [group("grows", "aab", 4)], lambda _: None)
    assert not await draining.wait(0.01)
    assert "after 0.01 s, 2 ranks have not left yet" in caplog.text


async def test_ranks_that_cannot_leave_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = [group("grows", "aa", 4), group("fixed", "aba", None), group("elsewhere", "b", None)]
    NodeDrain("a", lambda: groups, lambda _: None).begin("its agent was told to end")
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each for each in warnings if "cannot leave" in each] == [
        "ranks 0, 2 of group 'fixed' cannot leave before its end, as the group is not elastic"
    ]


async def test_a_node_that_is_told_to_drain_does_so_and_says_so_with_each_beat(
    one: ScriptedOrchestrator,
) -> None:
    listener = NotedByListener()
    async with linked_node(one.url, listener=listener):
        link = await one.is_linked()
        assert (await link.hears("beat"))["draining"] is False
        await link.say("drain")
        await until(lambda: listener.of("drain"), "it was told")
        await link.hears_beats(2)
        assert link.received("beat")[-1]["draining"] is True
    assert listener.of("drain") == [["an operator drains it"]]
