"""Dialling a control port: an answer of the process, a refusal, or nothing."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from allfold_orchestrator.links.dial import Dialled, dial

pytestmark = pytest.mark.anyio


async def dialled(sock: socket.socket) -> Dialled:
    return await dial(f"http://127.0.0.1:{sock.getsockname()[1]}", seconds=0.3)


async def test_any_byte_is_an_answer() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x15")  # as TLS answers to what is none
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        assert await dialled(server.sockets[0]) is Dialled.ANSWERED


async def test_a_port_on_which_nobody_listens_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert await dial(f"http://127.0.0.1:{port}") is Dialled.REFUSED


async def test_a_connection_that_only_the_kernel_accepts_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        assert await dialled(stopped) is Dialled.SILENT


async def test_a_host_that_does_not_exist_refuses_nothing() -> None:
    assert await dial("http://no-such-host.invalid:1", seconds=0.3) is Dialled.SILENT


@pytest.mark.parametrize(("resets", "found"), [(1, Dialled.ANSWERED), (2, Dialled.SILENT)])
async def test_a_connection_that_is_reset_is_dialled_once_more(resets: int, found: Dialled) -> None:
    left = resets

    async def reset_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        if left:
            left -= 1
            at_once = struct.pack("ii", 1, 0)
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()
        else:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            writer.close()

    async with await asyncio.start_server(reset_at_first, "127.0.0.1", 0) as server:
        assert await dialled(server.sockets[0]) is found
    assert left == 0
