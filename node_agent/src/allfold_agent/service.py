"""One running agent: its ports, its event loop, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from allfold_agent.agent import Agent
from allfold_agent.control.app import make_app
from allfold_agent.http import addresses
from allfold_agent.settings import AgentSettings, how_to_set
from allfold_core.errors import InvalidArgument
from allfold_core.security.handshakes import listen_with_tls
from allfold_core.security.idle_connections import IdleConnections
from allfold_core.security.request_limits import limited

log = logging.getLogger("allfold_agent")

_GRACEFUL_SECONDS = 2


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to the agent, which is there before and after it."""

    _draining: asyncio.Task[None] | None = None

    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext | None, idle: IdleConnections
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._idle = idle

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self._tls else sockets)
        if self.started and self._tls is not None:
            listen_with_tls(self, sockets or [], self._tls, self._idle)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def end_at_signals(self, drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stop serving at SIGINT and SIGTERM; one that comes before it began, too.

        Args:
            drain: what is done before, at SIGTERM; a second signal cuts it short.
        """
        loop = asyncio.get_running_loop()
        end_now = partial(self.handle_exit, signal.SIGTERM, None)

        def drain_and_end() -> None:
            loop.add_signal_handler(signal.SIGTERM, end_now)
            self._draining = asyncio.create_task(drain())
            self._draining.add_done_callback(lambda _: end_now())

        loop.add_signal_handler(signal.SIGTERM, drain_and_end)
        loop.add_signal_handler(signal.SIGINT, self.handle_exit, signal.SIGINT, None)


def _write_ready_file(path: str, ready: dict[str, str]) -> None:
    partial = Path(f"{path}.partial")
    try:
        partial.write_text(json.dumps(ready))
        partial.replace(path)
    except OSError as error:
        raise InvalidArgument(f"cannot write the ready file {path}: {error}") from error


def _allow_descriptors() -> None:
    """Raise the limit of open files: each connection and each shared work buffer is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _warn_if_open(settings: AgentSettings, *ports: str) -> None:
    exposed = [each for each in ports if not ip_address(addresses.split(each)[0]).is_loopback]
    if exposed and not settings.credentials.tokens:
        log.warning(
            "no token is set: whoever reaches %s can read and disturb this node's groups; set "
            "ALLFOLD_TOKEN",
            " or ".join(exposed),
        )


async def serve(settings: AgentSettings, ready_file: str | None) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Args:
        ready_file: written, as JSON, once ranks can connect.

    Raises:
        ServiceError: an address cannot be used, or another agent has the socket.
        InvalidArgument: the socket or the ready file cannot be used.
    """
    _allow_descriptors()
    # The agent's own workers are the parallelism; torch's would only fight with them.
    torch.set_num_threads(1)
    scheme, tls = settings.credentials.scheme, settings.credentials.tls
    control = addresses.bind(settings.control, how_to_set("control"))
    data = addresses.bind(settings.data, how_to_set("data"))
    bound = addresses.bound(control), addresses.bound(data)
    agent = Agent(settings, control, data)
    idle = IdleConnections()
    config = uvicorn.Config(
        make_app(agent),
        http=limited(HttpToolsProtocol, idle),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
    )
    server = _Server(config, tls.server if tls else None, idle)
    drain = partial(agent.draining.end, settings.drain_seconds, settings.drain_for)
    server.end_at_signals(drain)
    agent.start()
    listening = addresses.join(*bound[0]), addresses.join(*bound[1]), settings.socket
    _warn_if_open(settings, *listening[:2])
    log.info("node %s listens: control %s, data %s, ranks %s", settings.name, *listening)
    try:
        if ready_file:
            _write_ready_file(
                ready_file,
                {
                    "control_url": f"{scheme}://{addresses.local(bound[0])}",
                    "data_address": addresses.local(bound[1]),
                    "socket": settings.socket,
                },
            )
        await server.serve(sockets=[control])
    finally:
        await agent.stop()
