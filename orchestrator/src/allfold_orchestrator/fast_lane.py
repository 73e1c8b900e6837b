"""The requests that every node and every rank sends, on a short way to the service.

Registrations, heartbeats, joins, waits for a plan and leaves come ten thousands of times where all
else comes a few times, and the way through routing and validation of a web framework costs several
times what the service does for them. This middleware answers those that are well-formed. Everything
else, a wrong one of these included, goes on to the routes in :mod:`allfold_orchestrator.api`, which
document the interface and say what is wrong with a request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_core.errors import AllfoldError
from allfold_orchestrator import wire
from allfold_orchestrator.failures import Refusal
from allfold_orchestrator.group_state import Leave, Reason
from allfold_orchestrator.http_errors import answer
from allfold_orchestrator.plan_bodies import PlanBodies
from allfold_orchestrator.service import Orchestrator

_NAME = re.compile(wire.NAME_PATTERN)
_RANK = re.compile(r"[0-9]{1,9}")
_REASON = re.compile("|".join(reason.value for reason in Reason))
_SECONDS = re.compile(rf"([0-9]|[12][0-9])(\.[0-9]{{1,20}})?|{wire.MAX_WAIT_SECONDS:.0f}(\.0)?")
_LEAVE = {"session": _NAME, "reason": _REASON}
_PLAN = {"session": _NAME, "epoch": _RANK, "wait": _SECONDS}
_EMPTY = wire.Empty()

Body = TypeVar("Body", bound=wire.Request)
Handler = Callable[[], Awaitable[Response]]


class FastLane:
    """See above; inside the gates, so what comes here may come in."""

    def __init__(
        self, app: ASGIApp, service: Orchestrator, bodies: PlanBodies, lease: wire.Lease
    ) -> None:
        self._app = app
        self._service = service
        self._lease = lease
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = b""
        if _has_json(scope):
            body, messages = await _read(receive)
            receive = _again(messages, receive)
        handler = self._handler(scope, body)
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler()
        except Refusal as refusal:
            response = answer(refusal.error, refusal.status)
        except AllfoldError as error:
            response = answer(error)
        await response(scope, receive, send)

    def _handler(self, scope: Scope, body: bytes) -> Handler | None:
        """What answers the request; ``None`` if it is another one, or not well-formed."""
        match scope["method"], scope["path"].split("/"):
            case "POST", ["", "v1", "nodes"]:
                node = _parsed(wire.RegisterNode, body)
                return partial(self._register, node) if node else None
            case "POST", ["", "v1", "nodes", name, "heartbeat"] if _NAME.fullmatch(name):
                beat = _parsed(wire.Heartbeat, body)
                return partial(self._heartbeat, name, beat) if beat else None
            case "POST", ["", "v1", "groups", group, "ranks"] if _NAME.fullmatch(group):
                join = _parsed(wire.JoinGroup, body)
                return partial(self._join, group, join) if join else None
            case "DELETE", ["", "v1", "groups", group, "ranks", rank] if _NAME.fullmatch(group):
                leave = _leave(rank, _query(scope, _LEAVE))
                return partial(self._leave, group, leave) if leave else None
            case "GET", ["", "v1", "groups", group, "plan"] if _NAME.fullmatch(group):
                query = _query(scope, _PLAN)
                return partial(self._plan, group, query, scope) if query else None
        return None

    async def _register(self, node: wire.RegisterNode) -> Response:
        peers = await self._service.register_node(node)
        return _json(self._lease.model_copy(update={"peers": peers}))

    async def _heartbeat(self, node: str, beat: wire.Heartbeat) -> Response:
        await self._service.heartbeat(node, beat)
        return _json(_EMPTY)

    async def _join(self, group: str, join: wire.JoinGroup) -> Response:
        seated = await self._service.join(group, join)
        return _json(wire.Joined(epoch=seated.epoch, ready=seated.ready))

    async def _leave(self, group: str, leave: Leave) -> Response:
        await self._service.leave(group, leave)
        return _json(_EMPTY)

    async def _plan(self, group: str, query: Mapping[str, str], scope: Scope) -> Response:
        epoch, wait = int(query["epoch"]), float(query.get("wait", 0))
        found = await self._service.plan(group, epoch, query["session"], wait)
        return self._bodies.response(group, found, _header(scope, b"accept-encoding"))


def _json(body: wire.Answer) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _query(scope: Scope, fields: Mapping[str, re.Pattern[str]]) -> dict[str, str]:
    """The query, if each of its fields is known, comes once and is well-formed; else nothing."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    query = dict(pairs)
    known = all(name in fields and fields[name].fullmatch(value) for name, value in pairs)
    complete = "session" in query and ("epoch" in query or "epoch" not in fields)
    return query if known and complete and len(query) == len(pairs) else {}


def _leave(rank: str, query: Mapping[str, str]) -> Leave | None:
    if not query or not _RANK.fullmatch(rank) or int(rank) >= wire.MAX_WORLD_SIZE:
        return None
    return Leave(int(rank), query["session"], Reason(query.get("reason", Reason.FINISHED)))


def _parsed(model: type[Body], body: bytes) -> Body | None:
    try:
        return model.model_validate_json(body) if body else None
    except ValidationError:
        return None


def _has_json(scope: Scope) -> bool:
    return scope["method"] == "POST" and _header(scope, b"content-type") == "application/json"


def _header(scope: Scope, name: bytes) -> str:
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return ", ".join(values)


async def _read(receive: Receive) -> tuple[bytes, list[Message]]:
    """The whole body, and the messages it came in. The gates bound its size."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return b"".join(message.get("body", b"") for message in messages), messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Messages that were read already, before those that are still to come."""
    waiting = iter(messages)

    async def receive_again() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return receive_again
