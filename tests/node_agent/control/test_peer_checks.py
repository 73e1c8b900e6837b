"""A node checks the way to another one: both ports, by what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.data_port import DataPort
from allfold_agent.http.transport import Transport
from allfold_agent.settings import AgentSettings
from allfold_agent.tensors.offers import Offers
from tests.support.credentials import transport

TOKEN = "a-join-token"


def check(node: str = "b", control: str = "", data: str = "", **more: Any) -> dict[str, Any]:
    """Have a node check another one; return its findings."""
    settings = AgentSettings.model_validate({"token": TOKEN, "ALLFOLD_AGENT_NAME": "a"})
    app = make_app(
        cast(
            NodeAgent, SimpleNamespace(settings=settings, transport=Transport(settings.credentials))
        )
    )
    query = {"node": node, "control_url": control or closed_url(), "data_address": data or closed()}

    async def ask() -> httpx.Response:
        transport, bearer = httpx.ASGITransport(app), {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            return await http.post("/v1/checks/peer", params=query | more, headers=bearer)

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def closed() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def closed_url() -> str:
    return f"http://{closed()}"


@contextmanager
def data_port(token: str = TOKEN) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = DataPort(
        listener,
        transport=transport(token),
        open_edge=lambda _: socket.socket.close,
        offers=Offers(),
    )
    server.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.close()


@contextmanager
def control_port(body: bytes, status: int = 200) -> Iterator[str]:
    """Something that answers every GET alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize("thorough", [False, True])
def test_a_node_that_is_reached_is_measured(thorough: bool) -> None:
    with control_port(b'{"node": "b"}') as control, data_port() as data:
        found = check("b", control, data, thorough=thorough)
    assert found["control"]["ok"]
    assert found["control"]["seconds"] > 0
    assert found["data"]["ok"]
    assert found["data"]["latency"] > 0
    assert found["data"]["bandwidth"] > 0
    assert found["data"]["path"] == "machine"


def test_ports_where_nothing_listens_refuse() -> None:
    found = check()
    assert [found[port]["kind"] for port in ("control", "data")] == ["refused", "refused"]
    assert "Connection refused" in found["data"]["problem"]


def test_a_port_that_accepts_and_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = check("b", f"http://{address}", address)
    assert [found[port]["kind"] for port in ("control", "data")] == ["silent", "silent"]


def test_the_address_of_another_node_is_found_out() -> None:
    with control_port(b'{"node": "a"}') as control, data_port() as data:
        found = check("b", control, data)
    assert found["control"]["kind"] == "wrong_node"
    assert "node 'a' answers at 127.0.0.1" in found["control"]["problem"]
    # That node's data port has not been measured in the other one's name.
    assert found["data"]["kind"] == "wrong_node"


def test_another_token_is_told_from_a_dead_node() -> None:
    error = {"code": "AF100", "message": "this port needs the join token", "details": {}}
    body = json.dumps({"error": error}).encode()
    with control_port(body, 401) as control, data_port("another") as data:
        found = check("b", control, data)
    assert [found[port]["kind"] for port in ("control", "data")] == ["token", "token"]


@pytest.mark.parametrize(("body", "status"), [(b"<html>", 200), (b"[1]", 200), (b"oops", 502)])
def test_something_else_at_the_address_is_a_stranger(body: bytes, status: int) -> None:
    with control_port(body, status) as control:
        found = check("b", control, control.removeprefix("http://"))
    assert [found[port]["kind"] for port in ("control", "data")] == ["stranger", "stranger"]


@pytest.mark.parametrize("address", ["nowhere.invalid:7412", "no-port", "[::1:7412"])
def test_an_address_that_is_none_is_said_so(address: str) -> None:
    assert check(data=address)["data"]["kind"] == "no_name"


@pytest.mark.parametrize("host", ["ä", "a b", "a\n", "[", "x" * 300])
def test_what_is_no_address_is_found_to_be_none(host: str) -> None:
    found = check(control=f"http://{host}:1", data=f"{host}:1")
    assert (found["control"]["ok"], found["data"]["ok"]) == (False, False)
    assert (found["control"]["kind"], found["data"]["kind"]) == ("no_name", "no_name")
