"""The control links of some agents, each of which beats as fast as it is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.scale.cluster import GROUP, ImaginaryCluster
from benchmarks.scale.http_load import ANSWER_SECONDS, Answer, Load

LINKS = 64
BEATS = 50
"""Of each link."""
NEIGHBOURS = 16
"""As many others each agent says to have heard."""

OK = 200


class Beats:
    """Links of the first nodes of a cluster, to the replicas in turn."""

    def __init__(self, cluster: ImaginaryCluster, addresses: Sequence[str]) -> None:
        self._cluster = cluster
        self._addresses = addresses
        self._links: list[ClientConnection] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open the links; each agent registers, and hears of the term of its group."""
        for index in range(min(LINKS, self._cluster.nodes)):
            node = self._cluster.node(index)
            address = self._addresses[index % len(self._addresses)]
            opened = connect(
                f"ws://{address}/v1/nodes/{node['node']}/link",
                ping_interval=None,
                compression=None,
                max_size=None,
            )
            link = await self._stack.enter_async_context(opened)
            self._links.append(link)
            await _send(link, "register", generation=0, incarnation=node["incarnation"], groups=[])
            await _receive(link, '"type":"registered"')
            await _receive(link, '"type":"term"')
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> Load:
        """Beat on all links at once."""
        load = Load(perf_counter())
        async with asyncio.TaskGroup() as group:
            for index, link in enumerate(self._links):
                group.create_task(self._beat(index, link, load))
        return load

    async def _beat(self, index: int, link: ClientConnection, load: Load) -> None:
        nodes = self._cluster.nodes
        neighbours = (self._cluster.node((index + 1 + step) % nodes) for step in range(NEIGHBOURS))
        heard = {each["node"]: 0.1 for each in neighbours}
        progress = [{"group": GROUP, "epoch": 1, "last_seq": 7, "in_flight": 1}]
        for number in range(BEATS):
            begun = perf_counter()
            await _send(link, "beat", number=number, heard=heard, progress=progress)
            text = await _receive(link, '"type":"beat"')
            load.answers.append(Answer(OK, len(text), begun, perf_counter()))


async def _send(link: ClientConnection, kind: str, **fields: Any) -> None:
    await link.send(json.dumps({"schema": 1, "type": kind, **fields}))


async def _receive(link: ClientConnection, kind: str) -> str:
    """Return the next message of a kind. A term of many nodes is megabytes: only heads are read."""
    async with asyncio.timeout(ANSWER_SECONDS):
        while True:
            text = await link.recv(decode=True)
            if kind in text[:100]:
                return text
