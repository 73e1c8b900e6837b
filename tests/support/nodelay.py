"""A check that a server of asyncio on a socket of ours sends the parts of an answer at once."""

from __future__ import annotations

import asyncio
import socket


def sends_at_once(listener: socket.socket) -> bool:
    """Return True if what a server on this socket accepts has TCP_NODELAY; closes the socket."""
    return asyncio.run(_accepted_has_nodelay(listener))


async def _accepted_has_nodelay(listener: socket.socket) -> bool:
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted_socket = writer.get_extra_info("socket")
        option = accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        found.set_result(bool(option))

    server = await asyncio.start_server(accepted, sock=listener)
    async with server:
        host, port = listener.getsockname()[:2]
        _, writer = await asyncio.open_connection(host, port)
        try:
            return await asyncio.wait_for(found, 10.0)
        finally:
            writer.close()
            await writer.wait_closed()
