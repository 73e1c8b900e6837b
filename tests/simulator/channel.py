"""The way from an agent to the replicas: requests over REST, and control links."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from allfold_agent.membership import control_socket
from allfold_agent.membership.orchestrator_client import OrchestratorClient, outcome
from allfold_core.errors import OrchestratorUnreachable
from allfold_service.credentials import Credentials
from tests.simulator.network import Network
from tests.support.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulator.world import World

OPEN_SECONDS = 3.0
ABNORMAL = 1006


class Channel:
    """One connection of an agent to a replica, and what is on its way in both directions."""

    def __init__(self, network: Network, agent: Process, replica: Process) -> None:
        self.agent, self.replica = agent, replica
        self.up: asyncio.Queue[str | Close] = asyncio.Queue()
        self.down: asyncio.Queue[str | Close] = asyncio.Queue()
        self._network = network
        self._is_over = False

    def send_up(self, item: str | Close) -> None:
        """Send something to the replica."""
        if not self._is_over:
            self._network.post(self.agent, self.replica, self.up.put_nowait, item)

    def send_down(self, item: str | Close) -> None:
        """Send something to the agent."""
        if not self._is_over:
            self._network.post(self.replica, self.agent, self.down.put_nowait, item)

    def close_up(self) -> None:
        """End the connection, as the agent."""
        self.send_up(Close(ABNORMAL, ""))
        self._is_over = True

    def close_down(self, code: int, reason: str) -> None:
        """End it, as the replica."""
        self.send_down(Close(code, reason))
        self._is_over = True

    def end_of(self, dead: Process) -> bool:
        """Tell the other end that a process is dead, if it had one end; return False if not."""
        if dead is self.agent:
            self.close_up()
        elif dead is self.replica:
            self.close_down(ABNORMAL, "")
        return not self._is_over


class Socket:
    """The agent's end of a control link."""

    def __init__(self, url: str, channel: Channel) -> None:
        self.url = url
        self._channel = channel

    async def send(self, text: str) -> None:
        """Send a message; it is lost where the connection has ended."""
        self._channel.send_up(text)

    async def receive(self) -> str:
        """Return the next message; raises the error with which the connection has ended."""
        item = await self._channel.down.get()
        if not isinstance(item, str):
            closed = ConnectionClosedError(item, None)
            raise control_socket._end_of_link(self.url, closed) from closed
        return item

    async def close(self) -> None:
        """End it."""
        self._channel.close_up()

    def abort(self) -> None:
        """End it."""
        self._channel.close_up()


class Client(OrchestratorClient):
    """An agent's requests to the replicas, and its control links to them."""

    def __init__(self, world: World, process: Process, urls: list[str]) -> None:
        self.urls = urls
        self.url = urls[0]
        self._world = world
        self._process = process

    async def _ask(
        self, url: str, method: str, path: str, request: dict[str, Any]
    ) -> dict[str, Any]:
        replica, seconds = self._world.replicas[url], float(request["timeout"].read)
        network = self._world.network
        if not replica.process.lives and network.joins(self._process.host, replica.name):
            await asyncio.sleep(network.delay(self._process.host, replica.name))
            raise OrchestratorUnreachable(f"the orchestrator at {url} refuses connections")
        try:
            status, body = await network.request(
                self._process,
                replica.process,
                lambda: replica.rest(method, path, request),
                seconds,
            )
        except TimeoutError:
            raise OrchestratorUnreachable(f"the orchestrator at {url} does not answer") from None
        return outcome(url, status, body, f"{method} {path}")

    async def dial(self, url: str, node: str, _: Credentials) -> Socket:
        """Open a control link."""
        replica, network = self._world.replicas[url], self._world.network
        if not replica.process.lives and network.joins(self._process.host, replica.name):
            await asyncio.sleep(network.delay(self._process.host, replica.name))
            raise OrchestratorUnreachable(f"the orchestrator at {url} opens no control link")
        channel = Channel(network, self._process, replica.process)

        async def accept() -> None:
            self._world.channels.append(channel)
            replica.process.spawn(replica.serve(channel, node))

        try:
            await network.request(self._process, replica.process, accept, OPEN_SECONDS)
        except TimeoutError:
            channel.close_up()
            raise OrchestratorUnreachable(f"{url} opens no control link in time") from None
        return Socket(url, channel)
