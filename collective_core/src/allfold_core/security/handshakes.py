"""TLS handshakes of a server of asyncio, with a deadline, and told to whoever counts connections.

``create_server(ssl=...)`` gives a protocol its connection only after the handshake, so nobody can
limit the number of those that never end one; and they have a minute each.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

log = logging.getLogger("allfold.security")


class Handshake(asyncio.Protocol):
    """The start of a connection, until its handshake is done; then a protocol has it.

    Args:
        make: makes that protocol.
        context: of the server.
        seconds: time for the handshake.
        began: called with the transport below TLS as the handshake begins.
        ended: called with the same transport as it ends, well or not.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        seconds: float,
        began: Callable[[Any], None],
        ended: Callable[[Any], None],
    ) -> None:
        self._make = make
        self._context = context
        self._seconds = seconds
        self._began = began
        self._ended = ended
        # What comes in one piece with the last message of the handshake.
        self._early: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        transport.pause_reading()  # start_tls reads
        self._began(transport)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    def data_received(self, data: bytes) -> None:
        """Keep it for the protocol that will have the connection."""
        self._early.append(data)

    async def _shake_hands(self, transport: Any) -> None:
        loop, secure = asyncio.get_running_loop(), None
        try:
            if not transport.is_closing():
                secure = await loop.start_tls(
                    transport,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=self._seconds,
                )
        except OSError as error:
            log.debug("TLS handshake with %s: %s", transport.get_extra_info("peername"), error)
        finally:
            self._ended(transport)
        # Without an error there may be no transport either: the other end was gone.
        if secure is not None and not secure.is_closing():
            self._hand_over(secure)

    def _hand_over(self, secure: asyncio.Transport) -> None:
        protocol = self._make()
        secure.set_protocol(protocol)
        protocol.connection_made(secure)
        for data in self._early:
            protocol.data_received(data)
