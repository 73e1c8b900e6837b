"""Limits on what those may have open whose agents have a token of one name, over REST."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from allfold_orchestrator.store import keys
from tests.orchestrator.api_client import ApiClient, body_of, error_of, serving

pytestmark = pytest.mark.anyio

TOKENS = {"a": "first", "b": "second", "c": "plain"}
"""By node, the token with which its agent registers."""


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiClient]:
    """An orchestrator with a node for each token; node a2 has another token of a's name."""
    monkeypatch.setenv("ALLFOLD_TOKEN", "team-a=first,team-a=newer,team-b=second,plain")
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")
    async with serving() as client:
        for node, token in {**TOKENS, "a2": "newer"}.items():
            client.http.headers["authorization"] = f"Bearer {token}"
            assert (await client.register(node)).status_code == 200
        client.http.headers["authorization"] = "Bearer admin"
        yield client


async def limit(api: ApiClient, token: str = "team-a", **counts: int | None) -> None:
    body_of(await api.http.put(f"/v1/limits/tokens/{token}", json=counts))


async def tokens(api: ApiClient) -> dict[str, tuple[Any, ...]]:
    """By name: groups and ranks that may be open, and that are."""
    listed = body_of(await api.http.get("/v1/limits"))["tokens"]
    return {
        each["token"]: (each["groups"], each["ranks"], each["open_groups"], each["open_ranks"])
        for each in listed
    }


async def opens(api: ApiClient, group: str, *nodes: str, **fields: Any) -> None:
    for rank, node in enumerate(nodes):
        own = {"session": f"{group}{rank}", "world_size": len(nodes)}
        answer = await api.join(rank, node, group, **own, **fields)
        assert answer.status_code == 200, answer.text


async def leave(api: ApiClient, group: str, rank: int) -> None:
    path, query = f"/v1/groups/{group}/ranks/{rank}", {"session": f"{group}{rank}"}
    assert (await api.http.delete(path, params=query)).status_code == 200


async def refused(api: ApiClient, group: str, node: str, of: int, rank: int = 0) -> Any:
    fields = {"session": f"{group}{rank}", "world_size": of}
    return error_of(await api.join(rank, node, group, **fields), 409, "AF108")


async def test_a_group_that_would_be_one_too_many_is_refused_in_a_sentence_that_names_all(
    api: ApiClient,
) -> None:
    await limit(api, groups=1)
    await opens(api, "one", "a", "a2")
    error = await refused(api, "two", "a2", of=3)
    assert error["message"] == (
        "group two, of 3 ranks, may not open: token team-a would have 2 groups open, and may have "
        "1; end others, or have an administrator raise the limit: allfold limit --token-name "
        "team-a --groups N"
    )
    assert error["details"] == {"group": "two", "token": "team-a", "limit": 1, "asked": 2}
    assert (await api.http.get("/v1/groups/two")).status_code == 404, "nothing of it is kept"


async def test_ranks_count_from_the_first_one_on_so_that_none_waits_for_one_that_is_refused(
    api: ApiClient,
) -> None:
    await limit(api, ranks=5)
    await opens(api, "one", "a", "a2")
    for rank in range(4):
        message = (await refused(api, "two", "a", of=4, rank=rank))["message"]
        assert "would have 6 ranks open, and may have 5" in message
    assert (await api.join(0, "a", "three", world_size=3)).status_code == 200
    assert await tokens(api) == {"team-a": (None, 5, 2, 5)}
    await refused(api, "four", "a", of=1)


async def test_once_a_group_has_closed_the_next_join_works(api: ApiClient) -> None:
    await limit(api, groups=1, ranks=2)
    await opens(api, "one", "a", "a")
    await leave(api, "one", 0)
    assert await tokens(api) == {"team-a": (1, 2, 1, 1)}
    await refused(api, "two", "a", of=1)
    await leave(api, "one", 1)
    assert await tokens(api) == {"team-a": (1, 2, 0, 0)}
    await opens(api, "two", "a", "a2")


async def test_a_group_that_gives_up_before_it_is_complete_gives_its_share_back(
    api: ApiClient,
) -> None:
    await limit(api, ranks=4)
    await api.join(0, "a", "one", world_size=4, session="one0")
    await refused(api, "two", "a", of=1)
    await leave(api, "one", 0)
    await opens(api, "two", "a")


async def test_a_node_that_is_removed_gives_back_what_its_ranks_had(api: ApiClient) -> None:
    await limit(api, ranks=2)
    await opens(api, "one", "a", "a")
    answer = await api.http.delete("/v1/nodes/a", params={"force": True})
    assert answer.status_code == 200
    await opens(api, "two", "a2", "a2")


