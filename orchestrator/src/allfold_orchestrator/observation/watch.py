"""One look at everything per second, shared by all who watch; none while nobody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

from allfold_core.errors import LocalError, ServiceError
from allfold_orchestrator.bodies import MAX_PAGE
from allfold_orchestrator.observation.agents import AgentAnswer, Agents
from allfold_orchestrator.observation.overview import OverviewFacts, Picture, picture
from allfold_orchestrator.observation.series import Series
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.failures import Refusal
from allfold_service.credentials import Credentials

PERIOD_SECONDS = 1.0
FRESH_SECONDS = 0.7
FORGET_SECONDS = 30.0
"""After so long without anybody who watches, the series are dropped."""

MAX_WATCHERS = 64
MAX_INCIDENTS = 100

Json = dict[str, Any]


class Watch:
    """The current picture, made when it is asked for.

    Nothing is kept that another replica would miss: a picture is of the store and of what the
    agents answer, who keep the history themselves.
    """

    def __init__(self, orchestrator: Orchestrator, credentials: Credentials) -> None:
        self._orchestrator = orchestrator
        self._credentials = credentials
        self._agents: Agents | None = None
        self._series = Series()
        self._picture: Picture | None = None
        self._looked_at = 0.0  # monotonic
        self._look: asyncio.Task[Picture] | None = None
        self._stopping = asyncio.Event()
        self._watchers = 0

    async def overview(self, since: float) -> Json:
        """Return the picture, at most a second old, with the points of its groups after ``since``.

        Raises:
            ServiceError: the store does not answer.
        """
        now = time.monotonic()
        if self._picture is None or now - self._looked_at > FRESH_SECONDS:
            if now - self._looked_at > FORGET_SECONDS:
                self._series = Series()
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self._take(), name="overview")
            # Shielded: it is for all who wait, and one of them may go away.
            self._picture = await asyncio.shield(self._look)
        return self._picture.to_dict(self._series, since)

    def check_has_place(self) -> None:
        """Raise ``Refusal`` (503) if as many watch as may."""
        if self._watchers < MAX_WATCHERS:
            return
        error = LocalError(
            f"{MAX_WATCHERS} pages watch this orchestrator already, which is the most; close one, "
            "or ask /v1/overview now and then",
            limit=MAX_WATCHERS,
        )
        raise Refusal(503, error)

    async def overviews(self, since: float) -> AsyncGenerator[Json | ServiceError]:
        """Yield the picture once a second until the process is to end; errors in its place."""
        self._watchers += 1
        try:
            while not self._stopping.is_set():
                try:
                    found = await self.overview(since)
                except ServiceError as error:
                    yield error
                else:
                    yield found
                    since = max([since, *_times(found)])
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), PERIOD_SECONDS)
        finally:
            self._watchers -= 1

    def stop(self) -> None:
        """End the wait of all who watch."""
        self._stopping.set()

    async def close(self) -> None:
        """Close the connections to the agents."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait([self._look])
        if self._agents is not None:
            await self._agents.close()

    async def _take(self) -> Picture:
        if self._agents is None:
            self._agents = Agents(self._credentials)
        nodes, groups, incidents = await asyncio.gather(
            self._orchestrator.nodes("", MAX_PAGE),
            self._orchestrator.groups("", MAX_PAGE),
            self._orchestrator.incidents.latest(MAX_INCIDENTS),
        )
        urls = {each.node: each.control_url for each in nodes.nodes if each.state != "gone"}
        now = time.time()
        answers = await self._agents.ask(urls, lambda node: self._series.since(node, now))
        await self._agents.ask_flights(_one_of_each_group(answers, urls), answers)
        self._take_histories(answers)
        facts = OverviewFacts(
            at=time.time(),
            nodes=[each.model_dump() for each in nodes.nodes],
            groups=[each.model_dump() for each in groups.groups],
            answers=answers,
            incidents=incidents,
            is_complete=nodes.next is None and groups.next is None,
        )
        made = picture(facts, self._series)
        self._looked_at = time.monotonic()
        return made

    def _take_histories(self, answers: dict[str, AgentAnswer]) -> None:
        for node, answer in answers.items():
            if answer.history is not None:
                self._series.take(node, answer.history, answer.received)
        self._series.settle(time.time())


def _times(found: Json) -> Iterator[float]:
    """Yield the time of every point."""
    for group in found["groups"]:
        for point in group["series"]:
            yield point["at"]


def _one_of_each_group(answers: dict[str, AgentAnswer], urls: dict[str, str]) -> dict[str, str]:
    """Return a node of each group, with its control port: each op is on all nodes."""
    chosen: dict[str, str] = {}
    covered: set[tuple[str, int]] = set()
    for node, answer in answers.items():
        groups = answer.status["groups"] if answer.status else ()
        keys = {(group["name"], group["opening"]) for group in groups}
        if keys - covered:
            chosen[node] = urls[node]
            covered |= keys
    return chosen
