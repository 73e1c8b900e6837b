"""An orchestrator that does what a test says: it notes what it is sent, falls silent, forgets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.websockets import WebSocketDisconnect

from allfold_core.errors import AllfoldError
from allfold_core.schema import MESSAGE
from allfold_orchestrator.http.app import web_sockets
from allfold_service.addresses import bind
from allfold_service.server import address_of
from tests.support.http_server import Server, serving
from tests.support.waiting import until

Json = dict[str, Any]

SILENT = "was silent to b, and gave no sign of life"
"""The way in which the orchestrator learns that a life is over."""


class ScriptedLink:
    """A control link as the orchestrator has it, and what came up on it."""

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.messages: list[Json] = []
        self.is_over = False

    def received(self, kind: str) -> list[Json]:
        return [message for message in self.messages if message["type"] == kind]

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send_text(json.dumps(MESSAGE.stamp({"type": kind, **fields})))

    async def hears(self, kind: str, count: int = 1) -> Json:
        """Return the last message of this kind, once there are as many as this."""
        await until(lambda: len(self.received(kind)) >= count, f"{kind} x {count}: {self.messages}")
        return self.received(kind)[-1]

    async def hears_beats(self, count: int = 3) -> None:
        """Wait for some more BEATs."""
        await self.hears("beat", len(self.received("beat")) + count)


class ScriptedOrchestrator:
    """A registry of nodes with control links.

    Attributes:
        registrations: the bodies of all registrations.
        requests: method and path of all requests.
        links: all control links that were opened, the newest last.
        evicted: the incarnations that are told that their life is over.
        unknown: as many links from now on are told that their node is not registered.
        forgets_seats: as many requests for seats are answered as if the node were unknown.
        seats: the bodies of all joins.
        formation: the answer to a join; without one it gets none.
        refused_joins: the refusal of all joins.
        given_back: group, rank and reason of all seats that were left, over the link or REST.
        ended: with each of those, the opening that all ranks have left; 0 for none.
        was_joining: with each of those, whether its plan may have been on its way.
        is_down: all requests are answered as by a gateway, and links are refused.
        is_silent: nothing is answered on links.
        keeps_registering_waiting: REGISTER alone is not answered.
        link_code: with which links are closed instead of being served.
        refused_links: how many were.
    """

    def __init__(self) -> None:
        self.url = ""
        self.registrations: list[Json] = []
        self.requests: list[tuple[str, str]] = []
        self.seats: list[Json] = []
        self.links: list[ScriptedLink] = []
        self.formation: Json | None = {"ready": False, "missing": [1]}
        self.given_back: list[tuple[str, int, str]] = []
        self.ended: list[int] = []
        self.was_joining: list[bool] = []
        self.peers: list[str] = []
        self.lease_seconds = 5.0
        self.beat_seconds = 0.02
        self.generation = 1
        self.evicted: set[str] = set()
        self.unknown = 0
        self.forgets_seats = 0
        self.is_down = False
        self.is_silent = False
        self.keeps_registering_waiting = False
        self.link_code = 0
        self.refused_links = 0
        self.refusal: AllfoldError | None = None
        self.refused_joins: AllfoldError | None = None

    @property
    def link(self) -> ScriptedLink:
        return self.links[-1]

    @property
    def measured(self) -> list[dict[str, float] | None]:
        """The link measurement in each registration."""
        return [registration["link"] for registration in self.registrations]

    async def is_linked(self, count: int = 1) -> ScriptedLink:
        """Wait for the link of this number, and for a BEAT on it; return it."""
        await until(lambda: len(self.links) >= count, f"there are {count} links")
        link = self.links[count - 1]
        await link.hears("beat")
        return link

    # Served

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.websocket("/v1/nodes/{node}/link")
        async def link(socket: WebSocket, node: str) -> None:
            await self._serve(socket)

        @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def answer(request: Request) -> Response:
            return await self._answer(request)

        return app

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        self.requests.append((request.method, path))
        if self.is_down:
            return HTMLResponse("<html>bad gateway</html>", 502)
        if self.refusal is not None:
            return JSONResponse({"error": self.refusal.to_dict()}, self.refusal.status)
        if path == "/v1/nodes":
            self.registrations.append(await request.json())
            lease = {"lease_seconds": self.lease_seconds, "heartbeat_seconds": self.beat_seconds}
            return JSONResponse({**lease, "peers": self.peers})
        match request.method, path.split("/"):
            case "DELETE", [_, _, "groups", group, "ranks", rank]:
                self.given_back.append((group, int(rank), request.query_params["reason"]))
                self.ended.append(int(request.query_params["ended"]))
                self.was_joining.append(request.query_params["was_joining"] == "true")
        return JSONResponse({})

    async def _serve(self, socket: WebSocket) -> None:
        if self.is_down:
            await socket.close()
            return
        await socket.accept()
        if self.link_code:
            self.refused_links += 1
            await socket.close(self.link_code, "the store cannot be reached")
            return
        link = ScriptedLink(socket)
        self.links.append(link)
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                await self._take(link, json.loads(await socket.receive_text()))
        link.is_over = True

    async def _take(self, link: ScriptedLink, message: Json) -> None:
        link.messages.append(message)
        if self.is_silent:
            return
        if message["type"] == "register" and not self.keeps_registering_waiting:
            await self._registered(link, message["incarnation"])
        elif message["type"] == "beat":
            await link.say("beat", number=message["number"])
        elif message["type"] in ("join", "leave"):
            await self._asked(link, message)

    async def _asked(self, link: ScriptedLink, message: Json) -> None:
        body, status, answer = message["body"], 200, dict[str, Any]()
        if self.forgets_seats:
            self.forgets_seats -= 1
            status, answer = 404, {"error": AllfoldError("who is it?").to_dict()}
        elif message["type"] == "leave":
            self.given_back.append((body["group"], body["rank"], body["reason"]))
            self.ended.append(body["ended"])
            self.was_joining.append(body["was_joining"])
        else:
            self.seats.append(body)
            if self.refused_joins is not None:
                status, answer = 503, {"error": self.refused_joins.to_dict()}
            elif self.formation is None:
                return
            else:
                answer = self.formation
        await link.say("answer", numbers=[message["number"]], status=status, body=answer)

    async def _registered(self, link: ScriptedLink, incarnation: str) -> None:
        if self.unknown:
            self.unknown -= 1
            await link.socket.close(4404, "node a is not registered: POST /v1/nodes comes first")
            return
        gone = incarnation in self.evicted
        said = {"generation": self.generation, "is_evicted": gone, "out": []}
        await link.say("registered", **said, **({"how": SILENT} if gone else {}))
        if gone:
            await link.socket.close(1000, "the link is over")


@asynccontextmanager
async def scripted_orchestrators(count: int = 1) -> AsyncIterator[list[ScriptedOrchestrator]]:
    """Serve some on free ports."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_served()) for _ in range(count)]


@asynccontextmanager
async def _served() -> AsyncIterator[ScriptedOrchestrator]:
    orchestrator = ScriptedOrchestrator()
    with bind("127.0.0.1:0", "") as sock:
        orchestrator.url = f"http://{address_of(sock)}"
        app = orchestrator.app()
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, **web_sockets())
        async with serving(Server(config), sock):
            yield orchestrator
