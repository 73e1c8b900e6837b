"""The answers to bad requests: one shape, and the field that is wrong with both values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from allfold_core.group_options import NAMES, GroupOptions
from allfold_orchestrator.bodies import JoinGroup
from allfold_orchestrator.http import request_limits
from allfold_orchestrator.http.request_limits import BodyLimit
from tests.orchestrator.api_client import ApiClient, error_of
from tests.support.waiting import within

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rank": "0"}, "body.rank"),
        ({"rank": -1}, "body.rank"),
        ({"world_size": 0}, "body.world_size"),
        ({"world_size": 10**9}, "body.world_size"),
        ({"timeout": 0}, "body.timeout"),
        ({"timeout": 1e18}, "body.timeout"),
        ({"strategies": {f"k{i}": "ring" for i in range(65)}}, "body.strategies"),
        ({"on_loss": "ignore"}, "body.on_loss"),
        ({"min_world": 0}, "body.min_world"),
        ({"min_world": "1"}, "body.min_world"),
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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"holds": 1}, "body.holds: must be a valid dictionary, got 1"),
        ({"cores": -1}, "body.cores: must be greater than or equal to 0, got -1"),
        ({"zone": "z" * 129}, "body.zone: must have at most 128 characters, got 'zzz"),
        ({"data_address": "a:65536"}, "body.data_address: the port is above 65535, got 'a:65536'"),
    ],
)
async def test_the_message_has_the_field_and_both_values_in_plain_words(
    api: ApiClient, fields: dict[str, Any], said: str
) -> None:
    message = error_of(await api.register("a", **fields), 400, "AF101")["message"]
    assert message.startswith(f"the request is not valid: {said}")


@pytest.mark.parametrize(
    "fields",
    [
        {"holds": {"train": 2**31}},
        {"holds": {"train": 10**4000}},
        {"holds": {f"g{i}": 1 for i in range(4097)}},
        {"data_address": "a:65536"},
    ],
    ids=["an opening beyond 31 bits", "a huge opening", "too many groups", "a port beyond 16 bits"],
)
async def test_a_registration_with_numbers_out_of_bounds_is_refused(
    api: ApiClient, fields: dict[str, Any]
) -> None:
    (name,) = fields
    assert name in error_of(await api.register("a", **fields), 400, "AF101")["message"]
    assert (await api.register("a", holds={"train": 2**31 - 1})).status_code == 200


@pytest.mark.parametrize("schema", [2, -1, "1", True, None])
async def test_a_message_of_a_schema_that_is_not_known_is_refused(
    api: ApiClient, schema: object
) -> None:
    await api.register("a")
    for response in (
        await api.register("a", schema=schema),
        await api.join(0, schema=schema),
    ):
        error = error_of(response, 400, "AF101")
        assert f"schema {schema!r}" in error["message"]
        assert "up to schema 1" in error["message"]


@pytest.mark.parametrize(
    "url", ["http://[", "http://a:70000", "http://a:b", "http://a@b", "ftp://a"]
)
async def test_a_control_port_that_nobody_could_ask_is_refused(api: ApiClient, url: str) -> None:
    error = error_of(await api.register("a", control_url=url), 400, "AF101")
    assert error["details"]["fields"][0]["field"] == "body.control_url"
    assert (await api.register("a", control_url="https://[fe80::1%eth0]:7411")).status_code == 200
    assert (await api.http.get("/v1/metrics/targets")).status_code == 200


async def test_every_answer_and_the_plan_in_it_carry_their_schema(api: ApiClient) -> None:
    answers = [
        await api.register("a", schema=1),
        await api.join(0, schema=1),
        await api.plan("s0"),
        await api.join(1),
        await api.plan("s0"),
        *[await api.http.get(path) for path in ("/v1/nodes", "/v1/groups", "/v1/groups/train")],
        await api.leave(0),
        await api.http.get("/v1/nothing"),
        await api.join(-1),
        await api.http.delete("/v1/nodes/a", params={"incarnation": "1"}),
        *[await api.http.get(path) for path in ("/healthz", "/readyz", "/version")],
    ]
    bodies = [answer.json() for answer in answers]
    assert [body["schema"] for body in bodies] == [1] * len(bodies)
    assert [body["plan"]["schema"] for body in bodies if "plan" in body] == [4]


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
        ("/v1/groups/train/plan?session=s&epoch=2147483648", "query.epoch"),
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


async def test_a_body_that_never_ends_is_refused_and_holds_nothing(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b'{"node": '
        await asyncio.Event().wait()

    monkeypatch.setattr(request_limits, "BODY_SECONDS", 0.05, raising=False)
    response = await within(5, api.http.post("/v1/nodes", content=stalled()))
    error = error_of(response, 408, "AF101")
    assert error["details"]["received"] == 9
    assert (await api.register("a")).status_code == 200


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
    async def fails(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(api.app.state.orchestrator, "nodes", fails)
    error = error_of(await api.http.get("/v1/nodes"), 500, "AF400")
    assert "a mistake of ours" not in error["message"]
    assert "a mistake of ours" in caplog.text


def test_the_registration_of_a_rank_has_every_option_of_a_group_with_its_default() -> None:
    given = {"rank": 0, "node": "a", "incarnation": "1", "session": "s", "world_size": 1}
    request = JoinGroup.model_validate({**given, "timeout": 3.0})
    assert {*NAMES} == {*JoinGroup.model_fields} - {*given}
    assert GroupOptions.from_dict(dict(request)).to_dict() == GroupOptions(3.0).to_dict()
