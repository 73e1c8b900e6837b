"""TLS handshakes of a server of asyncio: each has a deadline, and they count as idle connections.

``create_server(ssl=...)`` shows a connection to nobody until its handshake is done, and gives it a
minute: whoever reaches the port could hold as many as there are descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from allfold_core.security.idle_connections import IdleConnections

log = logging.getLogger("allfold.security")

HANDSHAKE_SECONDS = 12.0
# asyncio's own servers wait as long where there are no descriptors left.
_RETRY_SECONDS = 1.0


class TlsListener:
    """Accepts on a socket; a protocol gets each connection once its handshake is done.

    Closed and waited for as :class:`asyncio.Server` is.

    Args:
        listener: bound; whoever made it closes it.
        make: makes the protocol of a connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        idle: IdleConnections,
    ) -> None:
        self._listener = listener
        self._make = make
        self._context = context
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None

    def start(self, backlog: int) -> None:
        """Begin to accept."""
        self._listener.listen(backlog)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more, and end the handshakes."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for each in self._handshakes:
            each.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes have ended."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept a connection: %s", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(_RETRY_SECONDS, self._accept_again)
            return
        sock.setblocking(False)
        handshake = self._loop.create_task(self._shake_hands(sock, address))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)
        self._idle.add(handshake, address[0], handshake.cancel)

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    async def _shake_hands(self, sock: socket.socket, address: Any) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, sock, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:
            log.debug("TLS handshake with %s: %s", address, error)
        finally:
            self._idle.remove(asyncio.current_task())


def listen_with_tls(
    server: Any, sockets: Iterable[socket.socket], context: ssl.SSLContext, idle: IdleConnections
) -> None:
    """Let a server of uvicorn, which has started without any socket, accept on these, with TLS."""
    make = partial(
        server.config.http_protocol_class,
        config=server.config,
        server_state=server.server_state,
        app_state=server.lifespan.state,
    )
    for each in sockets:
        listener = TlsListener(each, make, context, idle)
        listener.start(server.config.backlog)
        server.servers.append(listener)
