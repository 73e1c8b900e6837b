"""Ranks of a node get seats in groups, or the reason why not; seats are given back for sure."""

from __future__ import annotations

import asyncio
import logging
import re
from threading import Event
from time import monotonic
from typing import Any

import pytest

from allfold_agent.edges.link_probe import MeasuredLink
from allfold_agent.membership.draining import NodeDrain
from allfold_control.messages import Ask, dump
from allfold_core.errors import (
    AllfoldError,
    GroupFull,
    MultipleRegister,
    NodeDraining,
    OrchestratorUnreachable,
    PeerMissing,
    ServiceError,
)
from allfold_core.group_options import digest_of_key
from allfold_core.plan import Plan
from tests.node_agent.membership.linked_node import LINKS, LinkedNode, linked_node
from tests.node_agent.membership.scripted_orchestrator import ScriptedOrchestrator
from tests.orchestrator.builders import ready
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


async def join(node: LinkedNode, request: dict[str, Any], seconds: float) -> Plan:
    """Seat a rank within so many seconds; return the plan of its group."""
    body = {**request, "init_timeout": seconds}
    return (await node.seats.join(body, monotonic() + seconds)).plan


async def has_problem(node: LinkedNode, words: str) -> None:
    """Wait until a node knows why it is not registered; who joins soon hears that then."""
    await until(lambda: words in str(node.registration.problem), f"the problem is {words!r}")


JOIN = {
    "group": "train",
    "rank": 0,
    "session": "s0",
    "world_size": 1,
    "timeout": 30.0,
    "strategies": {},
}
EPOCH = ready(1).current
assert EPOCH is not None
PLAN = EPOCH.plan
COMPLETE = {"ready": True, "plan": PLAN.to_dict()}
SECONDS = 10.0
STORE_DOWN = ServiceError("it cannot reach its state store", component="store")
TAKEN = MultipleRegister("node a is registered already, by another agent")


async def test_ranks_wait_until_the_links_are_measured(one: ScriptedOrchestrator) -> None:
    one.peers = ["near:1"]
    one.lease_seconds = 60
    over = Event()

    def probe(address: str) -> MeasuredLink:
        over.wait(30)
        return LINKS[address]

    try:
        async with linked_node(one.url, probe=probe) as node:
            await has_problem(node, "measuring the links")
            with pytest.raises(ServiceError, match="measuring the links") as caught:
                await join(node, {**JOIN}, 0.3)
            assert type(caught.value) is ServiceError
            assert node.registration.problem is not None
            over.set()
            await one.is_linked()
            assert node.registration.problem is None
    finally:
        over.set()
    assert one.seats == []
    assert one.measured == [None, {"latency": 1e-4, "bandwidth": 1e8}]


@pytest.mark.parametrize("refusal", [STORE_DOWN, TAKEN], ids=["no store", "name taken"])
async def test_a_rank_hears_why_its_node_is_not_registered_with_the_advice_for_that(
    one: ScriptedOrchestrator, refusal: AllfoldError
) -> None:
    one.refusal = refusal
    async with linked_node(one.url) as node:
        await has_problem(node, refusal.message)
        with pytest.raises(type(refusal)) as caught:
            await join(node, {**JOIN}, 0.3)
    error = caught.value
    assert type(error) is type(refusal), "not OrchestratorUnreachable: it has answered"
    assert error.message == f"node a could not register in time: {refusal.message}"
    assert error.details == refusal.details


@pytest.mark.parametrize("said", [{}, {"on_loss": "shrink", "min_world": 1}])
async def test_what_a_rank_says_reaches_the_orchestrator(
    one: ScriptedOrchestrator, said: dict[str, Any]
) -> None:
    one.formation = COMPLETE
    async with linked_node(one.url) as node:
        assert await join(node, {**JOIN, **said}, 30) == PLAN
        life = {"node": "a", "incarnation": node.registration.incarnation}
    (body,) = one.seats
    assert 25 < body.pop("wait") <= 30
    assert body == {**JOIN, **said, **life, "join_timeout": 30, "key": ""}


async def test_the_key_of_a_group_leaves_the_node_as_a_digest(one: ScriptedOrchestrator) -> None:
    one.formation = COMPLETE
    async with linked_node(one.url) as node:
        await join(node, {**JOIN, "key": "sesame"}, 30)
    (body,) = one.seats
    assert body["key"] == digest_of_key("train", "sesame")
    assert "sesame" not in str(body)


