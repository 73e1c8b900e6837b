"""The opening of a control link: whom it speaks to."""

from __future__ import annotations

import asyncio

import pytest

from allfold_agent.membership.control_socket import dial
from allfold_core.errors import OrchestratorUnreachable
from tests.support.credentials import with_token

pytestmark = pytest.mark.anyio

SECONDS = 10.0


async def test_a_redirect_takes_the_token_to_nobody_else() -> None:
    seen: list[bytes] = []

    async def listen(answer: str) -> tuple[asyncio.Server, str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer.encode())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return server, f"{host}:{port}"

    other, elsewhere = await listen("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    redirect = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: ws://{elsewhere}/\r\n"
    first, address = await listen(f"{redirect}Content-Length: 0\r\n\r\n")
    async with other, first, asyncio.timeout(SECONDS):
        with pytest.raises(OrchestratorUnreachable, match="answered 307"):
            await dial(f"http://{address}", "node", with_token("secret"))
    (head,) = seen
    assert b"Bearer secret" in head
