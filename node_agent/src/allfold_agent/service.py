"""One running agent: its ports, its event loop, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from allfold_agent import addresses
from allfold_agent.agent import Agent
from allfold_agent.control import make_app
from allfold_agent.settings import AgentSettings

log = logging.getLogger("allfold_agent")

_GRACEFUL_SECONDS = 2


class _Server(uvicorn.Server):
    """uvicorn, for which being told to end is no failure."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Stop at SIGINT and SIGTERM, without raising them again: the agent still has to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _write_ready_file(path: str, ready: dict[str, str]) -> None:
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(ready))
    partial.replace(path)


def _allow_descriptors() -> None:
    """As many as the system lets this process have: connections and work buffers need them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def serve(settings: AgentSettings, ready_file: str | None) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Args:
        ready_file: written, as JSON, once ranks can connect.

    Raises:
        InvalidArgument: the settings cannot work.
    """
    _allow_descriptors()
    # The agent's own workers are the parallelism; torch's would only fight with them.
    torch.set_num_threads(1)
    control, data = addresses.bind(settings.control), addresses.bind(settings.data)
    places = {
        "control_url": f"http://{addresses.local(control)}",
        "data_address": addresses.local(data),
        "socket": settings.socket,
    }
    agent = Agent(settings, control, data)
    config = uvicorn.Config(
        make_app(agent),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
    )
    server = _Server(config)
    agent.start()
    log.info("node %s: %s", settings.name, ", ".join(f"{k} {v}" for k, v in places.items()))
    if ready_file:
        _write_ready_file(ready_file, places)
    try:
        await server.serve(sockets=[control])
    finally:
        await agent.stop()
