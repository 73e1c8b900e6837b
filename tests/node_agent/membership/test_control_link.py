"""The control link of an agent, against orchestrators that follow a script."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from allfold_agent.membership.control_link import _FIRST_PAUSE
from allfold_core.errors import Evicted, ServiceError
from tests.node_agent.membership.linked_node import NotedByListener, linked_node
from tests.node_agent.membership.scripted_orchestrator import (
    SILENT,
    ScriptedOrchestrator,
    scripted_orchestrators,
)
from tests.support.processes.ports import free_address
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


# What an agent says


async def test_a_node_registers_says_what_it_holds_and_beats(one: ScriptedOrchestrator) -> None:
    held = {"group": "train", "record": {"epoch": 1}, "is_out": False}
    listener = NotedByListener(groups=[held], ages={"b": 0.125})
    async with linked_node(one.url, listener=listener) as node:
        link = await one.is_linked()
        incarnation = node.registration.incarnation
        assert [each["incarnation"] for each in one.registrations] == [incarnation]
        first, second = link.messages[:2]
        assert first == {
            "schema": 1,
            "type": "register",
            "generation": 0,
            "incarnation": incarnation,
            "groups": [held],
        }
        assert second == {
            "schema": 1,
            "type": "beat",
            "number": 1,
            "lag": 0.25,
            "heard": {"b": 0.125},
            "progress": listener.progress(),
        }
        assert (await link.hears("beat", 3))["number"] == 3


async def test_a_probe_is_answered_with_its_nonce(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url):
        link = await one.is_linked()
        await link.say("probe", nonce="moon")
        alive = await link.hears("alive")
        assert (alive["nonce"], alive["lag"]) == ("moon", 0.25)


async def test_an_accusation_goes_up_from_any_thread(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await asyncio.to_thread(node.link.accuse, "b", "1", "silent", 0.5, 0.01)
        accused = await link.hears("accuse")
        assert accused == {
            "schema": 1,
            "type": "accuse",
            "node": "b",
            "incarnation": "1",
            "charge": "silent",
            "since": 0.5,
            "lag": 0.01,
        }


async def test_a_charge_is_withdrawn_from_any_thread(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await asyncio.to_thread(node.link.withdraw, "b", "1", "stuck")
        withdrawn = await link.hears("withdraw")
        assert (withdrawn["node"], withdrawn["incarnation"]) == ("b", "1")
        assert withdrawn["charge"] == "stuck"


async def test_an_accusation_without_a_link_is_lost_and_the_next_registration_says_so() -> None:
    async with scripted_orchestrators() as (one,):
        one.is_down = True
        async with linked_node(one.url) as node:
            await until(lambda: one.requests, "it tries")
            node.link.accuse("b", "1", "refused", 0.0, 0.0)
            one.is_down = False
            link = await one.is_linked()
            await link.hears_beats()
            assert link.received("accuse") == []
            assert node.listener.of("registered") == [[1, []]]


async def test_news_reach_the_listener(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await link.say("cleared", node="b", incarnation="1", patience=0.8)
        await link.say("term", generation=1, group="train", record={"epoch": 4})
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.calls == [
            ("registered", 1, []),
            ("cleared", "b", "1", 0.8),
            ("term", 1, "train", {"epoch": 4}),
        ]


async def test_asked_about_another_node_it_beats_once_more_than_else(
    one: ScriptedOrchestrator,
) -> None:
    one.beat_seconds = 3600.0
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        node.listener.ages["b"] = 0.03
        await link.say("ping_for", node="b", incarnation="1")
        beat = await link.hears("beat", 2)
        assert beat["heard"] == {"b": 0.03}


async def test_the_token_is_sent(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url, token="secret"):
        link = await one.is_linked()
        assert link.socket.headers["authorization"] == "Bearer secret"


async def test_a_proxy_of_the_environment_is_not_used(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with linked_node(one.url):
        await one.is_linked()


# Generations of the store


async def test_a_term_of_another_generation_is_dropped(one: ScriptedOrchestrator) -> None:
    one.generation = 2
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        for generation in (1, 3, 2):
            await link.say("term", generation=generation, group="train", record={})
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.of("term") == [[2, "train", {}]]


async def test_recalled_it_registers_again_on_the_same_link_and_takes_no_term_before_the_answer(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.keeps_registering_waiting = True
        await link.say("recall", generation=2)
        again = await link.hears("register", 2)
        assert again["generation"] == 1
        await link.say("term", generation=1, group="old", record={})
        await link.say("term", generation=2, group="early", record={})
        await link.say("registered", generation=2, is_evicted=False, out=["lost"])
        await link.say("term", generation=1, group="older", record={})
        await link.say("term", generation=2, group="train", record={})
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.calls == [
            ("registered", 1, []),
            ("registered", 2, ["lost"]),
            ("term", 2, "train", {}),
        ]
        assert one.links == [link]


async def test_a_group_that_opens_before_the_answer_is_told_of_after_it(
    one: ScriptedOrchestrator,
) -> None:
    held: list[dict[str, Any]] = [
        {"group": name, "record": {"epoch": 1}, "is_out": False} for name in ("train", "late")
    ]
    listener = NotedByListener(groups=held[:1])
    async with linked_node(one.url, listener=listener) as node:
        link = await one.is_linked()
        await link.hears_beats()
        one.keeps_registering_waiting = True
        await link.say("recall", generation=2)
        assert (await link.hears("register", 2))["groups"] == held[:1]
        listener.unsaid = held[1:]
        node.link.opened()
        assert len(link.received("register")) == 2, "an answer is due"
        one.keeps_registering_waiting = False
        await link.say("registered", generation=2, is_evicted=False, out=[])
        assert (await link.hears("register", 3))["groups"] == held
        await until(lambda: len(listener.of("registered")) == 3, "it is answered")
        assert len(link.received("register")) == 3, "once is enough"


async def test_a_group_that_the_store_may_lack_is_told_of_as_soon_as_it_opens(
    one: ScriptedOrchestrator,
) -> None:
    listener = NotedByListener()
    async with linked_node(one.url, listener=listener) as node:
        link = await one.is_linked()
        await link.hears_beats()
        listener.unsaid = [{"group": "late", "record": {"epoch": 1}, "is_out": False}]
        node.link.opened()
        node.link.opened()
        assert (await link.hears("register", 2))["groups"] == listener.groups
        await until(lambda: len(listener.of("registered")) == 2, "it is answered")
        assert len(link.received("register")) == 2


async def test_on_a_new_link_it_names_the_generation_of_the_last_registration(
    one: ScriptedOrchestrator,
) -> None:
    one.generation = 5
    async with linked_node(one.url):
        await (await one.is_linked()).socket.close(1001)
        second = await one.is_linked(2)
        assert second.received("register")[0]["generation"] == 5
        assert len(one.registrations) == 1, "the node itself is registered still"


# Ends of links


@pytest.mark.parametrize("code", [1000, 1001, 1008, 1011, 1012])
async def test_a_link_that_is_closed_is_opened_again_by_the_same_registration(
    one: ScriptedOrchestrator, code: int
) -> None:
    """A life that was evicted meanwhile must not be registered again."""
    async with linked_node(one.url) as node:
        await (await one.is_linked()).socket.close(code)
        await one.is_linked(2)
        assert node.registration.problem is None
    assert len(one.registrations) == 1


async def test_a_node_that_is_unknown_registers_and_links_again(one: ScriptedOrchestrator) -> None:
    one.unknown = 2
    async with linked_node(one.url) as node:
        await until(lambda: len(one.links) == 3, "it links again")
        await one.link.hears_beats()
        assert {each["incarnation"] for each in one.registrations} == {
            node.registration.incarnation
        }
        assert len(one.registrations) == 3
        assert node.listener.of("evicted") == []


async def test_an_evicted_node_begins_another_life_on_its_own(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_node(one.url) as node:
        first = await one.is_linked()
        old = node.registration.incarnation
        one.evicted.add(old)
        await first.socket.close(1001)
        third = await one.is_linked(3)
        new = node.registration.incarnation
        assert new != old
        assert [each["incarnation"] for each in one.registrations] == [old, new]
        assert third.received("register")[0]["incarnation"] == new
        assert node.listener.of("evicted") == [[new, SILENT]], (
            "told once, with the new name in place"
        )
    (warning,) = [each for each in caplog.messages if "evicted" in each]
    assert "registers again as a new incarnation" in warning
    assert f"was evicted, as it {SILENT}" in warning


async def test_a_node_that_may_not_register_as_the_same_life_begins_another_one(
    one: ScriptedOrchestrator,
) -> None:
    """It was evicted between the loss of its link and the registration."""
    one.refusal = Evicted("this life is over", how=SILENT)
    async with linked_node(one.url) as node:
        old = node.registration.incarnation
        await until(lambda: node.listener.of("evicted"), "it hears that it was evicted")
        one.refusal = None
        await one.is_linked()
        told, new = node.listener.of("evicted"), node.registration.incarnation
        assert new not in (old, "")
        assert told[-1] == [new, SILENT]
        assert [each["incarnation"] for each in one.registrations] == [new]


async def test_ranks_do_not_join_as_a_life_that_is_over(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        first = await one.is_linked()
        one.is_down = True
        await first.say("registered", generation=1, is_evicted=True, out=[])
        await until(lambda: node.listener.of("evicted"), "it hears that it was evicted")
        with pytest.raises(ServiceError, match="could not register in time"):
            await node.registration.wait(monotonic() + 0.1)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": 9, "type": "beat"}', '{"schema": 1, "type": "moon"}']
)
async def test_what_is_no_message_ends_the_link_with_advice(
    one: ScriptedOrchestrator, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_node(one.url):
        await (await one.is_linked()).socket.send_text(text)
        await one.is_linked(2)
    assert any("should have the same version" in each for each in caplog.messages)


async def test_a_server_without_control_links_is_named_as_such(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        first = await one.is_linked()
        one.is_down = True
        await first.socket.close(1001)
        await until(lambda: "403" in str(node.registration.problem), "it says so")
        assert "is this an Allfold orchestrator?" in str(node.registration.problem)


async def test_a_replica_that_cannot_serve_is_quoted(one: ScriptedOrchestrator) -> None:
    one.link_code = 1012
    async with linked_node(one.url) as node:
        await until(lambda: "store" in str(node.registration.problem), "it says why")
        assert node.registration.problem == "the store cannot be reached"
        one.link_code = 0
        await one.is_linked()
        assert node.registration.problem is None


async def test_an_error_of_the_listener_ends_the_link_and_the_next_one_is_told_again(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(NotedByListener):
        def term(self, *said: object) -> None:
            raise KeyError("moon")

    async with linked_node(one.url, listener=Failing()) as node:
        link = await one.is_linked()
        await link.say("term", generation=1, group="train", record={})
        await one.is_linked(2)
        assert node.registration.problem is None
    (told,) = [each for each in caplog.records if "moon" in each.getMessage()]
    assert told.exc_info, "the traceback is there for who has to mend it"


async def test_after_a_link_that_was_well_the_next_try_comes_soon(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        first = await one.is_linked()
        one.link_code = 1012
        await first.socket.close(1001)
        await until(lambda: one.refused_links > 3, "it tries several times")
        assert node.link._pauses._next > 4 * _FIRST_PAUSE
        one.link_code = 0
        await one.is_linked(2)
        await until(lambda: node.link._pauses._next == _FIRST_PAUSE, "the next pause is short")


async def test_each_outage_is_logged(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked_node(one.url):
        for count in (1, 2):
            await (await one.is_linked(count)).socket.close(1012, "the store is away")
        await one.is_linked(3)
    told = [each for each in caplog.messages if "the store is away" in each]
    assert len(told) == 2


async def test_beginning_and_end_of_an_outage_are_logged_once(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with linked_node(one.url) as node:
        first = await one.is_linked()
        one.link_code = 1012
        await first.socket.close(1012, "the store is away")
        await until(lambda: "cannot be reached" in str(node.registration.problem), "it notices")
        tries = len(one.requests)
        one.link_code = 0
        await one.is_linked(2)
        assert len(one.requests) == tries
    told = [each.getMessage() for each in caplog.records if each.name.startswith("allfold")]
    assert told[1:] == [
        "new ranks cannot join for now, trying again: the store is away",
        "new ranks cannot join for now, trying again: the store cannot be reached",
        f"the orchestrator at {one.url} answers again",
    ]


async def test_goodbye_is_said_before_the_link_ends(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await node.end()
        assert one.requests[-1] == ("DELETE", "/v1/nodes/a")
        await until(lambda: link.is_over, "the link ends")
        assert len(one.links) == 1


# Several replicas


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
    monkeypatch.setattr("allfold_agent.membership.control_session.REGISTER_SECONDS", 0.05)
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
