"""The connections of a server that nothing is answered on: with a handshake, or without a request.

``create_server(ssl=...)`` shows a connection to nobody until its handshake is done, and gives it a
minute: whoever reaches the port could hold as many as there are descriptors. Here each handshake
has a deadline, and counts as an idle connection.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

log = logging.getLogger("allfold.security")

HANDSHAKE_SECONDS = 12.0
# asyncio's own servers wait as long where there are no descriptors left.
_RETRY_SECONDS = 1.0
# Beyond so many those are ended that have been idle for a while. Thousands of agents that come back
# at once, as their orchestrator has been replaced, are more, and idle for a moment each.
MOST_IDLE = 512
PATIENCE_SECONDS = 5.0
# Never more, nor a quarter of the descriptors that this process may have.
MOST_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class _Idle:
    address: str
    since: float
    abort: Callable[[], object]


class IdleConnections:
    """The connections of a server on which no request is being answered, with their addresses.

    Where there are too many, the oldest one of the address that has most is aborted: whoever opens
    thousands pushes out nobody else.

    Args:
        most: beyond so many, those are aborted that are idle for :data:`PATIENCE_SECONDS`.
        most_at_once: beyond so many, others too; at least ``most``.
    """

    def __init__(self, most: int = MOST_IDLE, most_at_once: int | None = None) -> None:
        self._most = most
        self._most_at_once = max(most, _at_once() if most_at_once is None else most_at_once)
        self._connections: dict[Hashable, _Idle] = {}  # the oldest first
        self._counts: Counter[str] = Counter()

    def add(self, connection: Hashable, address: str, abort: Callable[[], object]) -> None:
        """Take in a connection, and what ends it."""
        self.remove(connection)
        self._connections[connection] = _Idle(address, monotonic(), abort)
        self._counts[address] += 1
        while (victim := self._victim()) is not None:
            idle = self._connections[victim]
            self.remove(victim)
            idle.abort()

    def remove(self, connection: Hashable) -> None:
        """Forget a connection, which need not be here."""
        idle = self._connections.pop(connection, None)
        if idle is not None:
            self._counts[idle.address] -= 1
            if not self._counts[idle.address]:
                del self._counts[idle.address]

    def _victim(self) -> Hashable | None:
        if len(self._connections) <= self._most:
            return None
        impatient = monotonic() - PATIENCE_SECONDS
        has_room = len(self._connections) <= self._most_at_once
        if has_room and next(iter(self._connections.values())).since > impatient:
            return None  # even the oldest has come just now
        greediest = max(self._counts, key=self._counts.__getitem__)
        victim, idle = next(
            each for each in self._connections.items() if each[1].address == greediest
        )
        return None if has_room and idle.since > impatient else victim


def _at_once() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_AT_ONCE, descriptors // 4)


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
    """Accept on these sockets, with TLS, for a server of uvicorn that has started without any."""
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
