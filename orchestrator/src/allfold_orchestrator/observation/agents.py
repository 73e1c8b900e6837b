"""Asking all agents for their status, their history and their latest ops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import httpx

from allfold_core.agent_answers import (
    STATUS,
    FlightAnswer,
    History,
    Question,
    Status,
    flight,
    history,
)
from allfold_core.schema import OtherForm, read_object
from allfold_service.credentials import Credentials

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
ROUND_SECONDS = 3.0
AT_ONCE = 32
MAX_ANSWER_BYTES = 16 << 20

T = TypeVar("T")


@dataclass
class AgentAnswer:
    """The answers of one agent.

    Attributes:
        status: ``None`` if it did not answer.
        history: ``None`` also where its version has another one.
        flight: of agents that were asked for it.
        received: when the history came, in seconds since 1970.
        problem: why there is no status.
    """

    status: Status | None = None
    history: History | None = None
    flight: FlightAnswer | None = None
    received: float = 0.0
    problem: str = ""


class _Failed(Exception):
    """An agent's answer is none; the message says why."""


class Agents:
    """Asks the agents' control ports, with the join token and the certificate."""

    def __init__(self, credentials: Credentials) -> None:
        tls = credentials.tls
        # trust_env: a proxy of the environment is for the internet, not for nodes.
        self._http = httpx.AsyncClient(
            auth=credentials.tokens.sign,
            verify=True if tls is None else tls.client,
            timeout=ANSWER_SECONDS,
            trust_env=False,
            limits=httpx.Limits(max_connections=2 * AT_ONCE, keepalive_expiry=5.0),
        )
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def ask(
        self, urls: Mapping[str, str], since: Callable[[str], float]
    ) -> dict[str, AgentAnswer]:
        """Ask agents, by node name; each answer is there within :data:`ROUND_SECONDS`.

        Args:
            urls: their control ports.
            since: for a node, from when on its history is wanted.
        """
        tasks = {
            node: asyncio.create_task(self._ask(url, since(node))) for node, url in urls.items()
        }
        if not tasks:
            return {}
        try:
            await asyncio.wait(tasks.values(), timeout=ROUND_SECONDS)
        finally:
            for task in tasks.values():
                task.cancel()
        await asyncio.wait(tasks.values())
        return {node: _outcome(task, urls[node]) for node, task in tasks.items()}

    async def ask_flights(
        self, urls: Mapping[str, str], answers: Mapping[str, AgentAnswer]
    ) -> None:
        """Add the latest op of each of their groups to the answers of these nodes."""

        async def ask(node: str, url: str) -> None:
            # One of another version, or just gone: its groups are drawn without an op.
            with suppress(_Failed, OtherForm):
                answers[node].flight = await self._get(url, flight(limit=1))

        await asyncio.gather(*(ask(node, url) for node, url in urls.items()))

    async def _ask(self, url: str, since: float) -> AgentAnswer:
        try:
            async with self._turns:
                answer = AgentAnswer(await self._get(url, STATUS))
                answer.history = await self._history(url, since)
        except (_Failed, OtherForm) as failure:
            return AgentAnswer(problem=str(failure))
        answer.received = time.time()
        return answer

    async def _history(self, url: str, since: float) -> History | None:
        try:
            return await self._get(url, history(since))
        except OtherForm as error:
            log.warning("an agent is charted without its history: %s", error)
            return None

    async def _get(self, agent: str, question: Question[T]) -> T:
        url = agent + question.path
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                self._http.stream("GET", url) as response,
            ):
                body = await _bounded(response)
        except TimeoutError:
            raise _Failed(f"{url} did not answer within {ANSWER_SECONDS:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Failed(f"{url} cannot be reached: {error or type(error).__name__}") from None
        if response.status_code != httpx.codes.OK:
            raise _Failed(f"{url} answered {response.status_code}: {_reason(body)}")
        try:
            answer = read_object(body)
        except ValueError:
            problem = f"{url} is no agent: it answered something else than a JSON object"
            raise _Failed(problem) from None
        return question.read(agent, answer)


async def _bounded(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise _Failed(f"{response.url} answers more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def _reason(body: bytes) -> str:
    """Return the message of an error in the common form, else the beginning of the body."""
    try:
        return str(read_object(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:120].decode(errors="replace")


def _outcome(task: asyncio.Task[AgentAnswer], url: str) -> AgentAnswer:
    if task.cancelled():
        return AgentAnswer(problem=f"{url} could not be asked within {ROUND_SECONDS:g} s")
    return task.result()
