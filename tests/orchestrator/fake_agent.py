"""A scripted agent on a real WebSocket, and an orchestrator that serves it on a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol, Self

import httpx
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from allfold_orchestrator.http.app import create_app, web_sockets
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.store import Store
from allfold_service.addresses import bind
from allfold_service.server import address_of
from tests.support.http_server import Server, serving
from tests.support.waiting import DEADLINE_SECONDS, until, within

Json = dict[str, Any]
SECONDS = DEADLINE_SECONDS
BEAT_SECONDS = 0.1
REDIAL_SECONDS = 0.05


class Replica:
    """One orchestrator with a port."""

    def __init__(self, address: str, app: Any) -> None:
        self.address = address
        self.links = app.state.links
        self.sweeper = app.state.sweeper
        self.store: Store = app.state.store
        self.http = httpx.AsyncClient(base_url=f"http://{address}", timeout=SECONDS)

    async def group(self, name: str = "train") -> Json:
        view: Json = (await self.http.get(f"/v1/groups/{name}")).json()
        return view

    async def nodes(self) -> list[Json]:
        answer: Json = (await self.http.get("/v1/nodes")).json()
        nodes: list[Json] = answer["nodes"]
        return nodes


@asynccontextmanager
async def replica(store: Store, **settings: Any) -> AsyncIterator[Replica]:
    """Serve the orchestrator on this store until the end of the block."""
    app = create_app(Settings(**{"lease_seconds": 60, **settings}), store)
    with bind("127.0.0.1:0", "") as sock:
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, **web_sockets())
        async with serving(Server(config), sock):
            served = Replica(address_of(sock), app)
            try:
                yield served
            finally:
                await served.http.aclose()


class Served(Protocol):
    """An orchestrator that an agent can reach."""

    @property
    def address(self) -> str: ...
    @property
    def http(self) -> httpx.AsyncClient: ...


class FakeAgent:
    """An agent: its control port, its link, and the messages that came down on it."""

    def __init__(self, name: str, at: Served) -> None:
        self.name = name
        self.at = at
        self.incarnation = "1"
        self.messages: list[Json] = []
        self.held: dict[str, Json] = {}
        self.heard: dict[str, float] = {}
        self.generation = 0
        self.is_mute = False  # on the link
        self.is_stopped = False
        self._is_dead = False
        self.control_is_silent = False
        self.beats_rarely = False
        self.draining = False
        self.beats = 0
        self._control: asyncio.Server
        self._socket: ClientConnection
        self._sockets: list[ClientConnection] = []  # also those of links before
        self._tasks: list[asyncio.Task[None]] = []
        self._dialled: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._control = await asyncio.start_server(self._on_dial, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        for _turn in range(3):  # of the event loop: what was accepted just now is closed in them
            await asyncio.sleep(0)

    @property
    def control_url(self) -> str:
        host, port = self._control.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def _on_dial(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_dead:
            writer.transport.abort()
            return
        self._dialled.append(writer)
        if not self.is_stopped and not self.control_is_silent:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()

    @property
    def registration(self) -> Json:
        return {
            "node": self.name,
            "incarnation": self.incarnation,
            "control_url": self.control_url,
            "data_address": f"{self.name}:7402",
        }

    async def register(self) -> None:
        """Register the node, as agents do before they link."""
        (await self.at.http.post("/v1/nodes", json=self.registration)).raise_for_status()

    async def plan(self, session: str, group: str = "train") -> Json:
        """Return what a question for the plan is answered at once."""
        query: dict[str, str | int] = {"epoch": 1, "session": session}
        answer = await self.at.http.get(f"/v1/groups/{group}/plan", params=query)
        plan: Json = answer.raise_for_status().json()
        return plan

    async def join(self, rank: int, of: int, group: str = "train", session: str = "") -> None:
        body = {
            "rank": rank,
            "node": self.name,
            "incarnation": self.incarnation,
            "session": session or f"s{rank}",
            "world_size": of,
            "timeout": 30.0,
        }
        (await self.at.http.post(f"/v1/groups/{group}/ranks", json=body)).raise_for_status()

    async def link(self, token: str | None = None) -> None:
        """Open the link, register on it and begin to beat."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"ws://{self.at.address}/v1/nodes/{self.name}/link"
        self._socket = await connect(url, additional_headers=headers, ping_interval=None)
        self._sockets.append(self._socket)
        self._end_tasks()
        await self.say_what_it_holds()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def stay_linked(self) -> None:
        """Register and link, and do so anew whenever the link ends, until cancelled."""
        while True:
            # A client of a replica that has ended says RuntimeError.
            with suppress(httpx.HTTPError, OSError, WebSocketException, RuntimeError):
                await self.register()
                await self.link()
                await self._socket.wait_closed()
            await asyncio.sleep(REDIAL_SECONDS)

    async def say_what_it_holds(self) -> None:
        groups = [{"group": name, "record": record} for name, record in self.held.items()]
        await self.send(
            "register", generation=self.generation, incarnation=self.incarnation, groups=groups
        )

    async def send(self, kind: str, /, **fields: Any) -> None:
        await self._socket.send(json.dumps({"schema": 1, "type": kind, **fields}))

    async def suspect(self, other: FakeAgent, kind: str = "silent", **said: float) -> None:
        fields = {"node": other.name, "incarnation": other.incarnation, "kind": kind}
        await self.send("suspect", **fields, **said)

    async def _read(self) -> None:
        with suppress(ConnectionClosed):
            async for text in self._socket:
                if not self.is_stopped and not self.is_mute:
                    await self._take(json.loads(text))

    async def _take(self, message: Json) -> None:
        self.messages.append(message)
        match message["type"]:
            case "registered":
                self.generation = message["generation"]
            case "recall":
                await self.say_what_it_holds()
            case "probe":
                await self.send("alive", nonce=message["nonce"], lag=0.0)
            case "drain":
                self.draining = True
            case "term" if message["generation"] == self.generation:
                self.held[message["group"]] = message["record"]

    async def _beat(self) -> None:
        self.beats = 0
        with suppress(ConnectionClosed):
            while True:
                if not self.is_stopped and not self.is_mute:
                    self.beats += 1
                    progress = [
                        {"group": name, "epoch": held["epoch"], "last_seq": -1, "in_flight": 0}
                        for name, held in self.held.items()
                    ]
                    said = {"heard": self.heard, "draining": self.draining, "progress": progress}
                    await self.send("beat", number=self.beats, **said)
                await asyncio.sleep(2.0 if self.beats_rarely else BEAT_SECONDS)

    def received(self, kind: str) -> list[Json]:
        return [message for message in self.messages if message["type"] == kind]

    async def hears(self, kind: str, /, **fields: Any) -> Json:
        """Return the first message of this kind with these fields, as soon as it is there."""

        def found() -> list[Json]:
            return [m for m in self.received(kind) if fields.items() <= m.items()]

        await until(found, f"{self.name} hears {kind} {fields}: {self.messages}")
        return found()[0]

    async def holds(self, *voters: str, group: str = "train") -> Json:
        """Return the record of the group's term once the agent holds one of these voters."""

        def has() -> bool:
            record = self.held.get(group)
            return record is not None and record["term"]["voters"] == list(voters)

        await until(has, f"{self.name} holds a term of {voters}: {self.messages}")
        return self.held[group]

    async def closed(self) -> tuple[int, str]:
        """Return the code and the reason with which the orchestrator closes the link."""
        await within(SECONDS, self._socket.wait_closed())
        return self._socket.close_code or 0, self._socket.close_reason or ""

    async def die(self) -> None:
        """End as after SIGKILL: no connection stays, and new ones are refused."""
        self._is_dead = True
        self._control.close()
        for writer in self._dialled:
            writer.transport.abort()
        self._end_tasks()
        for socket in self._sockets:
            socket.transport.abort()


async def agents(
    stack: AsyncExitStack, at: Served | Sequence[Served], names: str, group: str = "train"
) -> list[FakeAgent]:
    """Linked agents in one group, a rank each; where there are several replicas, in turn."""
    replicas = at if isinstance(at, Sequence) else [at]
    made = []
    for number, name in enumerate(names):
        agent = await stack.enter_async_context(FakeAgent(name, replicas[number % len(replicas)]))
        await agent.register()
        await agent.link()
        await agent.hears("registered")
        made.append(agent)
    for rank, agent in enumerate(made):
        await agent.join(rank, len(made), group)
    for agent in made:
        await agent.holds(*names, group=group)
    return made
