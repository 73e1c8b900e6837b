"""The routes of nodes: registration, departure, removal and lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.api_client import ApiClient, body_of, error_of, form, serving

pytestmark = pytest.mark.anyio


async def test_a_node_registers_and_learns_how_often_to_show_up(api: ApiClient) -> None:
    response = await api.register("a")
    assert response.status_code == 200
    assert body_of(response) == {"lease_seconds": 60.0, "heartbeat_seconds": 0.5, "peers": []}
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
    assert await peers_of("f", data_address="e:7404") == ["d:7402", "b:7402"]


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
    assert view["phase"] == "reduced"
    assert view["lost"] == [{"rank": 1, "node": "b", "reason": "node_lost"}]
    assert (await api.join(1, "b")).status_code == 404  # the old incarnation has no say any more


async def test_a_life_that_is_over_is_not_registered_again(api: ApiClient) -> None:
    await form(api)
    await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
    error = error_of(await api.register("b"), 424, "AF304")
    assert error["details"] == {"node": "b", "how": "signed off"}
    assert "registers as a new incarnation" in error["message"]
    assert (await api.register("b", "2")).status_code == 200


async def test_a_second_agent_with_the_same_name_is_refused(api: ApiClient) -> None:
    await api.register("a")
    error = error_of(await api.register("a", "2", data_address="elsewhere:7402"), 409, "AF104")
    assert "a:7402" in error["message"]
    assert "elsewhere:7402" in error["message"]


async def test_nodes_are_shown_with_the_progress_that_they_have_told(api: ApiClient) -> None:
    progress = {"group": "train", "epoch": 1, "last_seq": 41, "in_flight": 1}
    await api.register("a", device_type="cuda", zone="rack1", version="0.1.0")
    assert await api.store.nodes.heartbeat("a", "1", [progress])
    (node,) = (await api.http.get("/v1/nodes")).json()["nodes"]
    assert 0 <= node.pop("heartbeat_age") < 5
    assert node == {
        "node": "a",
        "state": "alive",
        "control_url": "http://a:7401",
        "data_address": "a:7402",
        "device_type": "cuda",
        "zone": "rack1",
        "token": "",
        "version": "0.1.0",
        "draining": False,
        "progress": [progress],
    }


async def test_a_node_that_leaves_is_gone_at_once_and_may_leave_twice(api: ApiClient) -> None:
    await form(api)
    for _ in range(2):
        response = await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
        assert (response.status_code, body_of(response)) == (200, {})
    assert (await api.group())["phase"] == "reduced"
    states = {n["node"]: n["state"] for n in (await api.http.get("/v1/nodes")).json()["nodes"]}
    assert states == {"a": "alive", "b": "gone"}


async def test_a_node_is_removed_by_nobody_who_does_not_know_its_incarnation(
    api: ApiClient,
) -> None:
    await form(api)
    for query in ({"incarnation": "2"}, {"force": "true"}):
        error = error_of(await api.http.delete("/v1/nodes/b", params=query), 403, "AF100")
        assert "admin" in error["message"]
    error_of(await api.http.delete("/v1/nodes/b"), 400, "AF101")
    assert (await api.group())["phase"] == "ready"


async def test_the_incarnation_of_a_node_is_shown_to_nobody(api: ApiClient) -> None:
    await api.register("a", "a-secret-of-the-node")
    await api.join(0, incarnation="a-secret-of-the-node")
    await api.join(0, session="other", incarnation="a-secret-of-the-node")
    for path in ("/v1/nodes", "/v1/groups", "/v1/groups/train"):
        assert "a-secret-of-the-node" not in (await api.http.get(path)).text


async def test_an_administrator_removes_a_node_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_TOKEN", "join")
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")
    force = {"force": "true"}
    async with serving() as api:
        api.http.headers["authorization"] = "Bearer join"
        await form(api)
        error_of(await api.http.delete("/v1/nodes/b", params=force), 403, "AF100")
        api.http.headers["authorization"] = "Bearer admin"
        assert (await api.http.delete("/v1/nodes/b", params=force)).status_code == 200
        assert (await api.group())["lost"] == [{"rank": 1, "node": "b", "reason": "node_lost"}]
        error_of(await api.http.delete("/v1/nodes/b", params=force), 404, "AF100")
        error_of(await api.http.delete("/v1/nodes/nobody", params=force), 404, "AF100")


async def test_an_administrator_drains_a_node_and_hears_which_ranks_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLFOLD_TOKEN", "join")
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")
    async with serving() as api:
        api.http.headers["authorization"] = "Bearer join"
        await form(api)
        error_of(await api.http.post("/v1/nodes/b/drain"), 403, "AF100")
        api.http.headers["authorization"] = "Bearer admin"
        error_of(await api.http.post("/v1/nodes/nobody/drain"), 404, "AF100")
        left = {"group": "train", "rank": 1, "can_leave": False}
        answer = body_of(await api.http.post("/v1/nodes/b/drain"))
        assert answer == {"node": "b", "draining": False, "ranks": [left]}
        await api.http.delete("/v1/groups/train/ranks/1", params={"session": "s1"})
        assert body_of(await api.http.post("/v1/nodes/b/drain"))["ranks"] == []
        await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
        error_of(await api.http.post("/v1/nodes/b/drain"), 404, "AF100")


async def test_an_administrator_has_a_token_also_where_no_other_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")
    async with serving() as api:
        await api.register("a")
        path, admin = "/v1/nodes/a?force=true", {"authorization": "Bearer admin"}
        error_of(await api.http.delete(path), 403, "AF100")
        assert (await api.http.delete(path, headers=admin)).status_code == 200


async def test_a_join_token_that_a_file_makes_an_administrators_too_opens_no_more_than_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("join")
    monkeypatch.setenv("ALLFOLD_TOKEN_FILE", str(file))
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")
    async with serving() as api:
        api.http.headers["authorization"] = "Bearer join"
        await api.register("a")
        file.write_text("join,admin")
        api.http.headers["authorization"] = "Bearer admin"
        error_of(await api.http.delete("/v1/nodes/a", params={"force": "true"}), 403, "AF100")


async def pages_of(api: ApiClient, what: str, limit: int) -> list[list[str]]:
    """The names on each page of ``/v1/nodes`` or ``/v1/groups``."""
    pages: list[list[str]] = []
    query: dict[str, str | int] = {"limit": limit}
    while True:
        page = (await api.http.get(f"/v1/{what}", params=query)).json()
        pages.append([entry[what.removesuffix("s")] for entry in page[what]])
        if page["next"] is None:
            return pages
        query["after"] = page["next"]


async def test_nodes_and_groups_come_in_pages_sorted_by_name(api: ApiClient) -> None:
    for number in range(5):
        await api.register(f"n{number}")
        await api.join(0, f"n{number}", group=f"g{number}")
    await api.register("gone")
    await api.http.delete("/v1/nodes/gone", params={"incarnation": "1"})
    assert await pages_of(api, "nodes", 2) == [["gone", "n0"], ["n1", "n2"], ["n3", "n4"]]
    assert await pages_of(api, "nodes", 6) == [["gone", "n0", "n1", "n2", "n3", "n4"]]
    assert await pages_of(api, "groups", 3) == [["g0", "g1", "g2"], ["g3", "g4"]]
    for query in ("limit=0", "limit=1001", f"after={'x' * 129}"):
        error_of(await api.http.get(f"/v1/groups?{query}"), 400, "AF101")
