"""One replica of the orchestrator: the real service, control links, detector and sweeper."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from starlette.websockets import WebSocket, WebSocketDisconnect

from allfold_core.errors import AllfoldError, LocalError
from allfold_core.schema import MESSAGE
from allfold_orchestrator import bodies
from allfold_orchestrator.http import link_route
from allfold_orchestrator.http.plan_bodies import PlanBodies
from allfold_orchestrator.links.control_links import ControlLinks
from allfold_orchestrator.links.dial import DIAL_SECONDS, Dialled
from allfold_orchestrator.membership.group_state import Leave, LinkSettings, Reason
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.failures import Refusal
from allfold_orchestrator.store.redis_client import Client as RedisClient
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import Sweeper
from allfold_service.answers import Answer
from tests.simulator.store import Client
from tests.support.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulator.channel import Channel
    from tests.simulator.world import World

LEASE_SECONDS, BEAT_SECONDS = 5.0, 0.5


class Replica:
    """One life of a replica."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.url = f"http://{name}:7400"
        self.process = Process(world.loop, f"orchestrator {name}", name)
        self._world = world
        client = cast(RedisClient, Client(self.process, world.server))
        self.store = Store(client, LEASE_SECONDS)
        self.orchestrator = Orchestrator(self.store, LinkSettings())
        self.links = ControlLinks(self.store, self.orchestrator, self._dial)
        self._sweeper = Sweeper(self.store, self.orchestrator, self.links.doubt)
        lease = bodies.Lease(lease_seconds=LEASE_SECONDS, heartbeat_seconds=BEAT_SECONDS)
        state = {"links": self.links, "orchestrator": self.orchestrator, "lease": lease}
        self._app = SimpleNamespace(state=SimpleNamespace(plan_bodies=PlanBodies(), **state))
        self._lease = lease
        self.process.spawn(self._run())

    async def _run(self) -> None:
        await self.store.start()
        await asyncio.gather(self._sweeper.run(), self.links.run())

    async def _dial(self, url: str) -> Dialled:
        """Look whether the process at an agent's control port answers."""
        network, agent = self._world.network, self._world.agents.get(_host(url))
        host = _host(url)
        if not network.joins(self.name, host):
            await asyncio.sleep(DIAL_SECONDS)
            return Dialled.SILENT
        await asyncio.sleep(network.delay(self.name, host))
        if agent is None or not agent.process.lives:
            return Dialled.REFUSED

        async def answer() -> Dialled:
            return Dialled.ANSWERED

        try:
            return await network.request(self.process, agent.process, answer, DIAL_SECONDS)
        except TimeoutError:
            return Dialled.SILENT

    async def serve(self, channel: Channel, node: str) -> None:
        """Serve the control link of an agent."""
        await link_route.link(cast(WebSocket, _Socket(channel, self._app)), node)

    async def rest(self, method: str, path: str, request: dict[str, Any]) -> tuple[int, Any]:
        """Answer a request, with its status."""
        try:
            answer = await self._answer(method, path.split("/")[2:], request)
        except Refusal as refusal:
            return refusal.status, MESSAGE.stamp({"error": refusal.error.to_dict()})
        except AllfoldError as error:
            return error.status, MESSAGE.stamp({"error": error.to_dict()})
        return 200, answer.model_dump()

    async def _answer(self, method: str, path: list[str], request: dict[str, Any]) -> Answer:
        match method, path:
            case "POST", ["nodes"]:
                body = bodies.RegisterNode.model_validate(request["json"])
                peers = await self.orchestrator.register_node(body)
                return self._lease.model_copy(update={"peers": peers})
            case "DELETE", ["nodes", node]:
                await self.orchestrator.remove_node(node, request["params"]["incarnation"])
            case "DELETE", ["groups", group, "ranks", rank]:
                said = request["params"]
                reason, ended = Reason(said["reason"]), said["ended"]
                was_joining = said["was_joining"]
                leave = Leave(int(rank), said["session"], reason, ended, was_joining=was_joining)
                await self.orchestrator.leave(group, leave)
            case _:
                raise LocalError(f"no such request: {method} {path}")
        return bodies.Empty()


def _host(url: str) -> str:
    return url.removeprefix("http://").partition(":")[0]


class _Socket:
    """The replica's end of a control link, as the route sees it."""

    def __init__(self, channel: Channel, app: object) -> None:
        self.app = app
        self._channel = channel

    async def accept(self) -> None:
        return

    async def receive_text(self) -> str:
        item = await self._channel.up.get()
        if not isinstance(item, str):
            raise WebSocketDisconnect(item.code)
        return item

    async def send_text(self, text: str) -> None:
        self._channel.send_down(text)

    async def close(self, code: int, reason: str) -> None:
        self._channel.close_down(code, reason)
