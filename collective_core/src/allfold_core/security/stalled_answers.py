"""The end of connections whose other end takes nothing of what is sent."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

# An answer may take as long as it likes where each such time takes some of it away.
STALLED_SECONDS = 12.0
# tcpi_bytes_acked of struct tcp_info, Linux include/uapi/linux/tcp.h
_ACKED = struct.Struct("=120xQ")


class AnswerWatch:
    """Aborts a connection on which nothing of an answer arrives for :data:`STALLED_SECONDS`.

    asyncio waits forever: while its buffer is full, and when it closes a connection.

    Args:
        transport: of TCP, with or without TLS.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._arrived = 0

    def start(self) -> None:
        """Look from now on, unless this watch does already."""
        if self._timer is None:
            self._arrived = self._count()
            self._wait()

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(STALLED_SECONDS, self._look)

    def _look(self) -> None:
        before, self._arrived = self._arrived, self._count()
        if self._arrived > before:
            self._wait()
        else:
            self._transport.abort()

    def _count(self) -> int:
        """Return a number that grows with each byte that arrives, whatever counts it.

        With TLS nobody but the kernel does: asyncio's buffer is below the one that it shows.
        """
        connected = self._transport.get_extra_info("socket")
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size)
        acked: int = _ACKED.unpack(info)[0] if len(info) == _ACKED.size else 0
        return acked - int(self._transport.get_write_buffer_size())
