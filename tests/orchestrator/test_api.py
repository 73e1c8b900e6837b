"""The control plane over HTTP, with the embedded store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from allfold_core.errors import PeerLost, RegisterParamsMismatch, from_dict
from allfold_core.plan import Plan
from allfold_orchestrator.gates import BodyLimit
from allfold_orchestrator.settings import Settings
from tests.orchestrator.api_client import ApiClient, error_of, serving
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api() -> AsyncIterator[ApiClient]:
    async with serving() as client:
        yield client


async def form(api: ApiClient, world_size: int = 2) -> None:
    """A complete group, rank r on the r-th of the nodes a, b, c ..."""
    for rank in range(world_size):
        node = chr(ord("a") + rank)
        assert (await api.register(node)).status_code == 200
        assert (await api.join(rank, node, world_size=world_size)).status_code == 200


# Nodes


async def test_a_node_registers_and_learns_how_often_to_show_up(api: ApiClient) -> None:
    response = await api.register("a")
    assert response.status_code == 200
    assert response.json() == {"lease_seconds": 60.0, "heartbeat_seconds": 1.0, "peers": []}
    assert (await api.register("a")).status_code == 200


async def test_a_node_learns_where_others_are_that_came_lately_and_never_where_it_is_itself(
    api: ApiClient,
) -> None:
    async def peers_of(node: str, **fields: Any) -> list[str]:
        peers: list[str] = (await api.register(node, **fields)).json()["peers"]
        return peers

    assert await peers_of("a") == []
    assert await peers_of("b") == ["a:7402"]
    assert await peers_of("c") == ["a:7402", "b:7402"]
    assert await peers_of("d") == ["b:7402", "c:7402"]
    assert await peers_of("b") == ["c:7402", "d:7402"]
    assert await peers_of("e") == ["d:7402", "b:7402"]
    assert await peers_of("renamed", data_address="b:7402") == ["d:7402", "e:7402"]


async def test_nobody_is_pointed_to_a_node_that_is_gone_or_was_refused(api: ApiClient) -> None:
    for node in "abc":
        await api.register(node)
    error_of(await api.register("a", "2", data_address="elsewhere:7402"), 409, "AF104")
    await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
    assert (await api.register("d")).json()["peers"] == ["a:7402", "c:7402"]


@pytest.mark.parametrize(
    "link",
    [
        {"latency": -1e-6, "bandwidth": 1e9},
        {"latency": 1e-4, "bandwidth": 0},
        {"latency": 1e-4, "bandwidth": 1e308},
        {"latency": 1e-4},
        {"latency": 1e-4, "bandwidth": 1e9, "jitter": 0.0},
    ],
)
async def test_a_link_that_cannot_be_is_refused(api: ApiClient, link: dict[str, float]) -> None:
    error = error_of(await api.register("a", link=link), 400, "AF101")
    assert "link" in error["message"]


async def test_a_restarted_agent_comes_back_and_loses_its_ranks(api: ApiClient) -> None:
    await form(api)
    assert (await api.register("b", "2")).status_code == 200
    view = await api.group()
    assert view["phase"] == "broken"
    assert view["lost"] == [{"rank": 1, "node": "b"}]
    assert (await api.join(1, "b")).status_code == 404  # the old incarnation has no say any more


async def test_a_second_agent_with_the_same_name_is_refused(api: ApiClient) -> None:
    await api.register("a")
    error = error_of(await api.register("a", "2", data_address="elsewhere:7402"), 409, "AF104")
    assert "a:7402" in error["message"]
    assert "elsewhere:7402" in error["message"]


async def test_heartbeats_carry_progress_and_need_a_registration(api: ApiClient) -> None:
    progress = {"group": "train", "epoch": 1, "last_seq": 41, "in_flight": 1}
    beat = {"incarnation": "1", "progress": [progress]}
    error_of(await api.http.post("/v1/nodes/a/heartbeat", json=beat), 404, "AF100")
    await api.register("a", device_type="cuda", zone="rack1", version="0.1.0")
    response = await api.http.post("/v1/nodes/a/heartbeat", json=beat)
    assert (response.status_code, response.json()) == (200, {})
    (node,) = (await api.http.get("/v1/nodes")).json()["nodes"]
    assert 0 <= node.pop("heartbeat_age") < 5
    assert node == {
        "node": "a",
        "state": "alive",
        "incarnation": "1",
        "control_url": "http://a:7401",
        "data_address": "a:7402",
        "device_type": "cuda",
        "zone": "rack1",
        "version": "0.1.0",
        "progress": [progress],
    }
    stale = {"incarnation": "0", "progress": []}
    error_of(await api.http.post("/v1/nodes/a/heartbeat", json=stale), 404, "AF100")


async def test_a_node_that_leaves_is_gone_at_once_and_may_leave_twice(api: ApiClient) -> None:
    await form(api)
    for _ in range(2):
        response = await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
        assert (response.status_code, response.json()) == (200, {})
    assert (await api.group())["phase"] == "broken"
    states = {n["node"]: n["state"] for n in (await api.http.get("/v1/nodes")).json()["nodes"]}
    assert states == {"a": "alive", "b": "gone"}


# Ranks


async def test_a_group_forms_and_everybody_gets_the_same_plan(api: ApiClient) -> None:
    await api.register("a", zone="z2")
    await api.register("b", zone="z1")
    first = await api.join(0, "a", strategies={"all_reduce": "ring"})
    assert first.json() == {"epoch": 1, "ready": False}
    second = await api.join(1, "b", strategies={"all_reduce": "ring"})
    assert second.json() == {"epoch": 1, "ready": True}
    answers = [(await api.plan(session)).json() for session in ("s0", "s1")]
    assert answers[0] == answers[1]
    assert answers[0]["ready"] is True
    plan = Plan.from_dict(answers[0]["plan"])
    assert plan.to_dict() == (await api.store.groups.read("train")).current.plan.to_dict()  # type: ignore[union-attr]
    assert [member.node for member in plan.members] == ["b", "a"]
    assert (plan.epoch, plan.world_size, plan.timeout) == (1, 2, 30.0)
    assert plan.strategies == {"all_reduce": "ring"}


async def test_a_wait_that_is_over_says_who_is_there_and_who_is_missing(api: ApiClient) -> None:
    await api.register("a")
    await api.join(1, world_size=4)
    response = await api.plan("s1", wait=0.05)
    assert response.status_code == 200
    assert response.json() == {
        "ready": False,
        "epoch": 1,
        "present": [1],
        "missing": [0, 2, 3],
        "gave_up": [],
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
    monkeypatch.setattr("allfold_orchestrator.service.RECHECK_SECONDS", 30)
    await api.register("a")
    await api.join(0)
    waiting = asyncio.create_task(api.plan("s0", wait=30))
    await until(lambda: api.store.bells._waiting, "the long-poll waits")
    await api.join(1)
    assert (await within(5, waiting)).json()["ready"] is True


async def test_ranks_of_one_replica_are_woken_even_if_announcements_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("allfold_orchestrator.store.relay", deaf)
    monkeypatch.setattr("allfold_orchestrator.service.RECHECK_SECONDS", 30)
    async with serving() as api:
        await api.register("a")
        await api.join(0)
        waiting = asyncio.create_task(api.plan("s0", wait=30))
        await until(lambda: api.store.bells._waiting, "the long-poll waits")
        await api.join(1)
        assert (await within(5, waiting)).json()["ready"] is True


async def test_a_waiting_rank_is_told_when_its_seat_is_gone(api: ApiClient) -> None:
    await api.register("a")
    await api.join(0)
    waiting = asyncio.create_task(api.plan("s0", wait=30))
    await until(lambda: api.store.bells._waiting, "the long-poll waits")
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


async def test_a_lost_rank_gets_no_plan(api: ApiClient) -> None:
    await form(api)
    await api.leave(1, reason="lost")
    error_of(await api.plan("s1"), 410, "AF301")


async def test_the_next_epoch_is_waited_for_although_the_last_one_is_known(
    api: ApiClient,
) -> None:
    await form(api)
    await api.leave(0)
    assert (await api.join(0)).json() == {"epoch": 2, "ready": False}
    waiting = await api.plan("s0", epoch=2)
    assert (waiting.json()["epoch"], waiting.json()["present"]) == (2, [0])


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
    assert (await api.join(0)).json() == (await api.join(0)).json()
    await api.join(1)
    assert (await api.join(0)).json() == {"epoch": 1, "ready": True}
    assert (await api.leave(0)).status_code == 200
    assert (await api.leave(0)).status_code == 200


async def test_finishing_what_one_does_not_hold_is_an_error(api: ApiClient) -> None:
    await form(api)
    error_of(await api.leave(0, "stranger"), 409, "AF105")
    assert (await api.leave(0, "stranger", reason="lost")).status_code == 200


async def test_a_late_repetition_of_leaving_spares_the_next_epoch(api: ApiClient) -> None:
    await form(api)
    await api.leave(0, epoch=1)
    await api.join(0)
    await api.leave(0, epoch=1)
    assert (await api.group())["present"] == [{"rank": 0, "node": "a"}]


async def test_an_agent_keeps_epochs_from_being_used_twice(api: ApiClient) -> None:
    await api.register("a", holds={"train": 7, "other": 0})
    await api.join(0)
    assert (await api.join(1)).json() == {"epoch": 8, "ready": True}


# Groups for people


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
    assert view["phase"] == "closing"
    assert view["left"] == [{"rank": 0, "node": "b", "reason": "finished"}]
    assert view["present"] == [{"rank": 1, "node": "a"}]
    await api.leave(1, reason="lost")
    view = await api.group()
    assert view["phase"] == "gone"
    assert view["lost"] == [{"rank": 1, "node": "a"}]
    assert (await api.http.get("/v1/groups")).json() == {"groups": [view]}


async def test_while_a_group_forms_anew_the_fate_of_the_last_epoch_is_shown(
    api: ApiClient,
) -> None:
    await form(api)
    await api.leave(1, reason="lost")
    assert (await api.group())["phase"] == "broken"
    await api.leave(0)
    await api.join(0)
    view = await api.group()
    assert (view["phase"], view["epoch"], view["last_epoch"]) == ("forming", 2, 1)
    assert view["missing"] == [1]
    assert view["lost"] == [{"rank": 1, "node": "b"}]


async def test_a_formation_that_was_given_up_leaves_no_group(api: ApiClient) -> None:
    await api.register("a")
    await api.join(0)
    await api.leave(0, reason="withdrawn")
    error_of(await api.http.get("/v1/groups/train"), 404, "AF100")
    assert (await api.http.get("/v1/groups")).json() == {"groups": []}


# Failures have one shape


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rank": "0"}, "body.rank"),
        ({"rank": -1}, "body.rank"),
        ({"world_size": 0}, "body.world_size"),
        ({"world_size": 10**9}, "body.world_size"),
        ({"timeout": 0}, "body.timeout"),
        ({"session": ""}, "body.session"),
        ({"node": "a/b"}, "body.node"),
        ({"node": "x" * 129}, "body.node"),
        ({"strategies": {"all_reduce": "ring;reduce=tree"}}, "body.strategies.all_reduce"),
        ({"surprise": 1}, "body.surprise"),
    ],
)
async def test_a_wrong_field_is_named_with_what_was_expected_and_what_came(
    api: ApiClient, fields: dict[str, object], named: str
) -> None:
    error = error_of(await api.join(**{"rank": 0, **fields}), 400, "AF101")  # type: ignore[arg-type]
    (field,) = error["details"]["fields"]
    assert field["field"] == named
    assert field["expected"]
    assert field["expected"] in error["message"]
    assert field["got"] in error["message"]


async def test_every_missing_field_is_named(api: ApiClient) -> None:
    error = error_of(await api.http.post("/v1/nodes", json={"node": "a"}), 400, "AF101")
    missing = {f["field"] for f in error["details"]["fields"] if f["got"] == "nothing"}
    assert missing == {"body.incarnation", "body.control_url", "body.data_address"}


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"null", b'{"a": NaN}', b"\xff"])
async def test_bodies_that_are_no_request_are_refused(api: ApiClient, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await api.http.post("/v1/nodes", content=body, headers=headers)
    error_of(response, 400, "AF101" if body != b"\xff" else "AF100")


async def test_a_timeout_that_is_no_number_is_refused(api: ApiClient) -> None:
    body = (
        b'{"rank":0,"node":"a","incarnation":"1","session":"s","world_size":2,"timeout":Infinity}'
    )
    headers = {"content-type": "application/json"}
    response = await api.http.post("/v1/groups/train/ranks", content=body, headers=headers)
    error_of(response, 400, "AF101")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/groups/train/plan?session=s&wait=1", "query.epoch"),
        ("/v1/groups/train/plan?session=s&epoch=1&wait=31", "query.wait"),
        ("/v1/groups/train/plan?session=s&epoch=1&wait=nan", "query.wait"),
        ("/v1/groups/a%20b", "path.group"),
        (f"/v1/groups/{'x' * 129}", "path.group"),
    ],
)
async def test_wrong_parameters_are_named(api: ApiClient, path: str, named: str) -> None:
    error = error_of(await api.http.get(path), 400, "AF101")
    assert [field["field"] for field in error["details"]["fields"]] == [named]


async def test_unknown_paths_and_methods_are_answered_in_json(api: ApiClient) -> None:
    error = error_of(await api.http.get("/v1/nothing"), 404, "AF100")
    assert error["details"] == {"method": "GET", "path": "/v1/nothing"}
    response = await api.http.put("/v1/groups")
    error_of(response, 405, "AF100")
    assert "GET" in response.headers["allow"]


async def test_bodies_over_the_limit_are_refused(api: ApiClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    error_of(await api.http.post("/v1/nodes", content=b" " * (2**20 + 1)), 413, "AF101")
    error_of(await api.http.post("/v1/nodes", content=endless()), 413, "AF101")
    error_of(await api.http.post("/v1/nodes", content=b" " * 2**20), 400, "AF101")


@pytest.mark.parametrize("announced", [str(2**20 + 1), "-1", "many"])
async def test_a_body_that_is_announced_too_large_is_not_even_read(announced: str) -> None:
    async def never(*_: object) -> Any:
        raise AssertionError("nothing may be read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-length", announced.encode())]
    await BodyLimit(never)({"type": "http", "headers": headers}, never, send)
    assert sent[0]["status"] == 413


async def test_a_mistake_of_ours_is_answered_in_json_and_logged(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(api.app.state.orchestrator, "nodes", fails)
    error = error_of(await api.http.get("/v1/nodes"), 500, "AF400")
    assert "a mistake of ours" not in error["message"]
    assert "a mistake of ours" in caplog.text


# The token


@pytest.fixture
async def guarded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiClient]:
    monkeypatch.setenv("ALLFOLD_TOKEN", "tökén")
    async with serving() as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", "tökén".encode(), b"Basic x"]
)
@pytest.mark.parametrize("path", ["/v1/nodes", "/openapi.json", "/nowhere"])
async def test_nobody_comes_in_without_the_token(
    guarded: ApiClient, header: bytes | None, path: str
) -> None:
    headers = {} if header is None else {b"authorization": header}
    response = await guarded.http.get(path, headers=headers)
    error = error_of(response, 401, "AF100")
    assert "ALLFOLD_TOKEN" in error["message"]
    assert "tökén" not in response.text
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer "])
async def test_the_token_opens_everything(guarded: ApiClient, scheme: bytes) -> None:
    headers = {b"authorization": scheme + "tökén".encode()}
    assert (await guarded.http.get("/v1/nodes", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/version"])
async def test_probes_need_no_token(guarded: ApiClient, path: str) -> None:
    await until(lambda: guarded.app.state.sweeper.problem is None, "it is ready")
    assert (await guarded.http.get(path)).status_code == 200


# Probes and documentation


async def test_probes_answer(api: ApiClient) -> None:
    assert (await api.http.get("/healthz")).json() == {"status": "ok"}
    assert (await api.http.get("/version")).json()["service"] == "allfold-orchestrator"
    await until(lambda: api.app.state.sweeper.problem is None, "the first sweep")
    ready = (await api.http.get("/readyz")).json()
    assert ready["ready"] is True
    assert {check["name"]: check["ok"] for check in ready["checks"]} == {
        "store": True,
        "sweeper": True,
    }
    assert all(check["reason"] for check in ready["checks"])


async def test_readiness_says_what_is_wrong(api: ApiClient) -> None:
    await until(lambda: api.app.state.sweeper.problem is None, "the first sweep")
    api.app.state.sweeper.problem = "the sun is down"
    response = await api.http.get("/readyz")
    assert response.status_code == 503
    checks = {check["name"]: check for check in response.json()["checks"]}
    assert checks["sweeper"] == {"name": "sweeper", "ok": False, "reason": "the sun is down"}
    assert checks["store"]["ok"] is True


async def test_everything_is_documented(api: ApiClient) -> None:
    schema = (await api.http.get("/openapi.json")).json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            content = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert content, (method, path)
            if path.startswith("/v1"):
                assert {"400", "503", "default"} <= operation["responses"].keys(), (method, path)
                assert "422" not in operation["responses"], (method, path)


async def test_the_link_model_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_LINK_LATENCY", "0.25")
    monkeypatch.setenv("ALLFOLD_LINK_BANDWIDTH", "1000")
    async with serving(Settings(lease_seconds=60)) as api:
        await api.register("a")
        await api.join(0, world_size=1)
        links = (await api.plan("s0")).json()["plan"]["links"]
    assert (links["latency"], links["seconds_per_byte"]) == (0.25, 0.001)


async def test_a_plan_reckons_with_the_link_that_a_node_measured_after_it_had_registered(
    api: ApiClient,
) -> None:
    await api.register("a")
    await api.register("b")
    await api.register("b", link={"latency": 900e-6, "bandwidth": 125e6})
    await api.join(0, "a")
    await api.join(1, "b")
    links = (await api.plan("s0")).json()["plan"]["links"]
    assert (links["latency"], links["seconds_per_byte"]) == (2.0**-10, 2.0**-27)


async def test_an_application_that_ends_lets_go_of_those_who_wait() -> None:
    async with serving() as api:
        await api.register("a")
        await api.join(0)
        waiting = asyncio.create_task(api.plan("s0", wait=30))
        await until(lambda: api.store.bells._waiting, "the long-poll waits")
        api.store.bells.stop()
        assert (await within(5, waiting)).json()["ready"] is False
