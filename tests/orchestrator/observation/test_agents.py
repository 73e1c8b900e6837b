"""Asking agents: with the token, with limits, and with the reason where there is no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from allfold_orchestrator.observation import agents
from allfold_orchestrator.observation.agents import AgentAnswer, Agents
from tests.orchestrator.observations import history_of, status_of
from tests.support.credentials import with_token

pytestmark = pytest.mark.anyio

GOOD = {
    "/v1/status": status_of("a", "train", ["a"]),
    "/v1/history": history_of("a", "train", 5.0),
}


@asynccontextmanager
async def agent(answer: Callable[[str, str], bytes | None]) -> AsyncIterator[str]:
    """Something that answers requests, given their path and token; ``None``: it never does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            writer.close()  # the other side gave up before it asked
            return
        path = head.split()[1].partition("?")[0]
        token = head.lower().partition("authorization: bearer ")[2].partition("\r\n")[0]
        answered = answer(path, token)
        if answered is None:
            await reader.read()  # until the other side gives up
        else:
            writer.write(answered)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def http(body: object, status: str = "200 OK") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


async def asked(url: str, token: str | None = "secret") -> AgentAnswer:
    client = Agents(with_token(token))
    try:
        return (await client.ask({"a": url}, lambda _: 0.0))["a"]
    finally:
        await client.close()


async def test_an_agent_is_asked_with_the_token() -> None:
    tokens: list[str] = []

    def answer(path: str, token: str) -> bytes:
        tokens.append(token)
        return http(GOOD[path])

    async with agent(answer) as url:
        found = await asked(url)
    assert found.status == GOOD["/v1/status"]
    assert found.history == GOOD["/v1/history"]
    assert found.problem == ""
    assert tokens == ["secret", "secret"]


async def test_what_refuses_connections_is_told() -> None:
    assert "cannot be reached" in (await asked("http://127.0.0.1:1")).problem
    assert "cannot be reached" in (await asked("http://[broken")).problem


async def test_a_silent_agent_costs_its_deadline_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "ANSWER_SECONDS", 0.05)
    async with agent(lambda *_: None) as url:
        assert (await asked(url)).problem == f"{url}/v1/status did not answer within 0.05 s"


async def test_many_silent_agents_cost_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "ROUND_SECONDS", 0.05)
    client = Agents(with_token())
    async with agent(lambda *_: None) as url:
        names = [str(number) for number in range(2 * agents.AT_ONCE)]
        found = await client.ask(dict.fromkeys(names, url), lambda _: 0.0)
        await client.close()
    assert {each.problem for each in found.values()} == {f"{url} could not be asked within 0.05 s"}


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({"error": {"message": "no token"}}, "401 Unauthorized", "answered 401: no token"),
        (b"<html>", "502 Bad Gateway", "answered 502: <html>"),
        (b"<html>", "200 OK", "is no agent: it answered something else than a JSON object"),
        ([1], "200 OK", "is no agent: it answered something else than a JSON object"),
        ({"node": "a"}, "200 OK", "answers with a status of another version: ready"),
        (
            status_of("a", "train", ["a"], in_flight=[{"seq": 1}]),
            "200 OK",
            "answers with a status of another version: groups.0.in_flight.0.what",
        ),
    ],
)
async def test_an_answer_that_is_none_is_told(body: object, status: str, problem: str) -> None:
    async with agent(lambda *_: http(body, status)) as url:
        found = await asked(url)
    assert found.status is None
    assert problem in found.problem


async def test_an_agent_with_a_history_of_another_version_is_shown_without_it() -> None:
    answers = {**GOOD, "/v1/history": {"node": "a", "now": 5.0, "groups": [{"name": "train"}]}}
    async with agent(lambda path, _: http(answers[path])) as url:
        found = await asked(url)
    assert (found.status, found.history, found.problem) == (GOOD["/v1/status"], None, "")


async def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "MAX_ANSWER_BYTES", 100)
    async with agent(lambda *_: http(b" " * 101)) as url:
        assert "answers more than" in (await asked(url)).problem


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, "404 Not Found"), ({}, "200 OK"), ({"groups": [{"name": "train"}]}, "200 OK")],
)
async def test_an_agent_without_a_flight_recorder_is_drawn_without_an_op(
    body: object, status: str
) -> None:
    client = Agents(with_token())
    answers = {"a": AgentAnswer(GOOD["/v1/status"])}
    async with agent(lambda *_: http(body, status)) as url:
        await client.ask_flights({"a": url}, answers)
    await client.close()
    assert answers["a"].flight is None


async def test_no_agents_are_no_work() -> None:
    client = Agents(with_token())
    assert await client.ask({}, lambda _: 0.0) == {}
    await client.close()
