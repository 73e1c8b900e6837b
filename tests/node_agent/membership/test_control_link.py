"""The control link of an agent, against orchestrators that follow a script."""

from __future__ import annotations

import asyncio
import re
from time import monotonic

import pytest

from allfold_agent.membership import orchestrator_client
from allfold_control.messages import Held
from allfold_core.errors import Evicted, ServiceError
from allfold_core.protocol.traffic import Cap
from tests.node_agent.membership.linked_node import FIELDS, RECORD, NotedByListener, linked_node
from tests.node_agent.membership.scripted_orchestrator import (
    SILENT,
    ScriptedOrchestrator,
    scripted_orchestrators,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


# What an agent says


async def test_a_node_registers_says_what_it_holds_and_beats(one: ScriptedOrchestrator) -> None:
    held = Held(group="train", record=RECORD)
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
            "groups": [held.model_dump(mode="json")],
        }
        assert second == {
            "schema": 1,
            "type": "beat",
            "number": 1,
            "lag": 0.25,
            "heard": {"b": 0.125},
            "progress": [each.model_dump() for each in listener.progress()],
            "draining": False,
        }
        assert (await link.hears("beat", 3))["number"] == 3


async def test_a_probe_is_answered_with_its_nonce(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url):
        link = await one.is_linked()
        await link.say("probe", nonce="moon")
        alive = await link.hears("alive")
        assert (alive["nonce"], alive["lag"]) == ("moon", 0.25)


async def test_an_suspicion_goes_up_from_any_thread(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await asyncio.to_thread(node.link.suspect, "b", "1", "silent", 0.5, 0.01)
        suspected = await link.hears("suspect")
        assert suspected == {
            "schema": 1,
            "type": "suspect",
            "node": "b",
            "incarnation": "1",
            "kind": "silent",
            "since": 0.5,
            "lag": 0.01,
        }


async def test_a_suspicion_is_withdrawn_from_any_thread(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await asyncio.to_thread(node.link.withdraw, "b", "1", "stuck")
        withdrawn = await link.hears("withdraw")
        assert (withdrawn["node"], withdrawn["incarnation"]) == ("b", "1")
        assert withdrawn["kind"] == "stuck"


async def test_an_suspicion_without_a_link_is_lost_and_the_next_registration_says_so() -> None:
    async with scripted_orchestrators() as (one,):
        one.is_down = True
        async with linked_node(one.url) as node:
            await until(lambda: one.requests, "it tries")
            node.link.suspect("b", "1", "refused", 0.0, 0.0)
            one.is_down = False
            link = await one.is_linked()
            await link.hears_beats()
            assert link.received("suspect") == []
            assert node.listener.of("registered") == [[1, []]]


async def test_news_reach_the_listener(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await link.say("cleared", node="b", incarnation="1", patience=0.8)
        await link.say("term", generation=1, group="train", record=FIELDS)
        await until(lambda: node.listener.of("term"), "it hears of the term")
        assert node.listener.calls == [
            ("registered", 1, []),
            ("cleared", "b", "1", 0.8),
            ("term", 1, "train", RECORD),
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
        await link.say("term", generation=1, group="train", record=FIELDS)
        await one.is_linked(2)
        assert node.registration.problem is None
    (told,) = [each for each in caplog.records if "moon" in each.getMessage()]
    assert told.exc_info, "the traceback is there for who has to mend it"


async def test_after_a_link_that_was_well_the_next_try_comes_soon(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator_client, "_FIRST_PAUSE", 0.01)
    async with linked_node(one.url) as node:
        first = await one.is_linked()
        one.link_code = 1012
        await first.socket.close(1001)
        await until(lambda: one.refused_links > 3, "it tries several times")
        assert node.link._pauses._next > 4 * orchestrator_client._FIRST_PAUSE
        one.link_code = 0
        await one.is_linked(2)
        await until(
            lambda: node.link._pauses._next == orchestrator_client._FIRST_PAUSE,
            "the next pause is short",
        )


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
    assert told[1:-1] == [
        "new ranks cannot join for now, trying again: the store is away",
        "new ranks cannot join for now, trying again: the store cannot be reached",
    ]
    end = rf"the orchestrator at {re.escape(one.url)} answers again, after \d+\.\d s"
    assert re.fullmatch(end, told[-1])


async def test_goodbye_is_said_before_the_link_ends(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        await node.end()
        assert one.requests[-1] == ("DELETE", "/v1/nodes/a")
        await until(lambda: link.is_over, "the link ends")
        assert len(one.links) == 1


async def test_caps_come_with_the_answer_to_a_beat_and_stay_until_others_come(
    one: ScriptedOrchestrator,
) -> None:
    listener = NotedByListener()
    async with linked_node(one.url, listener=listener):
        link = await one.is_linked()
        await link.hears_beats(2)
        assert not listener.of("limit")
        caps = [Cap(rate=10**6), Cap(group="g", rate=10**5)]
        await link.say("beat", number=1, limits=[each.to_dict() for each in caps])
        await until(lambda: listener.of("limit"), "it was told")
        await link.say("beat", number=2, limits=[])
        await until(lambda: len(listener.of("limit")) == 2, "it was told again")
    assert listener.of("limit") == [[caps], [[]]]
