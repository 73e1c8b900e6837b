"""The HTTP server: its socket, its ready file, and a shutdown within seconds."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from allfold_core.security.handshakes import listen_with_tls
from allfold_core.security.idle_connections import IdleConnections
from allfold_core.security.request_limits import limited
from allfold_orchestrator.links.messages import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from fastapi import FastAPI

GRACEFUL_SECONDS = 1
BACKLOG = 2048
# Longer than any pause between an agent's requests, so that they reuse one connection.
KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """uvicorn that notifies the application *before* it waits for open requests to end.

    Without that, long-polls would hold a shutdown up until their time is over.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        idle: IdleConnections,
        on_ready: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._idle = idle
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self._tls else sockets)
        if self.started:
            if self._tls is not None:
                listen_with_tls(self, sockets or [], self._tls, self._idle)
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Raise no signal again after the shutdown: being told to end is not a failure."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free port."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # asyncio sets TCP_NODELAY where it sees that a socket is of TCP. Without it answers on a kept
    # connection wait 40 ms for an ACK, as their heads and bodies are written apart.
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the address of a listening socket as ``host:port``."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_ready_file(path: Path, address: str) -> None:
    """Write the address in one step: a reader never sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(address, encoding="ascii")
    draft.replace(path)


def web_sockets() -> dict[str, Any]:
    """Return uvicorn's options for control links: agents beat, so it need not ping them."""
    return {
        "ws": "websockets-sansio",
        "ws_max_size": MAX_MESSAGE_BYTES,
        "ws_ping_interval": None,
    }


def _allow_descriptors() -> None:
    """Raise the limit of open files as far as this process may: each agent's link is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(
    app: FastAPI, sock: socket.socket, tls: ssl.SSLContext | None, on_ready: Callable[[], None]
) -> bool:
    """Serve until SIGTERM or SIGINT; return True if the application ever started."""
    _allow_descriptors()
    idle = IdleConnections()
    config = uvicorn.Config(
        app,
        http=limited(HttpToolsProtocol, idle),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
        **web_sockets(),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )

    def on_stop() -> None:
        app.state.store.notifications.stop()
        app.state.watch.stop()

    server = Server(config, tls, idle, on_ready, on_stop)
    server.run(sockets=[sock])
    return server.started
