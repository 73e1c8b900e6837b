"""The registrations of an agent with the lives of the orchestrator's store, on its control link."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_control.messages import Held
from tests.node_agent.membership.linked_node import FIELDS, RECORD, NotedByListener, linked_node
from tests.node_agent.membership.scripted_orchestrator import (
    ScriptedOrchestrator,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def _sent(groups: list[Held]) -> list[dict[str, Any]]:
    return [each.model_dump(mode="json") for each in groups]


async def test_a_term_of_another_generation_is_dropped(one: ScriptedOrchestrator) -> None:
    one.generation = 2
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        for generation in (1, 3, 2):
            await link.say("term", generation=generation, group="train", record=FIELDS)
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.of("term") == [[2, "train", RECORD]]


async def test_recalled_it_registers_again_on_the_same_link_and_takes_no_term_before_the_answer(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.keeps_registering_waiting = True
        await link.say("recall", generation=2)
        again = await link.hears("register", 2)
        assert again["generation"] == 1
        await link.say("term", generation=1, group="old", record=FIELDS)
        await link.say("term", generation=2, group="early", record=FIELDS)
        await link.say("registered", generation=2, is_evicted=False, out=["lost"])
        await link.say("term", generation=1, group="older", record=FIELDS)
        await link.say("term", generation=2, group="train", record=FIELDS)
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.calls == [
            ("registered", 1, []),
            ("registered", 2, ["lost"]),
            ("term", 2, "train", RECORD),
        ]
        assert one.links == [link]


async def test_a_group_that_opens_before_the_answer_is_told_of_after_it(
    one: ScriptedOrchestrator,
) -> None:
    held = [Held(group=name, record=RECORD) for name in ("train", "late")]
    listener = NotedByListener(groups=held[:1])
    async with linked_node(one.url, listener=listener) as node:
        link = await one.is_linked()
        await link.hears_beats()
        one.keeps_registering_waiting = True
        await link.say("recall", generation=2)
        assert (await link.hears("register", 2))["groups"] == _sent(held[:1])
        listener.unsaid = held[1:]
        node.link.opened()
        assert len(link.received("register")) == 2, "an answer is due"
        one.keeps_registering_waiting = False
        await link.say("registered", generation=2, is_evicted=False, out=[])
        assert (await link.hears("register", 3))["groups"] == _sent(held)
        await until(lambda: len(listener.of("registered")) == 3, "it is answered")
        assert len(link.received("register")) == 3, "once is enough"


async def test_a_group_that_the_store_may_lack_is_told_of_as_soon_as_it_opens(
    one: ScriptedOrchestrator,
) -> None:
    listener = NotedByListener()
    async with linked_node(one.url, listener=listener) as node:
        link = await one.is_linked()
        await link.hears_beats()
        listener.unsaid = [Held(group="late", record=RECORD)]
        node.link.opened()
        node.link.opened()
        assert (await link.hears("register", 2))["groups"] == _sent(listener.groups)
        await until(lambda: len(listener.of("registered")) == 2, "it is answered")
        assert len(link.received("register")) == 2


async def test_an_answer_counts_if_nothing_newer_was_said_since(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.keeps_registering_waiting = True
        for number in (2, 3):
            await link.say("recall", generation=number)
            await link.hears("register", number)
        for number in (2, 3):
            await link.say("registered", generation=number, is_evicted=False, out=[])
        await link.say("term", generation=3, group="train", record=FIELDS)
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.of("registered") == [[1, []], [3, []]]


async def test_on_a_new_link_it_names_the_generation_of_the_last_registration(
    one: ScriptedOrchestrator,
) -> None:
    one.generation = 5
    async with linked_node(one.url):
        await (await one.is_linked()).socket.close(1001)
        second = await one.is_linked(2)
        assert second.received("register")[0]["generation"] == 5
        assert len(one.registrations) == 1, "the node itself is registered still"
