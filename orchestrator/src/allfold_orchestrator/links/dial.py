"""Dialling an agent's control port, to see whether its process still answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum
from urllib.parse import urlsplit

DIAL_SECONDS = 1.0
_ASK = b"GET /healthz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n"


class Dialled(Enum):
    """The outcome of a dial.

    A connection that only the kernel accepts is no answer: a stopped process has that, too.
    """

    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"


async def dial(url: str, seconds: float = DIAL_SECONDS) -> Dialled:
    """Ask the agent at this control URL for anything at all.

    A connection that is accepted and then reset is dialled once more: a process that is just
    ending does that.
    """
    for _ in range(2):
        with suppress(ConnectionResetError, BrokenPipeError):
            return await _ask(url, seconds)
    return Dialled.SILENT


async def _ask(url: str, seconds: float) -> Dialled:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(parts.hostname, port)
            try:
                writer.write(_ASK)
                # Any byte will do; a port with TLS sends an alert.
                return Dialled.ANSWERED if await reader.read(1) else Dialled.SILENT
            finally:
                writer.close()
    except ConnectionRefusedError:
        return Dialled.REFUSED
    except (ConnectionResetError, BrokenPipeError):
        raise
    except OSError:  # no route, no such host, no answer in time: no proof of anything
        return Dialled.SILENT
