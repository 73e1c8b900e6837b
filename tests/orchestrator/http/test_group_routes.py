"""The routes of ranks and groups: joining, waiting for the plan, finishing, and the view."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest

from allfold_core.errors import PeerLost, RegisterParamsMismatch, from_dict
from allfold_core.plan import Plan
from allfold_orchestrator.membership import reports
from tests.orchestrator.api_client import ApiClient, body_of, error_of, form, serving
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


async def test_a_group_forms_and_everybody_gets_the_same_plan(api: ApiClient) -> None:
    await api.register("a", zone="z2")
    await api.register("b", zone="z1")
    first = await api.join(0, "a", strategies={"all_reduce": "ring"})
    assert body_of(first) == {"opening": 1, "epoch": 1, "ready": False}
    second = await api.join(1, "b", strategies={"all_reduce": "ring"})
    assert body_of(second) == {"opening": 1, "epoch": 1, "ready": True}
    answers = [(await api.plan(session)).json() for session in ("s0", "s1")]
    assert answers[0] == answers[1]
    assert answers[0]["ready"] is True
    plan = Plan.from_dict(answers[0]["plan"])
    assert plan.to_dict() == (await api.store.groups.read("train")).current.plan.to_dict()  # type: ignore[union-attr]
    assert [member.node for member in plan.members] == ["b", "a"]
    assert (plan.opening, plan.world_size, plan.options.timeout) == (1, 2, 30.0)
    assert plan.options.strategies == {"all_reduce": "ring"}


async def test_a_wait_that_is_over_says_who_is_there_and_who_is_missing(api: ApiClient) -> None:
    await api.register("a")
    await api.join(1, world_size=4)
    response = await api.plan("s1", wait=0.05)
    assert response.status_code == 200
    assert body_of(response) == {
        "ready": False,
        "opening": 1,
        "epoch": 1,
        "present": [1],
        "missing": [0, 2, 3],
        "gave_up": [],
        "refused": "",
        "was_open": False,
        "held_by": [],
    }


async def test_a_wait_that_is_over_says_who_came_and_gave_up(api: ApiClient) -> None:
    await api.register("a")
    for rank in (0, 1, 2):
        await api.join(rank, world_size=4)
    await api.leave(0, reason="withdrawn")
    await api.leave(2, reason="lost")
    waiting = (await api.plan("s1")).json()
    assert (waiting["missing"], waiting["gave_up"]) == ([0, 2, 3], [0])


async def test_a_waiting_rank_is_woken_when_the_last_one_comes(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_orchestrator.plan_waits.RECHECK_SECONDS", 30)
    await api.register("a")
    await api.join(0)
    waiting = asyncio.create_task(api.plan("s0", wait=30))
    await until(lambda: api.store.notifications._waiting, "the long-poll waits")
    await api.join(1)
    assert (await within(5, waiting)).json()["ready"] is True


async def test_ranks_of_one_replica_are_woken_even_if_announcements_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("allfold_orchestrator.store.store.relay", deaf)
    monkeypatch.setattr("allfold_orchestrator.plan_waits.RECHECK_SECONDS", 30)
    async with serving() as api:
        await api.register("a")
        await api.join(0)
        waiting = asyncio.create_task(api.plan("s0", wait=30))
        await until(lambda: api.store.notifications._waiting, "the long-poll waits")
        await api.join(1)
        assert (await within(5, waiting)).json()["ready"] is True


async def test_a_waiting_rank_is_told_when_its_seat_is_gone(api: ApiClient) -> None:
    await api.register("a")
    await api.join(0)
    waiting = asyncio.create_task(api.plan("s0", wait=30))
    await until(lambda: api.store.notifications._waiting, "the long-poll waits")
    await api.http.delete("/v1/nodes/a", params={"incarnation": "1"})
    error = error_of(await within(5, waiting), 410, "AF301")
    assert type(from_dict(error)) is PeerLost
    error_of(await api.plan("s0"), 410, "AF301")
    error_of(await api.plan("stranger"), 410, "AF301")


async def test_the_plan_is_there_for_a_rank_whose_peer_has_finished_already(
    api: ApiClient,
) -> None:
    await form(api)
    await api.leave(1)
    assert (await api.plan("s0")).json()["ready"] is True


async def test_a_rank_that_joined_a_group_which_ended_meanwhile_gets_no_plan_of_its_opening(
    api: ApiClient,
) -> None:
    """Its node may have been in the group, and would open it a second time."""
    for rank, node in enumerate("ab"):
        await api.register(node)
        await api.join(rank, node, max_world=4)
    for session in ("new", "next"):
        await api.join(None, "b", session=session, max_world=4)
        assert (await api.plan(session)).json()["record"]
    await api.leave(0, session="new", reason="withdrawn", ended=1)
    error = error_of(await api.plan("next"), 503, "AF400")
    assert error["message"] == "group train has ended meanwhile: join it again"


async def test_a_lost_rank_gets_no_plan(api: ApiClient) -> None:
    await form(api)
    await api.leave(1, reason="lost")
    error_of(await api.plan("s1"), 410, "AF301")


async def test_the_next_opening_is_waited_for_although_the_last_one_is_known(
    api: ApiClient,
) -> None:
    await form(api)
    await api.leave(0)
    assert body_of(await api.join(0)) == {"opening": 2, "epoch": 2, "ready": False}
    waiting = await api.plan("s0", opening=2)
    assert (waiting.json()["epoch"], waiting.json()["present"]) == (2, [0])
    assert waiting.json()["was_open"]


async def test_other_parameters_are_refused_with_both_values(api: ApiClient) -> None:
    await api.register("a")
    await api.join(0)
    error = error_of(await api.join(1, world_size=3), 409, "AF106")
    assert error["details"]["differing"] == {"world_size": {"expected": 2, "got": 3}}
    assert type(from_dict(error)) is RegisterParamsMismatch
    assert (await api.join(1)).json()["ready"] is True


async def test_two_spellings_of_one_strategy_agree(api: ApiClient) -> None:
    await api.register("a")
    await api.join(0, strategies={"all_reduce": "tree", "broadcast": "tree(2)"})
    joined = await api.join(1, strategies={"broadcast": "tree", "all_reduce": "tree(2)"})
    assert joined.json()["ready"] is True


async def test_all_ranks_must_want_the_same_of_a_loss_and_people_see_what_it_is(
    api: ApiClient,
) -> None:
    await api.register("a")
    said: dict[str, Any] = {"on_loss": "shrink", "min_world": 2}
    assert (await api.join(0, **said)).status_code == 200
    error = error_of(await api.join(1), 409, "AF106")
    assert error["details"]["differing"] == {
        "on_loss": {"expected": "shrink", "got": "raise"},
        "min_world": {"expected": 2, "got": 1},
    }
    view = (await api.http.get("/v1/groups/train")).json()
    assert {name: view[name] for name in said} == said
    await api.join(1, **said)
    plan = (await api.plan("s0")).json()["plan"]
    assert {name: plan[name] for name in said} == said
    assert plan["sessions"] == ["s0", "s1"]


@pytest.mark.parametrize(
    "strategies", [{"all_reduce": "rnig"}, {"all_redcue": "ring"}, {"broadcast": "ring"}]
)
async def test_a_strategy_that_cannot_work_is_refused_by_name(
    api: ApiClient, strategies: dict[str, str]
) -> None:
    await api.register("a")
    error = error_of(await api.join(0, strategies=strategies), 400, "AF101")
    (kind,) = strategies
    assert error["details"]["field"] == f"strategies.{kind}"


async def test_ranks_come_from_registered_nodes(api: ApiClient) -> None:
    error = error_of(await api.join(0, "nobody"), 404, "AF100")
    assert error["details"]["node"] == "nobody"


async def test_taken_and_surplus_ranks_are_refused_at_once(api: ApiClient) -> None:
    await form(api)
    error = error_of(await api.join(0, "b", session="other"), 409, "AF104")
    assert error["details"]["holder"] == "a"
    error_of(await api.join(2, "b", world_size=3), 409, "AF106")
    error_of(await api.join(2, "b", world_size=2), 400, "AF101")


async def test_a_lost_reply_does_no_harm(api: ApiClient) -> None:
    await api.register("a")
    assert body_of(await api.join(0)) == body_of(await api.join(0))
    await api.join(1)
    assert body_of(await api.join(0)) == {"opening": 1, "epoch": 1, "ready": True}
    assert (await api.leave(0)).status_code == 200
    assert (await api.leave(0)).status_code == 200


async def test_finishing_what_one_does_not_hold_is_an_error(api: ApiClient) -> None:
    await form(api)
    error_of(await api.leave(0, "stranger"), 409, "AF105")
    assert (await api.leave(0, "stranger", reason="lost")).status_code == 200


async def test_an_agent_keeps_openings_from_being_used_twice(api: ApiClient) -> None:
    await api.register("a", holds={"train": 7, "other": 0})
    await api.join(0)
    assert body_of(await api.join(1)) == {"opening": 8, "epoch": 8, "ready": True}


async def test_a_group_is_shown_through_its_whole_life(api: ApiClient) -> None:
    error_of(await api.http.get("/v1/groups/train"), 404, "AF100")
    await api.register("a")
    await api.register("b")
    await api.join(0, "b")
    view = await api.group()
    assert (view["phase"], view["epoch"], view["last_epoch"]) == ("forming", 1, 0)
    assert (view["present"], view["missing"]) == ([{"rank": 0, "node": "b"}], [1])
    await api.join(1, "a")
    view = await api.group()
    assert (view["phase"], view["epoch"], view["world_size"]) == ("ready", 1, 2)
    assert view["ring_order"] == ["a", "b"]
    assert sorted(view["tree_order"]) == ["a", "b"]
    await api.leave(0)
    view = await api.group()
    assert view["phase"] == "reduced"
    assert view["left"] == [{"rank": 0, "node": "b", "reason": "left"}]
    assert view["present"] == [{"rank": 1, "node": "a"}]
    await api.leave(1, reason="lost")
    view = await api.group()
    assert view["phase"] == "gone"
    assert view["lost"] == [{"rank": 1, "node": "a", "reason": "lost"}]
    assert body_of(await api.http.get("/v1/groups")) == {"groups": [view], "next": None}


async def test_the_newest_term_of_a_group_is_shown_with_whom_it_lost_and_how(
    api: ApiClient,
) -> None:
    await form(api, 3)
    first = {"number": 1, "nodes": ["a", "b", "c"], "lost": [], "trusted": True}
    assert (await api.group())["term"] == first
    await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
    lost = [{"node": "b", "how": "signed off"}]
    later = {"number": 2, "nodes": ["a", "c"], "lost": lost, "trusted": True}
    assert (await api.group())["term"] == later
    for rank in (0, 2):
        await api.leave(rank)
    assert (await api.group())["term"] is None


async def test_while_a_group_forms_anew_the_fate_of_the_last_opening_is_shown(
    api: ApiClient,
) -> None:
    await form(api)
    await api.leave(1, reason="lost")
    await api.join(0, session="new")
    view = await api.group()
    assert (view["phase"], view["epoch"]) == ("reduced", 1)
    assert (view["present"], view["missing"]) == ([{"rank": 0, "node": "a"}], [])
    assert view["waiting"] == [{"rank": 0, "node": "a"}]
    await api.leave(0)
    view = await api.group()
    assert view["waiting"] == []
    assert (view["phase"], view["opening"], view["last_opening"]) == ("forming", 2, 1)
    assert (view["epoch"], view["last_epoch"]) == (2, 1)
    assert view["missing"] == [1]
    assert view["lost"] == [{"rank": 1, "node": "b", "reason": "lost"}]


async def test_who_waits_for_a_name_gets_the_plan_as_soon_as_its_last_holder_has_left(
    api: ApiClient,
) -> None:
    await form(api)
    await api.leave(0)
    for rank in (0, 1):
        joined = body_of(await api.join(rank, session=f"new{rank}"))
        assert joined == {"opening": 2, "epoch": 2, "ready": False}
    waiting = (await api.plan("new0", opening=2)).json()
    assert (waiting["ready"], waiting["missing"]) == (False, [])
    assert waiting["held_by"] == [{"rank": 1, "node": "b"}]
    asked = asyncio.create_task(api.plan("new0", wait=20, opening=2))
    await until(lambda: api.store.notifications._waiting, "the long-poll waits")
    await api.leave(1)
    assert (await within(5, asked)).json()["plan"]["epoch"] == 2


async def test_a_rank_cannot_claim_that_its_node_is_lost(api: ApiClient) -> None:
    await form(api)
    error_of(await api.leave(0, reason="node_lost"), 400, "AF101")


async def test_a_formation_that_was_given_up_leaves_no_group(api: ApiClient) -> None:
    await api.register("a")
    await api.join(0)
    await api.leave(0, reason="withdrawn")
    error_of(await api.http.get("/v1/groups/train"), 404, "AF100")
    assert body_of(await api.http.get("/v1/groups")) == {"groups": [], "next": None}


async def test_the_record_with_all_seats_is_not_made_for_each_rank_that_waits_for_the_plan(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of thousands of nodes would not open in time."""

    def never(_: object) -> NoReturn:
        raise AssertionError("made for one rank among many")

    monkeypatch.setattr(reports, "seats_of", never)
    await api.register("a")
    for rank in range(3):
        await api.join(rank, world_size=3)
    for rank in range(3):
        assert (await api.plan(f"s{rank}")).json()["ready"] is True
