"""One running agent: its ports, its event loop, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
import uvicorn

from allfold_agent.agent import Agent
from allfold_agent.control import make_app
from allfold_agent.settings import AgentSettings
from allfold_core.errors import InvalidArgument

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


def _bind(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidArgument(f"{address!r} is not host:port")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        raise InvalidArgument(f"cannot listen on {address}: {error}") from error
    return listener


def _advertised_host(settings: AgentSettings) -> str:
    """The address under which others reach this machine.

    Asked of the kernel, never of the host name: the source address of a packet to the
    orchestrator. Connecting a datagram socket sends nothing.
    """
    if settings.advertise:
        return settings.advertise
    bound = settings.data.rpartition(":")[0].strip("[]")
    if bound not in ("0.0.0.0", "::", ""):
        return bound
    target = urlsplit(settings.orchestrator)
    try:
        found = socket.getaddrinfo(target.hostname, target.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidArgument(
            f"cannot find the own address towards {settings.orchestrator} ({error}); "
            "name it with --advertise or ALLFOLD_AGENT_ADVERTISE"
        ) from error


def _join_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _write_ready_file(path: str, agent: Agent) -> None:
    ready = {
        "control_url": agent.identity.control_url,
        "data_address": agent.identity.data_address,
        "socket": agent.settings.socket,
    }
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(ready))
    partial.replace(path)


async def serve(settings: AgentSettings, ready_file: str | None) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Args:
        ready_file: written, as JSON, once ranks can connect.

    Raises:
        InvalidArgument: the settings cannot work.
    """
    # The agent's own workers are the parallelism; torch's would only fight with them.
    torch.set_num_threads(1)
    control, data = _bind(settings.control), _bind(settings.data)
    host = _advertised_host(settings)
    control_url = f"http://{_join_host(host, control.getsockname()[1])}"
    agent = Agent(settings, control_url, _join_host(host, data.getsockname()[1]), data)
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
    log.info(
        "node %s: ranks at %s, control at %s, data at %s",
        settings.name,
        settings.socket,
        control_url,
        agent.identity.data_address,
    )
    if ready_file:
        _write_ready_file(ready_file, agent)
    try:
        await server.serve(sockets=[control])
    finally:
        await agent.stop()
