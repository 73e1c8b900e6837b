"""The HTTP server of a service: uvicorn with TLS and limits, its ready file, its end at signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn

from allfold_core.errors import InvalidArgument
from allfold_service.addresses import bound, join
from allfold_service.connections import IdleConnections, listen_with_tls
from allfold_service.credentials import Credentials
from allfold_service.request_limits import limited
from allfold_service.tls import TlsIdentity

log = logging.getLogger("allfold_service")


def _nothing() -> None:
    """Do nothing."""


class Server(uvicorn.Server):
    """uvicorn with TLS, with limits on strangers, and with an end that waits for nothing idle.

    Args:
        app: the application.
        tls: the certificate; without one its connections are plain.
        keep_alive: the seconds that a connection may be without a request.
        graceful: the seconds that requests have to end when the server ends.
        idle: the connections that nothing is answered on; of this server alone.
        on_ready: called once the port can be reached.
        on_stop: called before open requests are waited for: long-polls would last until their time
            is over.
        drain: what is done before the end at SIGTERM; a second signal cuts it short.
        options: further ones of uvicorn.
    """

    def __init__(
        self,
        app: Any,
        tls: TlsIdentity | None,
        *,
        keep_alive: int,
        graceful: int,
        idle: IdleConnections | None = None,
        on_ready: Callable[[], None] = _nothing,
        on_stop: Callable[[], None] = _nothing,
        drain: Callable[[], Coroutine[Any, Any, None]] | None = None,
        **options: Any,
    ) -> None:
        self._idle = IdleConnections() if idle is None else idle
        super().__init__(
            uvicorn.Config(
                app,
                http=limited(self._idle),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=keep_alive,
                timeout_graceful_shutdown=graceful,
                **options,
            )
        )
        self._tls = tls
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self._tls else sockets)
        if self.started:
            if self._tls is not None:
                listen_with_tls(self, sockets or [], self._tls.server, self._idle)
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Raise no signal again after the shutdown: being told to end is not a failure."""
        self.end_at_signals()
        yield

    def end_at_signals(self) -> None:
        """Stop serving at SIGINT and SIGTERM; called earlier than ``serve``, from then on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.handle_exit, signal.SIGINT, None)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self) -> None:
        if self._drain is None or self._draining is not None:
            self._stop_serving()
            return
        self._draining = asyncio.create_task(self._drain())
        self._draining.add_done_callback(lambda _: self._stop_serving())

    def _stop_serving(self) -> None:
        self.handle_exit(signal.SIGTERM, None)


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as ``host:port``."""
    return join(*bound(listener))


def write_ready_file(path: str | Path, content: str) -> None:
    """Write a file in one step: a reader never sees half of it.

    Raises:
        InvalidArgument: it cannot be written.
    """
    whole = Path(path)
    draft = whole.with_name(f".{whole.name}.{os.getpid()}")
    try:
        draft.write_text(content, encoding="ascii")
        draft.replace(whole)
    except OSError as error:
        raise InvalidArgument(f"cannot write the ready file {path}: {error}") from error


def warn_if_open(credentials: Credentials, danger: str, *listeners: socket.socket) -> None:
    """Warn where others than this machine reach a port that asks for no token.

    Args:
        danger: what whoever reaches it can do.
    """
    exposed = [each for each in listeners if not ip_address(bound(each)[0]).is_loopback]
    if exposed and not credentials.tokens:
        log.warning(
            "no token is set: whoever reaches %s can %s; set ALLFOLD_TOKEN",
            " or ".join(map(address_of, exposed)),
            danger,
        )
