"""Control links: what becomes of a node that dies, falls silent, or is suspected wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from allfold_control import messages
from allfold_control.records import record_fields
from allfold_core.plan import Plan
from allfold_core.survival.plans import first_record
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.links import link
from allfold_orchestrator.membership import failure_detector
from allfold_orchestrator.membership.suspects import Evict
from tests.orchestrator.conftest import MakeStore
from tests.orchestrator.fake_agent import FakeAgent, Replica, agents, replica
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def one(make_store: MakeStore) -> AsyncIterator[Replica]:
    async with replica(make_store()) as served:
        yield served


# Registering


async def test_an_agent_hears_of_the_first_term_of_its_groups(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        record = a.held["train"]
        assert record == b.held["train"]
        assert (record["epoch"], record["term"]["number"]) == (1, 1)
        assert record["seats"] == [["s0", "a"], ["s1", "b"]]
        assert record["voters"]["b"]["control_url"] == b.control_url


async def test_the_record_that_agents_make_of_a_plan_is_the_one_that_the_link_announces(
    one: Replica,
) -> None:
    async with AsyncExitStack() as stack:
        a, _ = await agents(stack, one, "ab")
        plan = Plan.from_dict((await a.plan("s0"))["plan"])
        assert record_fields(first_record(plan)) == a.held["train"]


async def test_an_agent_that_links_anew_is_told_again(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, _ = await agents(stack, one, "ab")
        a.messages.clear()
        await a.link()
        await a.hears("term", group="train")


async def test_an_agent_that_links_anew_is_told_who_has_left_since(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, _ = await agents(stack, one, "abc")
        gone = await one.http.delete("/v1/groups/train/ranks/2", params={"session": "s2"})
        gone.raise_for_status()
        await b.hears("beat", number=b.received("beat")[-1]["number"] + 2)
        assert len(b.received("term")) == 1, "nodes agree upon that by themselves"
        a.held.clear()
        await a.link()
        assert (await a.holds("a", "b", "c"))["seats"] == [["s0", "a"], ["s1", "b"]]


async def test_an_agent_that_registers_again_is_told_again(one: Replica) -> None:
    """It has dropped the terms that came before the answer."""
    async with AsyncExitStack() as stack:
        a, _ = await agents(stack, one, "ab")
        a.messages.clear()
        await a.say_what_it_holds()
        await a.hears("term", group="train")
        kinds = [message["type"] for message in a.messages if message["type"] != "beat"]
        assert kinds == ["registered", "term"]


async def test_agents_at_different_replicas_hear_of_the_same_terms(make_store: MakeStore) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b, c = await agents(stack, served, "abc")
        await b.die()
        for agent in (a, c):
            assert (await agent.holds("a", "c"))["term"]["number"] == 2


async def test_an_agent_that_has_missed_the_end_of_its_group_hears_of_it(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own ranks have left, and it waits for a vote of the node that died with the last one."""
    monkeypatch.setattr(link, "END_KNOWN_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        gone = await one.http.delete("/v1/groups/train/ranks/0", params={"session": "s0"})
        gone.raise_for_status()
        await b.die()
        await a.hears("recall")
        await a.hears("registered", out=["train"])
        await a.hears("beat", number=a.received("beat")[-1]["number"] + 4)
        assert len(a.received("recall")) == 1, "it is asked once, although it still holds it"


async def test_a_node_that_is_not_registered_is_not_linked(one: Replica) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.link()
        code, reason = await agent.closed()
        assert code == 4404
        assert "POST /v1/nodes comes first" in reason


async def test_a_life_that_is_over_is_told_so(one: Replica) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.register()
        await one.http.delete("/v1/nodes/a", params={"incarnation": "1"})
        await agent.link()
        told = await agent.hears("registered")
        assert (told["is_evicted"], told["how"]) == (True, "signed off")
        await agent.closed()


async def test_beats_are_answered_and_end_where_the_life_is_over(one: Replica) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.register()
        await agent.link()
        await agent.hears("beat", number=2)
        await one.http.delete("/v1/nodes/a", params={"incarnation": "1"})
        await agent.hears("registered", is_evicted=True, how="signed off")
        await agent.closed()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 9, "type": "beat"}',
        '{"schema": 1, "type": "moon"}',
        '{"type": "beat"}',
        b'{"schema": 1, "type": "beat", "number": 1}',
    ],
    ids=["no JSON", "no object", "another schema", "another type", "a field is missing", "bytes"],
)
async def test_what_is_no_message_ends_the_link(one: Replica, text: str | bytes) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.register()
        await agent.link()
        await agent.hears("registered")
        await agent._socket.send(text)
        code, reason = await agent.closed()
        assert code == 1008
        assert reason


async def test_a_link_needs_the_token(make_store: MakeStore) -> None:
    async with replica(make_store(), token="secret") as served, FakeAgent("a", served) as agent:
        served.http.headers["Authorization"] = "Bearer secret"
        await agent.register()
        for wrong in (None, "guess"):
            with pytest.raises(InvalidStatus, match="401"):
                await agent.link(wrong)
        await agent.link("secret")
        await agent.hears("registered")


# Losing a node


