"""Ranks of a node get seats in groups, or the reason why not; seats are given back for sure."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from allfold_agent.membership.link_probe import Link
from allfold_core.errors import (
    AllfoldError,
    MultipleRegister,
    OrchestratorUnreachable,
    ServiceError,
)
from tests.node_agent.membership.linked_node import LINKS, linked_node
from tests.node_agent.membership.scripted_orchestrator import ScriptedOrchestrator
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

JOIN = {
    "group": "train",
    "rank": 0,
    "session": "s0",
    "world_size": 1,
    "timeout": 30.0,
    "strategies": {},
}
STORE_DOWN = ServiceError("it cannot reach its state store", component="store")
TAKEN = MultipleRegister("node a is registered already, by another agent")


async def test_ranks_wait_until_the_links_are_measured(one: ScriptedOrchestrator) -> None:
    one.peers = ["near:1"]
    one.lease_seconds = 60
    over = Event()

    def probe(address: str) -> Link:
        over.wait(30)
        return LINKS[address]

    try:
        async with linked_node(one.url, probe=probe) as node:
            with pytest.raises(ServiceError, match="measuring the links") as caught:
                await node.seats.join({**JOIN, "init_timeout": 0.3})
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
        with pytest.raises(type(refusal)) as caught:
            await node.seats.join({**JOIN, "init_timeout": 0.3})
    error = caught.value
    assert type(error) is type(refusal), "not OrchestratorUnreachable: it has answered"
    assert error.message == f"node a could not register in time: {refusal.message}"
    assert error.details == refusal.details


@pytest.mark.parametrize("said", [{}, {"on_loss": "shrink", "min_world": 1}])
async def test_what_a_rank_says_about_losses_reaches_the_orchestrator(
    one: ScriptedOrchestrator, said: dict[str, Any]
) -> None:
    async with linked_node(one.url) as node:
        with pytest.raises(OrchestratorUnreachable):  # it has seats, but no plans
            await node.seats.join({**JOIN, **said, "init_timeout": 0.5})
    (body, *_) = one.seats
    assert {key: body[key] for key in ("on_loss", "min_world") if key in body} == said


async def test_an_orchestrator_that_does_not_answer_is_said_to_be_unreachable(
    one: ScriptedOrchestrator,
) -> None:
    one.is_down = True
    async with linked_node(one.url) as node:
        with pytest.raises(OrchestratorUnreachable, match="could not register in time") as caught:
            await node.seats.join({**JOIN, "init_timeout": 0.3})
    assert "Check that it runs" in str(caught.value)


async def test_a_seat_that_cannot_be_given_back_at_once_is_given_back_later(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.membership.seats._RETRY_SECONDS", 0.01)
    async with linked_node(one.url) as node:
        await one.is_linked()
        one.is_down = True
        await node.seats.give_up_seat("train", 3, "s3", "lost")
        tries = len(one.requests)
        await until(lambda: len(one.requests) > tries + 2, "it tries again")
        assert one.given_back == []
        one.is_down = False
        await until(lambda: one.given_back, "the seat is given back")
        await until(lambda: not node.seats._owed, "it knows that")
        assert one.given_back == [("/v1/groups/train/ranks/3", "lost")]


async def test_a_seat_that_the_orchestrator_does_not_know_is_given_back(
    one: ScriptedOrchestrator,
) -> None:
    async with linked_node(one.url) as node:
        await one.is_linked()
        one.forgets_seats = 1
        await node.seats.give_up_seat("train", 3, "s3", "lost")
        assert not node.seats._owed


async def test_a_rank_of_a_node_that_was_forgotten_gets_its_seat_all_the_same(
    one: ScriptedOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.membership.seats._RETRY_SECONDS", 0.01)
    async with linked_node(one.url) as node:
        await one.is_linked()
        one.forgets_seats = 2
        with pytest.raises(OrchestratorUnreachable):  # it has seats, but no plans
            await node.seats.join({**JOIN, "init_timeout": 0.5})
    assert len(one.seats) == 1


async def test_seats_are_asked_for_at_another_replica_where_the_first_is_gone(
    two: list[ScriptedOrchestrator],
) -> None:
    first, second = two
    async with linked_node(first.url, second.url) as node:
        await first.is_linked()
        first.is_down = True
        with pytest.raises(OrchestratorUnreachable):
            await node.seats.join({**JOIN, "init_timeout": 0.5})
    assert (len(first.seats), len(second.seats)) == (0, 1)
