"""An agent as a whole: it starts, waits for its orchestrator, and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.http.client import upgrade
from allfold_agent.membership.link_dialling import LinkRequest
from allfold_agent.settings import AgentSettings
from allfold_cluster.environment import free_address
from allfold_core.errors import AgentLost, NodeDraining
from allfold_core.protocol.peer_link import LINK_PROTOCOL, Hello, LinkMessage, LinkReader
from allfold_service.addresses import bind
from tests.support.credentials import transport
from tests.support.processes.services import Services
from tests.support.waiting import until, wait_until

JOIN = {
    "group": "train",
    "rank": 0,
    "session": "s0",
    "world_size": 2,
    "timeout": 30.0,
    "init_timeout": 600.0,
    "strategies": {},
}


@asynccontextmanager
async def started(
    folder: Path, orchestrator: str, data: socket.socket | None = None
) -> AsyncIterator[NodeAgent]:
    """An agent that is stopped in the end."""
    settings = AgentSettings.model_validate(
        {
            "ALLFOLD_SOCKET": str(folder / "socket"),
            "ALLFOLD_ORCHESTRATOR_URL": f"http://{orchestrator}",
            "ALLFOLD_AGENT_GPU": "off",
            "ALLFOLD_AGENT_THREADS": "1",
        }
    )
    control = bind("127.0.0.1:0", "--flag")
    agent = NodeAgent(settings, control, data or bind("127.0.0.1:0", "--flag"))
    control.close()
    agent.start()
    try:
        yield agent
    finally:
        await agent.stop()


@asynccontextmanager
async def unregistered(folder: Path, data: socket.socket | None = None) -> AsyncIterator[NodeAgent]:
    """An agent that has tried to register where no orchestrator is."""
    async with started(folder, free_address(), data) as agent:
        await until(lambda: "orchestrator at" in str(agent.registration.problem), "it tries")
        yield agent


def test_an_agent_whose_control_port_closes_goes_on_trying_to_register(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn closes the port a moment before the agent stops, amid a registration."""

    async def run() -> str:
        async with unregistered(tmp_path) as agent:
            return str(agent.registration.problem)

    assert "does not answer" in asyncio.run(run())
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_readiness_is_answered_while_the_orchestrator_has_yet_to_answer(tmp_path: Path) -> None:
    async def run() -> tuple[int, str, bool]:
        asked, given_up = asyncio.Event(), asyncio.Event()

        async def keep_waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            given_up.set()
            writer.close()

        server = await asyncio.start_server(keep_waiting, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with started(tmp_path, f"{host}:{port}") as agent:
            await asked.wait()
            app = httpx.ASGITransport(make_app(agent))
            async with httpx.AsyncClient(transport=app, base_url="http://agent") as http:
                answer = await http.get("/readyz")
            asks_still = not given_up.is_set()
        await given_up.wait()
        server.close()
        return answer.status_code, answer.json()["checks"][0]["reason"], asks_still

    assert asyncio.run(run()) == (503, "not registered with the orchestrator yet", True)


def test_an_agent_has_links_at_its_data_port(tmp_path: Path) -> None:
    async def run() -> tuple[str, LinkMessage]:
        data = bind("127.0.0.1:0", "--flag")
        address = f"127.0.0.1:{data.getsockname()[1]}"
        async with unregistered(tmp_path, data) as agent:
            target = LinkRequest(agent.settings.name, agent.registration.incarnation).target
            connected, early = await asyncio.to_thread(
                upgrade, transport(), address, target, LINK_PROTOCOL, 10.0
            )
            with connected:
                connected.settimeout(10.0)
                said = early or await asyncio.to_thread(connected.recv, 65536)
            return agent.registration.incarnation, next(LinkReader().feed(said))

    incarnation, hello = asyncio.run(run())
    assert isinstance(hello, Hello)
    assert hello.incarnation == incarnation


def test_an_agent_that_ends_answers_the_ranks_that_wait_for_their_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their seats are given back while there is a connection for that."""

    async def run() -> BaseException | None:
        async with unregistered(tmp_path) as agent:
            joining = agent.registrar.join(JOIN)
            for _ in range(5):  # turns of the loop, until it waits for the registration
                await asyncio.sleep(0)
        return joining.exception(0)

    caplog.set_level(logging.INFO)
    assert isinstance(asyncio.run(run()), AgentLost)
    assert any("rank 0 of group 'train'" in each for each in caplog.messages)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_an_agent_that_drains_takes_no_ranks(tmp_path: Path) -> None:
    async def run() -> BaseException | None:
        async with unregistered(tmp_path) as agent:
            agent.draining.begin("an operator drains it")
            joining = agent.registrar.join(JOIN)
            await until(joining.done, "it answers although no orchestrator does")
            return joining.exception(0)

    assert isinstance(asyncio.run(run()), NodeDraining)


def test_an_agent_that_is_not_registered_yet_ends_in_order() -> None:
    with Services() as services:
        agent = services.launch_agent("a")
        services.await_agent("a", registered=False)
        agent.child.signal(signal.SIGTERM)
        wait_until(lambda: agent.child.ended, "it ends")
        log = (services.folder / "a.log").read_text()
        assert not Path(agent.socket).exists()
    assert agent.child.status == 0
    assert "Traceback" not in log
