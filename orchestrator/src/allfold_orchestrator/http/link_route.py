"""The WebSocket of an agent's control link."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, WebSocket
from starlette.websockets import WebSocketDisconnect

from allfold_control import messages
from allfold_core.errors import ServiceError
from allfold_core.schema import NAME_PATTERN
from allfold_orchestrator import bodies
from allfold_orchestrator.http.link_requests import LinkRequests
from allfold_orchestrator.links.control_links import ControlLinks, LifeIsOver, UnknownNode
from allfold_orchestrator.links.link import Link, life_is_over

REGISTER_SECONDS = 5.0
SILENT_SECONDS = 5.0
SILENT_BEATS = 4
"""A link on which nothing comes for so long, and where so many beats are due, is closed."""

# RFC 6455: a message that the other end should not have sent; a service that cannot do its work.
POLICY, RESTART = 1008, 1012
# Our own: the node is to register first. No other end of a link makes it register again, as that
# would bring an evicted life back.
UNKNOWN = 4404
# The longest reason that a closing frame carries: RFC 6455, sections 5.5 and 5.5.1.
MOST_BYTES = 123

router = APIRouter(prefix="/v1")


@router.websocket("/nodes/{node}/link")
async def link(socket: WebSocket, node: Annotated[str, Path(pattern=NAME_PATTERN)]) -> None:
    """Serve one agent until either side ends the link."""
    links: ControlLinks = socket.app.state.links
    await socket.accept()
    try:
        await _serve(socket, links, await _opened(socket, links, node))
    except LifeIsOver as error:
        await socket.send_text(life_is_over(str(error)))
        await _close(socket, POLICY, f"the life of node {node} is over: it {error}")
    except UnknownNode as error:
        await _close(socket, UNKNOWN, str(error))
    except (ValueError, TypeError, TimeoutError) as error:
        await _close(socket, POLICY, str(error) or "no message came in time")
    except ServiceError as error:
        await _close(socket, RESTART, error.message)
    except (WebSocketDisconnect, RuntimeError):
        return  # the agent is gone


async def _opened(socket: WebSocket, links: ControlLinks, node: str) -> Link:
    request = messages.from_agent(await _text(socket, REGISTER_SECONDS))
    if not isinstance(request, messages.Register):
        raise TypeError("the first message on a link has to be of type register")
    return await links.open(node, request)


async def _serve(socket: WebSocket, links: ControlLinks, opened: Link) -> None:
    sending = asyncio.create_task(_send(socket, opened))
    lease: bodies.Lease = socket.app.state.lease
    silent_seconds = max(SILENT_SECONDS, SILENT_BEATS * lease.heartbeat_seconds)
    state = socket.app.state
    requests = LinkRequests(opened, state.orchestrator, state.plan_bodies)
    try:
        while True:
            message = messages.from_agent(await _text(socket, silent_seconds))
            await links.receive(opened, message)
            if isinstance(message, messages.Ask):
                requests.take(message)
    finally:
        links.ended(opened)
        requests.close()
        sending.cancel()
        await asyncio.wait([sending])


async def _send(socket: WebSocket, opened: Link) -> None:
    while (text := await opened.waiting.get()) is not None:
        await socket.send_text(text)
    await _close(socket, 1000, "the link is over")


async def _text(socket: WebSocket, seconds: float) -> str:
    async with asyncio.timeout(seconds):
        try:
            return await socket.receive_text()
        except KeyError:  # Starlette's word for bytes
            raise TypeError("a message on a link has to be text") from None


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    try:
        await socket.close(code, fitting(reason))
    except RuntimeError:
        return  # it is closed already


def fitting(reason: str) -> str:
    """Return as many words of a reason as a closing frame has room for."""
    encoded = reason.encode()
    if len(encoded) <= MOST_BYTES:
        return reason
    words = encoded[: MOST_BYTES - len(" ...")].decode(errors="ignore")
    return f"{words.rpartition(' ')[0] or words} ..."
