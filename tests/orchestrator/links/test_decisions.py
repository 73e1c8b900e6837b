"""A replica looks for signs of life, and retries decisions that it cannot carry out."""

from __future__ import annotations

import time
from asyncio import Event
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from allfold_core.errors import ServiceError
from allfold_core.survival.term_record import Life
from allfold_orchestrator.links.detector_runner import DetectorRunner
from allfold_orchestrator.links.dial import Dialled
from allfold_orchestrator.links.known_terms import KnownTerms
from allfold_orchestrator.links.link import Connected
from allfold_orchestrator.membership import failure_detector
from allfold_orchestrator.membership.group_state import StoreLife
from allfold_orchestrator.membership.suspects import Evict
from tests.orchestrator.conftest import MakeStore
from tests.orchestrator.fake_agent import FakeAgent, Replica, agents, replica
from tests.orchestrator.links.test_known_terms import record
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def one(make_store: MakeStore) -> AsyncIterator[Replica]:
    async with replica(make_store()) as served:
        yield served


class Flaky:
    """A function of a store that does not answer as long as ``is_broken``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.is_broken = True
        self.calls = 0
        self._works = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    async def __call__(self, *arguments: str) -> None:
        self.calls += 1
        if self.is_broken:
            raise ServiceError("the store does not answer")
        await self._works(*arguments)


async def test_a_suspected_node_is_asked_on_its_link_although_others_cannot_be_told(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        b.control_is_silent = b.beats_rarely = True
        Flaky(monkeypatch, one.store.nodes, "ask_all_to_probe")
        await a.suspect(b)
        await b.hears("probe")
        await a.hears("cleared", node="b")


async def test_other_replicas_are_told_as_soon_as_they_can_be(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suspect is linked to another one, and is not evicted before it was asked there."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b = await agents(stack, served, "ab")
        b.control_is_silent = b.beats_rarely = True
        store = Flaky(monkeypatch, served[0].store.nodes, "ask_all_to_probe")
        suspects = served[0].links._runner.detector._suspects
        await a.suspect(b)
        await until(lambda: ("b", "1") in suspects, "it is suspected")
        over = suspects["b", "1"].until
        await until(lambda: store.calls > 3 and time.monotonic() > over, "the time is over")
        store.is_broken = False
        await a.hears("cleared", node="b")
        assert b.received("probe")
        assert (await served[0].group())["phase"] == "ready"


async def test_a_decision_that_may_not_be_carried_out_now_takes_no_suspicion_away(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        runner, may_evict = one.links._runner, one.links._runner._may_evict
        asked: list[Life] = []
        is_allowed = Event()

        async def not_now(life: Life, is_proven: bool) -> bool:
            asked.append(life)
            return life[0] == "c" and is_allowed.is_set() and await may_evict(life, is_proven)

        monkeypatch.setattr(runner, "_may_evict", not_now)
        c.is_stopped = True
        await c.suspect(b, "stuck")
        await b.hears("probe")
        await a.suspect(c)
        await until(lambda: asked.count(("c", "1")) > 1, "it is decided on, and again")
        assert ("c", "1") in runner.detector._suspects["b", "1"].suspicions, (
            "what it said still counts"
        )
        is_allowed.set()
        await a.holds("a", "b")
        assert not a.received("cleared"), "nobody had to suspect it again"
        await until(lambda: runner.is_idle, "with it goes what it said")


async def test_a_life_ends_also_in_a_group_that_members_bring_back_while_it_is_ended() -> None:
    """The store has lost the group; a member has just registered it again, and suspects."""
    terms, ended = KnownTerms(), list[set[str]]()
    store = Mock(nodes=AsyncMock(), groups=AsyncMock())
    store.nodes.groups_of.return_value, store.nodes.leases.return_value = [], {}
    store.groups.read_if_possible.return_value = None
    store.lives.read = AsyncMock(return_value=StoreLife(1, "run"))
    store.clock.now.return_value = 0.0

    async def clear_up(_: object, groups: set[str], __: object) -> None:
        ended.append(groups)
        if len(ended) == 1:
            terms.replace("train", record(a="1", b="1"))
            runner.suspect(("a", "1"), ("b", "1"), "refused", terms.lives, 0.0)

    refuses = AsyncMock(return_value=Dialled.REFUSED)
    parts = Mock(clear_up=clear_up), terms, Connected(), refuses, AsyncMock(), Event()
    runner = DetectorRunner(store, *parts)
    runner.execute([Evict({("b", "1"): "is gone"}, is_proven=True)])
    for _ in range(2):
        await runner.decide_if_due()
    assert ended == [set(), {"train"}]
    assert runner.is_idle
    runner.close()


async def test_nobody_suffers_for_the_time_in_which_the_replica_itself_was_frozen(
    one: Replica,
) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        b.is_stopped = True
        suspects = one.links._runner.detector._suspects
        await a.suspect(b)
        await until(lambda: ("b", "1") in suspects, "it is suspected")
        suspect = suspects["b", "1"]
        before = suspect.until
        time.sleep(0.4)
        await until(lambda: suspect.until > before + 0.2, "it is waited for longer")


async def test_a_node_that_registers_again_while_it_beats_is_not_taken_for_evicted(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its BEAT came to a store that had lost all, and then the node was registered again."""
    heartbeat = one.store.nodes.heartbeat
    missed: list[str] = []

    async def missing_once(node: str, *beat: Any, **said: Any) -> bool:
        if not missed:
            missed.append(node)
            return False
        return await heartbeat(node, *beat, **said)

    async with FakeAgent("a", one) as a:
        await a.register()
        monkeypatch.setattr(one.store.nodes, "heartbeat", missing_once)
        await a.link()
        await a.hears("beat", number=2)
        assert missed


