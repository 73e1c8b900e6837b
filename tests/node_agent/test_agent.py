"""An agent as a whole: it starts, waits for its orchestrator, and ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import pytest

from allfold_agent.agent import Agent
from allfold_agent.http import addresses
from allfold_agent.settings import AgentSettings
from tests.support.processes.ports import free_address
from tests.support.processes.services import Services
from tests.support.waiting import until, wait_until


def test_an_agent_whose_control_port_closes_goes_on_trying_to_register(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn closes the port a moment before the agent stops, amid a registration."""
    settings = AgentSettings.model_validate(
        {
            "ALLFOLD_SOCKET": str(tmp_path / "socket"),
            "ALLFOLD_ORCHESTRATOR_URL": f"http://{free_address()}",
            "ALLFOLD_AGENT_GPU": "off",
            "ALLFOLD_AGENT_THREADS": "1",
        }
    )

    async def run() -> str:
        control, data = addresses.bind("127.0.0.1:0"), addresses.bind("127.0.0.1:0")
        agent = Agent(settings, control, data)
        control.close()
        agent.start()
        try:
            await until(lambda: "orchestrator at" in str(agent.registration.problem), "it tries")
            return str(agent.registration.problem)
        finally:
            await agent.stop()

    assert "does not answer" in asyncio.run(run())
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


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