async def test_a_killed_node_is_left_out_by_the_next_term_at_once(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        await until(
            lambda: len(one.links._runner.detector._evidence._reached) == 3, "all were dialled"
        )
        await c.die()
        for agent in (a, b):
            term = (await agent.holds("a", "b"))["term"]
            assert term["number"] == 2
            assert term["lost"] == [["c", "refuses connections of the orchestrator and of others"]]
        assert (await one.group())["lost"] == [{"rank": 2, "node": "c", "reason": "node_lost"}]


async def test_a_group_of_one_node_is_over_as_soon_as_that_node_is_killed(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        (a,) = await agents(stack, one, "a")
        await until(lambda: one.links._runner.detector._evidence._reached, "it was dialled")
        await a.die()
        while (await one.group())["phase"] != "gone":
            await asyncio.sleep(0.01)


async def test_a_node_with_a_vote_whose_lease_is_over_is_looked_for(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        await one.links.doubt(("c", "1"))
        await c.hears("probe")
        await until(lambda: one.links._runner.is_idle, "it has answered")
        c.is_stopped = True
        a.heard = b.heard = {"c": 60.0}
        await one.links.doubt(("c", "1"))
        (lost,) = (await a.holds("a", "b"))["term"]["lost"]
        assert lost == ["c", "ended its control link, and is heard by no member of its groups"]


async def test_a_node_that_says_goodbye_is_left_out_at_once(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        await one.http.delete("/v1/nodes/c", params={"incarnation": "1"})
        for agent in (a, b):
            term = (await agent.holds("a", "b"))["term"]
            assert (term["number"], term["lost"]) == (2, [["c", "signed off"]])
        await c.hears("registered", is_evicted=True)


async def test_a_term_is_encoded_once_for_all_who_hear_of_it(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        linked = await agents(stack, one, "abcd")
        encoded: list[TermRecord] = []
        encode = messages.dump

        def counted(message: messages.Up | messages.Down) -> str:
            if isinstance(message, messages.TermAnnounced):
                encoded.append(message.record)
            return encode(message)

        monkeypatch.setattr(messages, "dump", counted)
        await one.http.delete("/v1/nodes/d", params={"incarnation": "1"})
        for agent in linked[:3]:
            await agent.holds("a", "b", "c")
        assert [record.term.number for record in encoded] == [2]


async def test_a_node_that_comes_with_a_new_life_is_left_out_at_once(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        c.incarnation = "2"
        await c.register()
        for agent in (a, b):
            term = (await agent.holds("a", "b"))["term"]
            assert (term["number"], term["lost"]) == (2, [["c", "was started anew"]])
        c.held.clear()
        await c.link()
        await c.hears("registered", is_evicted=False, out=[])


async def test_nodes_that_are_decided_on_together_are_left_out_by_one_term(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        a, _, c, d = await agents(stack, one, "abcd")
        decide = one.links._runner.detector.decide
        ready: list[bool] = []

        def when_both_are_suspected(*arguments: Any) -> list[Evict]:
            return decide(*arguments) if ready else []

        monkeypatch.setattr(one.links._runner.detector, "decide", when_both_are_suspected)
        for silent in (c, d):
            silent.is_stopped = True
            await a.suspect(silent)
        suspects = one.links._runner.detector._suspects
        await until(lambda: len(suspects) == 2, "both are suspected")
        await until(lambda: all(monotonic() > each.due for each in suspects.values()), "and due")
        ready.append(True)
        term = (await a.holds("a", "b"))["term"]
        assert (term["number"], [name for name, _ in term["lost"]]) == (2, ["c", "d"])


async def test_a_stopped_node_is_evicted_when_nobody_hears_it(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        c.is_stopped = True
        await a.suspect(c)
        await b.hears("ping_for", node="c")
        for agent in (a, b):
            (lost,) = (await agent.holds("a", "b"))["term"]["lost"]
            assert lost == ["c", "was silent to a, and gave no sign of life"]
        assert not a.received("cleared")
        c.is_stopped = False
        await c.closed()


async def test_a_node_that_answers_its_probe_is_cleared(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        a.heard = b.heard = {"c": 0.0}
        await a.suspect(c)
        assert (await a.hears("cleared", node="c", incarnation="1"))["patience"] == 0.8
        await until(lambda: one.links._runner.detector.is_idle, "the suspect is closed")
        assert (await one.group())["phase"] == "ready"
        assert c.received("probe")
        assert not b.received("cleared")


async def test_a_node_whose_control_port_answers_is_cleared_as_well(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, _, c = await agents(stack, one, "abc")
        c.is_mute = True
        a.heard = {"c": 0.0}
        await a.suspect(c)
        await a.hears("cleared", node="c")


async def test_a_stuck_node_that_does_its_part_again_is_cleared_by_its_reporter(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_detector, "CONFIRM_SECONDS", 3600)
    async with AsyncExitStack() as stack:
        a, b, _ = await agents(stack, one, "abc")
        runner = one.links._runner
        await a.suspect(b, "stuck", lag=0.2, since=10.0)
        await b.hears("probe")
        await b.hears("beat", number=len(b.received("beat")) + 2)
        assert not runner.detector.is_idle, "its answers do not save it"
        await a.send("withdraw", node="b", incarnation="1", kind="stuck")
        await until(lambda: runner.detector.is_idle, "it is cleared")
        assert (await one.group())["phase"] == "ready"


async def test_a_node_of_no_common_group_cannot_be_suspected(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        stranger = await stack.enter_async_context(FakeAgent("x", one))
        await stranger.register()
        await stranger.link()
        await stranger.hears("registered")
        b.is_stopped = True
        await stranger.suspect(b)
        await a.suspect(a)
        await stranger.hears("beat", number=len(stranger.received("beat")) + 2)
        assert one.links._runner.detector.is_idle


async def test_of_a_dead_link_one_end_goes_and_the_leader_stays(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        a.heard = {"b": 60.0, "c": 0.0}
        b.heard = {"a": 60.0, "c": 0.0}
        c.heard = {"a": 0.0, "b": 0.0}
        await a.suspect(b)
        await b.suspect(a)
        for agent in (a, c):
            (lost,) = (await agent.holds("a", "c"))["term"]["lost"]
            assert lost == ["b", "has no connection with a, although both ends live"]
        await b.hears("registered", is_evicted=True)