async def test_ranks_that_are_still_missing_at_the_deadline_are_named(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        await one.is_linked()
        with pytest.raises(PeerMissing) as caught:
            await join(node, {**JOIN, "world_size": 2}, 0.3)
    assert caught.value.details["missing_ranks"] == [1]
    assert one.given_back == [("train", 0, "withdrawn")]


async def test_a_rank_that_came_after_the_end_of_its_group_is_told_so(
    one: ScriptedOrchestrator,
) -> None:
    said = []
    async with linked_node(one.url) as node:
        await one.is_linked()
        for was_open in (False, True):
            one.formation = {"ready": False, "missing": [1], "was_open": was_open}
            with pytest.raises(PeerMissing) as caught:
                await join(node, {**JOIN, "world_size": 2}, 0.3)
            said.append("was open before, and has ended" in caught.value.message)
    assert said == [False, True]


async def test_a_join_without_an_answer_says_that_the_orchestrator_does_not_answer(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.membership.seats._ANSWER_SECONDS", 0.05)
    one.formation = None
    async with linked_node(one.url) as node:
        await one.is_linked()
        with pytest.raises(OrchestratorUnreachable, match="no answer of the orchestrator"):
            await join(node, {**JOIN}, 0.3)


async def test_an_orchestrator_that_does_not_answer_is_said_to_be_unreachable(
    one: ScriptedOrchestrator,
) -> None:
    one.is_down = True
    async with linked_node(one.url) as node:
        await has_problem(node, "answered 502")
        with pytest.raises(OrchestratorUnreachable, match="could not register in time") as caught:
            await join(node, {**JOIN}, 0.3)
    assert "Check that it runs" in str(caught.value)


async def test_a_join_whose_link_has_ended_is_repeated_on_the_next_one(
    two: list[ScriptedOrchestrator],
) -> None:
    first, second = two
    first.formation = None
    second.formation = COMPLETE
    async with linked_node(first.url, second.url) as node:
        joining = asyncio.create_task(join(node, {**JOIN}, SECONDS))
        await until(lambda: first.seats, "it has asked the first replica")
        first.is_down = True
        await first.link.socket.close()
        assert await within(SECONDS, joining) == PLAN
    (asked,), (again,) = first.seats, second.seats
    assert again.pop("wait") < asked.pop("wait")
    assert again == asked


async def test_a_refusal_ends_a_join(one: ScriptedOrchestrator) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.formation = None
        joining = asyncio.create_task(join(node, {**JOIN}, SECONDS))
        asked = await link.hears("join")
        error = {"error": TAKEN.to_dict()}
        await link.say("answer", numbers=[asked["number"]], status=409, body=error)
        with pytest.raises(MultipleRegister, match="registered already"):
            await within(SECONDS, joining)
    assert len(one.seats) == 1


async def test_an_orchestrator_whose_store_is_down_is_asked_again(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.formation = None
        joining = asyncio.create_task(join(node, {**JOIN}, SECONDS))
        asked = await link.hears("join")
        one.formation = COMPLETE
        error = {"error": STORE_DOWN.to_dict()}
        await link.say("answer", numbers=[asked["number"]], status=503, body=error)
        assert await within(SECONDS, joining) == PLAN
    assert len(one.seats) == 2


async def test_a_rank_that_its_group_has_no_room_for_says_how_long_it_has_waited(
    one: ScriptedOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    full = GroupFull("group train has 1 rank, and max_world is 1", max_world=1)
    async with linked_node(one.url) as node:
        await one.is_linked()
        one.refused_joins = full
        with pytest.raises(GroupFull) as caught:
            await join(node, {**JOIN}, 0.5)
    assert caught.value.message == f"{full.message}; this rank has waited 0.5 s for that"
    assert caught.value.details == {"max_world": 1, "timeout": 0.5}
    assert "Start no more processes than max_world" in str(caught.value)
    assert len(one.seats) > 1
    (told,) = [each for each in caplog.messages if "waits up to" in each]
    assert told.startswith("a rank of group 'train' waits up to 0.")
    assert full.message in told


async def test_one_answer_is_for_several_ranks(one: ScriptedOrchestrator) -> None:
    one.formation = None
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        ranks = [
            asyncio.create_task(join(node, {**JOIN, "rank": rank}, SECONDS)) for rank in range(2)
        ]
        await link.hears("join", 2)
        numbers = [message["number"] for message in link.received("join")]
        await link.say("answer", numbers=[99, *numbers], status=200, body=COMPLETE)
        assert await within(SECONDS, asyncio.gather(*ranks)) == [PLAN, PLAN]


async def test_a_rank_that_ends_while_it_waits_gives_its_seat_back(
    one: ScriptedOrchestrator,
) -> None:
    one.formation = None
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        joining = asyncio.create_task(join(node, {**JOIN}, SECONDS))
        await link.hears("join")
        joining.cancel()
        await link.hears("leave")
        with pytest.raises(asyncio.CancelledError):
            await joining
    assert one.given_back == [("train", 0, "lost")]
    assert one.was_joining == [True], "the plan may be on its way"


async def test_a_rank_whose_node_drains_while_it_waits_gives_its_seat_back(
    one: ScriptedOrchestrator,
) -> None:
    one.formation = None
    draining = NodeDrain("a", list, lambda _: None)
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        body = {**JOIN, "init_timeout": 3600}
        deadline = monotonic() + 3600
        joining = asyncio.create_task(node.seats.join(body, deadline, draining.refusing()))
        await link.hears("join")
        draining.begin("an operator drains it")
        with pytest.raises(NodeDraining, match="node a drains, as an operator drains it"):
            await within(SECONDS, joining)
    assert one.given_back == [("train", 0, "withdrawn")]


async def test_an_agent_that_ends_waits_for_no_answer(one: ScriptedOrchestrator) -> None:
    one.formation = None
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        joining = asyncio.create_task(join(node, {**JOIN}, 3600))
        await link.hears("join")

        def pack(number: int) -> str:
            return dump(Ask(type="join", number=number, body={}))

        asked = asyncio.create_task(node.link.ask(pack, monotonic() + 3600))
        await link.hears("join", 2)
        node.keeping.cancel()
        with pytest.raises(ServiceError, match="this node agent ends"):
            await within(SECONDS, asked)
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(SECONDS, joining)
        assert one.given_back == [("train", 0, "lost")], "over REST, as there is no link"


async def test_a_seat_that_cannot_be_given_back_at_once_is_given_back_later(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "allfold_agent.membership.seats")
    monkeypatch.setattr("allfold_agent.membership.seats._RETRY_SECONDS", 0.01)
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.is_down = True
        await link.socket.close()
        await until(lambda: not node.link.is_open, "it has no link")
        await node.seats.give_up_seat("train", 3, "s3", "lost", ended=7)
        tries = len(one.requests)
        await until(lambda: len(one.requests) > tries + 2, "it tries again")
        assert one.given_back == []
        one.is_down = False
        await until(lambda: one.given_back, "the seat is given back")
        await until(lambda: not node.seats._owed, "it knows that")
        assert set(one.given_back) == {("train", 3, "lost")}
        assert set(one.ended) == {7}
        assert set(one.was_joining) == {False}
    began, ended = (each for each in caplog.messages if "rank 3" in each)  # not at each try
    assert began.startswith("rank 3 of group 'train' stays registered for now: ")
    assert re.fullmatch(r"rank 3 of group 'train' is registered no more, after \d+\.\d s", ended)


async def test_seats_that_are_given_back_together_are_given_back_once_each(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.is_silent = True
        leaving = [
            asyncio.create_task(node.seats.give_up_seat("train", rank, f"s{rank}", "finished"))
            for rank in range(3)
        ]
        await link.hears("leave", 3)
        numbers = [message["number"] for message in link.received("leave")]
        await link.say("answer", numbers=numbers, status=200, body={})
        await within(SECONDS, asyncio.gather(*leaving))
    assert sorted(message["body"]["rank"] for message in link.received("leave")) == [0, 1, 2]


async def test_a_join_waits_for_owed_seats_of_its_own_group_alone(
    one: ScriptedOrchestrator,
) -> None:
    one.formation = COMPLETE
    async with linked_node(one.url) as node:
        link = await one.is_linked()
        one.is_silent = True  # no seat is given back until the end
        leaving = [
            asyncio.create_task(node.seats.give_up_seat(group, 3, "s3", "finished"))
            for group in ("train", "old")
        ]
        await link.hears("leave", 2)
        one.is_silent = False
        (other,) = (m for m in link.received("leave") if m["body"]["group"] == "old")
        joining = asyncio.create_task(join(node, {**JOIN, "group": "new"}, SECONDS))
        assert await within(SECONDS, joining) == PLAN
        joining = asyncio.create_task(join(node, {**JOIN}, SECONDS))
        await link.say("answer", numbers=[other["number"]], status=200, body={})
        await within(SECONDS, leaving[1])
        assert [body["group"] for body in one.seats] == ["new"]
        (own,) = (m for m in link.received("leave") if m["body"]["group"] == "train")
        await link.say("answer", numbers=[own["number"]], status=200, body={})
        assert await within(SECONDS, joining) == PLAN
        await within(SECONDS, leaving[0])


async def test_an_opening_that_all_have_left_is_named_with_the_seat(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        await one.is_linked()
        await node.seats.give_up_seat("train", 0, "s0", "withdrawn", ended=7)
        await node.seats.give_up_seat("train", 1, "s1", "withdrawn")
    assert one.ended == [7, 0]


async def test_a_seat_that_the_orchestrator_does_not_know_is_given_back(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        await one.is_linked()
        one.forgets_seats = 1
        await node.seats.give_up_seat("train", 3, "s3", "lost")
        assert not node.seats._owed


async def test_a_rank_of_a_node_that_was_forgotten_gets_its_seat_all_the_same(
    one: ScriptedOrchestrator,
) -> None:
    one.forgets_seats = 2
    one.formation = COMPLETE
    async with linked_node(one.url) as node:
        assert await join(node, {**JOIN}, SECONDS) == PLAN
    assert one.forgets_seats == 0