async def test_each_name_has_its_own_limit_and_tokens_without_a_name_have_none(
    api: ApiClient,
) -> None:
    await limit(api, groups=0)
    await refused(api, "one", "a", of=1)
    await opens(api, "two", "b")
    await opens(api, "three", "c")
    assert await tokens(api) == {"team-a": (0, None, 0, 0), "team-b": (None, None, 1, 1)}
    await limit(api)
    await opens(api, "one", "a")
    assert (await tokens(api))["team-a"] == (None, None, 1, 1)


async def test_a_group_of_several_tokens_counts_for_that_of_its_first_rank(
    api: ApiClient,
) -> None:
    await opens(api, "one", "a", "b", "c")
    await opens(api, "two", "c", "a")
    assert await tokens(api) == {"team-a": (None, None, 1, 3)}


async def test_a_rank_that_joins_while_its_group_runs_counts_when_it_joins(
    api: ApiClient,
) -> None:
    await limit(api, ranks=2)
    await opens(api, "one", "a", max_world=4)
    more = {"world_size": 1, "max_world": 4, "session": "second"}
    assert (await api.join(None, "b", "one", **more)).status_code == 200
    error = error_of(await api.join(None, "c", "one", **{**more, "session": "third"}), 409, "AF108")
    assert "token team-a would have 3 ranks open, and may have 2" in error["message"]
    await leave(api, "one", 0)
    assert (await api.join(None, "c", "one", **{**more, "session": "third"})).status_code == 200


async def test_a_lower_limit_ends_nothing_that_is_open_or_forms(api: ApiClient) -> None:
    await opens(api, "one", "a", "a")
    await api.join(0, "a", "two", world_size=2, session="two0")
    await limit(api, groups=1, ranks=1)
    assert (await api.join(1, "a", "two", world_size=2, session="two1")).status_code == 200
    await refused(api, "three", "a", of=1)


async def test_a_join_whose_answer_was_lost_is_answered_again(api: ApiClient) -> None:
    await limit(api, groups=1, ranks=1)
    for _ in range(2):
        await opens(api, "one", "a")
    assert await tokens(api) == {"team-a": (1, 1, 1, 1)}


async def test_of_groups_that_open_at_once_as_many_do_as_may(api: ApiClient) -> None:
    await limit(api, groups=5)
    names = [f"g{number}" for number in range(12)]
    asked = (api.join(0, "a", name, world_size=2, session=name) for name in names)
    statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
    assert sorted(statuses) == [200] * 5 + [409] * 7


async def test_the_metrics_have_what_is_open_and_may_be(api: ApiClient) -> None:
    await limit(api, ranks=7)
    await opens(api, "one", "a", "a")
    await opens(api, "two", "b")
    text = (await api.http.get("/metrics")).text
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = {
        (each.name.rpartition("_token_")[2], each.labels["token"], each.labels["of"]): each.value
        for each in samples
        if "_token_" in each.name
    }
    assert found == {
        ("open", "team-a", "groups"): 1,
        ("open", "team-a", "ranks"): 2,
        ("open", "team-b", "groups"): 1,
        ("open", "team-b", "ranks"): 1,
        ("limit", "team-a", "ranks"): 7,
    }


async def test_prometheus_learns_the_token_of_each_agent_and_people_do_by_its_name(
    api: ApiClient,
) -> None:
    targets = (await api.http.get("/v1/metrics/targets")).json()
    labels = {each["labels"]["node"]: each["labels"]["token"] for each in targets}
    assert labels == {"a": "team-a", "a2": "team-a", "b": "team-b", "c": ""}
    nodes = body_of(await api.http.get("/v1/nodes"))["nodes"]
    assert {each["node"]: each["token"] for each in nodes} == labels
    assert "first" not in str(targets) + str(nodes)


@pytest.mark.parametrize("body", [{"groups": -1}, {"ranks": 1.5}, {"ranks": True}, {"rate": 1}])
async def test_what_is_no_limit_is_refused(api: ApiClient, body: dict[str, Any]) -> None:
    error_of(await api.http.put("/v1/limits/tokens/team-a", json=body), 400, "AF101")
    error_of(await api.http.put("/v1/limits/tokens/a=b", json={"ranks": 1}), 400, "AF101")
    assert await tokens(api) == {}


async def test_only_an_administrator_sets_the_limit_of_a_token(api: ApiClient) -> None:
    api.http.headers["authorization"] = "Bearer first"
    answer = await api.http.put("/v1/limits/tokens/team-a", json={"groups": 9})
    assert answer.status_code == 403


async def test_a_limit_of_another_version_is_refused_and_the_error_says_where_it_is(
    api: ApiClient,
) -> None:
    await api.store.limits._client.hset(keys.TOKEN_LIMITS, "team-a", '{"schema": 99}')
    answer = await api.http.get("/v1/limits")
    assert answer.status_code == 503
    assert "allfold:token_limits" in answer.json()["error"]["message"]
