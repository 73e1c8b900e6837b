"""The agent's reading of the answers to its requests, from whatever server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from allfold_agent.membership.orchestrator_client import Forgotten, OrchestratorClient
from allfold_cluster.environment import free_address
from allfold_core.errors import MultipleRegister, OrchestratorUnreachable, ServiceError
from tests.node_agent.membership.linked_node import linked_node
from tests.support.credentials import with_token
from tests.support.waiting import until


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """The address of a server that gives everybody the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *_: Any) -> None:
            """Not on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def ask(url: str) -> dict[str, Any]:
    client = OrchestratorClient(url, with_token())
    try:
        return await client.call("POST", "/v1/nodes", json={})
    finally:
        await client.close()


def test_an_answer_of_a_newer_schema_is_refused_with_both_numbers() -> None:
    with answering(200, '{"schema": 2}') as url:
        with pytest.raises(
            OrchestratorUnreachable, match=r"has schema 2 .* up to schema 1"
        ) as caught:
            asyncio.run(ask(url))
        assert url in caught.value.message


def test_the_number_of_the_schema_is_no_part_of_what_is_asked_for() -> None:
    with answering(200, '{"schema": 1, "epoch": 3}') as url:
        assert asyncio.run(ask(url)) == {"epoch": 3}


STRANGE = [
    (502, json.dumps({"error": "bad gateway"})),
    (502, json.dumps("error")),
    (502, "<html>bad gateway</html>"),
    (404, json.dumps("nope")),
    (404, json.dumps({"detail": "Not Found"})),
    (500, json.dumps({"error": {"reason": "no code"}})),
    (503, json.dumps({"error": {"code": 503, "message": "busy", "details": [{}]}})),
    (503, json.dumps({"error": {"code": "Unavailable", "message": "busy"}})),
    (503, ""),
    (200, "[]"),
    (200, "null"),
    (200, "hello"),
]


@pytest.mark.parametrize(("status", "body"), STRANGE)
def test_an_answer_that_no_orchestrator_gives_says_that_there_is_none(
    status: int, body: str
) -> None:
    with answering(status, body) as url, pytest.raises(OrchestratorUnreachable, match=url):
        asyncio.run(ask(url))


def test_answers_of_an_orchestrator_are_data_errors_or_oblivion() -> None:
    refusal = json.dumps({"error": MultipleRegister("taken").to_dict()})
    with answering(200, json.dumps({"epoch": 3})) as url:
        assert asyncio.run(ask(url)) == {"epoch": 3}
    with answering(409, refusal) as url, pytest.raises(MultipleRegister, match="taken"):
        asyncio.run(ask(url))
    with answering(404, refusal) as url, pytest.raises(Forgotten, match="taken"):
        asyncio.run(ask(url))


def test_an_orchestrator_that_accepts_and_says_nothing_is_said_to_take_too_long() -> None:
    """The error of a deadline has no text of its own. On a busy machine it is one of connecting."""

    async def ask_silence(url: str) -> None:
        client = OrchestratorClient(url, with_token())
        try:
            await client.call("GET", "/v1/nodes", timeout=0.05)
        finally:
            await client.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OrchestratorUnreachable, match=r"answer: (Read|Connect)Timeout\."):
            asyncio.run(ask_silence(url))


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with answering(200, json.dumps({"epoch": 3})) as url:
        assert asyncio.run(ask(url)) == {"epoch": 3}


# Several replicas


async def ask_twice(urls: str) -> tuple[list[Any], str]:
    """Two answers, and the replica that is asked next."""
    client = OrchestratorClient(urls, with_token())
    try:
        answers = [await client.call("POST", "/v1/nodes", json={}) for _ in range(2)]
        return answers, client.url
    finally:
        await client.close()


def nowhere() -> str:
    return f"http://{free_address()}"


@pytest.mark.parametrize("status", [502, 503])
def test_where_one_replica_cannot_answer_the_next_one_does_and_is_asked_from_then_on(
    status: int,
) -> None:
    away = json.dumps({"error": ServiceError("no store").to_dict()})
    with answering(status, away) as first, answering(200, '{"epoch": 3}') as second:
        urls = f"{nowhere()},{first}/, {second}"
        assert asyncio.run(ask_twice(urls)) == ([{"epoch": 3}] * 2, second)


def test_a_refusal_is_an_answer_and_no_other_replica_is_asked() -> None:
    refusal = json.dumps({"error": MultipleRegister("taken").to_dict()})
    with answering(409, refusal) as first, answering(200, "{}") as second:
        with pytest.raises(MultipleRegister, match="taken"):
            asyncio.run(ask(f"{first},{second}"))
        with pytest.raises(Forgotten), answering(404, refusal) as unknown:
            asyncio.run(ask(f"{unknown},{second}"))


def test_where_none_answers_the_error_names_all() -> None:
    first, second = nowhere(), nowhere()
    with pytest.raises(OrchestratorUnreachable) as caught:
        asyncio.run(ask(f"{first},{second}"))
    assert first in caught.value.message
    assert second in caught.value.message


def test_among_errors_of_replicas_that_of_one_which_answered_has_the_better_advice() -> None:
    away = ServiceError("no store", component="store")
    with answering(503, json.dumps({"error": away.to_dict()})) as url:
        with pytest.raises(ServiceError, match=r"no store; .* does not answer") as caught:
            asyncio.run(ask(f"{url},{nowhere()}"))
        assert type(caught.value) is ServiceError
        assert caught.value.details == {"component": "store"}


def test_who_hears_late_that_a_replica_has_failed_does_not_undo_the_next_choice() -> None:
    async def fail_at(*urls: str) -> str:
        client = OrchestratorClient("http://a:1,http://b:1,http://c:1", with_token())
        for url in urls:
            client.move_on(url)
        await client.close()
        return client.url

    assert asyncio.run(fail_at("http://a:1", "http://a:1")) == "http://b:1"
    assert asyncio.run(fail_at("http://a:1", "http://b:1", "http://a:1")) == "http://c:1"


# Answers of something that speaks JSON, but is no orchestrator of this version.
OTHER_FIELDS = [
    (200, "{}"),
    (200, json.dumps({"heartbeat_seconds": 1})),
    (200, json.dumps({"heartbeat_seconds": "soon", "lease_seconds": 5})),
    (200, json.dumps({"heartbeat_seconds": 0, "lease_seconds": 5})),
    (200, json.dumps({"heartbeat_seconds": 1, "lease_seconds": float("nan")})),
    (200, json.dumps({"heartbeat_seconds": 1, "lease_seconds": 5, "peers": 3})),
]


@pytest.mark.parametrize(("status", "body"), STRANGE + OTHER_FIELDS)
def test_registration_is_tried_again_whatever_was_answered(status: int, body: str) -> None:
    async def keep(url: str) -> None:
        async with linked_node(url) as node:
            problem = str(node.registration.problem)
            await until(lambda: node.registration.problem != problem, "it says what is wrong")
            assert "orchestrator" in str(node.registration.problem)
            assert not node.keeping.done()

    with answering(status, body) as url:
        asyncio.run(keep(url))