async def test_what_an_reporter_cannot_take_back_any_more_does_not_count(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next link may lead to another replica, and there it says what still holds."""
    monkeypatch.setattr(failure_detector, "CONFIRM_SECONDS", 3600)
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        runner = one.links._runner
        await a.suspect(b, "stuck")
        await c.suspect(b, "stuck")
        suspects = runner.detector._suspects
        await until(
            lambda: [len(suspect.suspicions) for suspect in suspects.values()] == [2], "both say so"
        )
        a._socket.transport.abort()
        await until(
            lambda: ("a", "1") not in runner.detector._suspects["b", "1"].suspicions, "it has ended"
        )
        assert ("c", "1") in runner.detector._suspects["b", "1"].suspicions


async def test_before_a_decision_no_groups_are_read_but_those_of_lives_in_question(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        other = await stack.enter_async_context(FakeAgent("c", one))
        await other.register()
        await other.link()
        await other.join(0, 1, "other")
        await other.holds("c", group="other")
        read: list[str] = []
        refresh = one.links._runner._refresh

        async def noted(group: str) -> None:
            read.append(group)
            await refresh(group)

        monkeypatch.setattr(one.links._runner, "_refresh", noted)
        b.is_stopped = True
        await a.suspect(b)
        await a.holds("a")
        assert set(read) == {"train"}


async def test_while_nothing_is_due_a_beat_costs_no_look_at_what_is_open(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_detector, "CONFIRM_SECONDS", 3600)
    protected = Mock()
    monkeypatch.setattr(one.links._terms, "protected", protected)
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        runner = one.links._runner
        await a.suspect(b, "stuck")
        await until(lambda: not runner.detector.is_idle, "it is suspected")
        await a.hears("beat", number=len(a.received("beat")) + 2)
        runner._wake.clear()
        runner.execute([])
        assert not runner._wake.is_set()
        protected.assert_not_called()


async def test_nothing_is_kept_of_nodes_that_have_left_without_a_group(one: Replica) -> None:
    evidence = one.links._runner.detector._evidence
    async with FakeAgent("a", one) as a:
        await a.register()
        await a.link()
        await a.hears("beat", number=2)
        await until(lambda: ("a", "1") in evidence.lives, "it is known")
    await until(lambda: not evidence.lives, "it is forgotten")


async def test_an_agent_is_told_of_no_later_opening_of_a_group_that_it_was_in(
    one: Replica,
) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        for rank in range(2):
            query = {"session": f"s{rank}"}
            await one.http.delete(f"/v1/groups/train/ranks/{rank}", params=query)
        (link,) = (each for life, each in one.links._links.items() if life[0] == "b")
        await until(lambda: not link.groups, "the group is over")
        await a.join(0, 1, session="again")
        await until(lambda: a.held["train"]["epoch"] == 2, "it is open again")
        assert {message["record"]["epoch"] for message in b.received("term")} == {1}


async def test_an_agent_that_was_left_out_is_told_so_once(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, _ = await agents(stack, one, "abc")
        for rank, agent in enumerate((a, b)):
            await agent.join(rank, 2, "sub", f"x{rank}")
        await one.http.delete("/v1/groups/train/ranks/1", params={"session": "s1"})
        await one.http.delete("/v1/nodes/c", params={"incarnation": "1"})
        await b.holds("a")
        await until(lambda: "train" not in one.links._links["b", "1"].groups, "it is out")
        assert "sub" in one.links._links["b", "1"].groups
        assert "train" in one.links._links["a", "1"].groups


async def test_nothing_is_kept_of_a_link_whose_agent_could_not_register(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeAgent("a", one) as a:
        await a.register()
        monkeypatch.setattr(one.store.lives, "read", AsyncMock(side_effect=ServiceError("down")))
        await a.link()
        await a.closed()
        await until(lambda: not one.links._links, "it is not taken for linked")


async def test_an_answer_counts_although_it_cannot_be_noted_for_others(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        b.control_is_silent = b.beats_rarely = True
        Flaky(monkeypatch, one.store.nodes, "note_alive")
        await a.suspect(b)
        await a.hears("cleared", node="b")


async def test_in_the_first_turn_after_the_store_has_failed_no_suspect_is_decided_on(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of the suspect may have been lost by that."""
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        b.is_mute = b.control_is_silent = True
        runner = one.links._runner
        store = Flaky(monkeypatch, one.store.nodes, "ask_all_to_probe")
        suspects = runner.detector._suspects
        await a.suspect(b)
        await until(lambda: ("b", "1") in suspects, "it is suspected")
        suspect = suspects["b", "1"]
        suspect.is_asked = True  # so that what follows is not for that
        before = suspect.until
        await until(lambda: store.calls > 3 and time.monotonic() > before, "the time is over")
        store.is_broken = False
        await until(lambda: suspect.until > before + 1.0, "it is waited for longer")
        b.is_mute = False
        await a.hears("cleared", node="b")
        assert (await one.group())["phase"] == "ready"
