"""The connection of a control link: its WebSocket, its due times, and requests that wait on it."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from allfold_agent.membership.orchestrator_client import Forgotten
from allfold_control.messages import Answer
from allfold_core.errors import AllfoldError, LocalError, OrchestratorUnreachable, ServiceError
from allfold_service.credentials import Credentials
from allfold_service.tls import TlsIdentity

_OPEN_SECONDS = 3.0
_CLOSE_SECONDS = 1.0
# A term of thousands of nodes, with all their ranks.
_MAX_BYTES = 64 << 20
# The orchestrator does not know the node; it cannot do its work at the moment (RFC 6455).
_UNKNOWN, _RESTART = 4404, 1012
_UNAUTHORIZED = 401


class _Connect(connect):
    """Follows no redirect, which would take the token to somebody else."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class Socket(Protocol):
    """A connection to the orchestrator at ``url``; see ``ControlSocket``."""

    url: str

    async def send(self, text: str) -> None: ...
    async def receive(self) -> str | bytes: ...
    async def close(self) -> None: ...
    def abort(self) -> None: ...


Dial = Callable[[str, str, Credentials], Awaitable[Socket]]
"""Opens the control link of a node to the orchestrator at a URL."""


class ControlSocket:
    """One connection to the orchestrator at ``url``."""

    def __init__(self, url: str, connection: ClientConnection) -> None:
        self.url = url
        self._connection = connection

    async def send(self, text: str) -> None:
        """Send a message; one that the connection does not take any more is lost with it."""
        try:
            await self._connection.send(text)
        except ConnectionClosed:
            return  # `receive` tells

    async def receive(self) -> str | bytes:
        """Return the next message.

        Raises:
            Forgotten: the orchestrator has ended the link, as it does not know the node.
            ServiceError: it has no store at the moment, or the connection has ended.
        """
        try:
            return await self._connection.recv()
        except ConnectionClosed as error:
            raise _end_of_link(self.url, error) from error

    async def close(self) -> None:
        """End the connection in order, or after a second in any case."""
        await self._connection.close()

    def abort(self) -> None:
        """End the connection without waiting for the other end."""
        self._connection.transport.abort()


async def dial(url: str, node: str, credentials: Credentials) -> ControlSocket:
    """Open the control link of a node.

    Raises:
        LocalError: the orchestrator refuses the token.
        OrchestratorUnreachable: nobody answers there, or nobody who has control links.
    """
    try:
        connection = await _Connect(
            f"ws{url.removeprefix('http')}/v1/nodes/{node}/link",
            additional_headers=credentials.tokens.headers(),
            ssl=_context(url, credentials.tls),
            # A proxy of the environment is not meant for the services of one job.
            proxy=None,
            compression=None,
            ping_interval=None,  # BEATs say more
            open_timeout=_OPEN_SECONDS,
            close_timeout=_CLOSE_SECONDS,
            max_size=_MAX_BYTES,
        )
    except InvalidStatus as error:
        if error.response.status_code == _UNAUTHORIZED:
            raise LocalError(
                f"the orchestrator at {url} refuses the join token of this agent",
                http_status=_UNAUTHORIZED,
            ) from error
        raise OrchestratorUnreachable(
            f"{url} answered {error.response.status_code} to the control link of node {node}: is "
            "this an Allfold orchestrator? What is between has to let WebSockets pass."
        ) from error
    except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
        reason = str(error) or type(error).__name__
        raise OrchestratorUnreachable(
            f"the orchestrator at {url} opens no control link: {reason}"
        ) from error
    return ControlSocket(url, connection)


def _context(url: str, tls: TlsIdentity | None) -> ssl.SSLContext | None:
    """Return the context for a URL: for https without a certificate of our own, the library's."""
    return tls.client if tls is not None and url.startswith("https:") else None


def _end_of_link(url: str, closed: ConnectionClosed) -> AllfoldError | Forgotten:
    code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (None, "")
    if code == _UNKNOWN:
        return Forgotten(reason or "the orchestrator does not know this node")
    if code == _RESTART:
        return ServiceError(reason or f"the orchestrator at {url} cannot serve at the moment")
    return OrchestratorUnreachable(
        f"the control link to the orchestrator at {url} has ended: {reason or closed}"
    )


Pack = Callable[[int], str]
"""Makes the message of a request with its number, whenever it is sent."""


class ControlRequests:
    """The requests that have no answer yet. They outlive a link: the next one carries them again.

    So only what can be repeated is asked here.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, tuple[Pack, asyncio.Future[Answer]]] = {}

    def begin(self, pack: Pack) -> tuple[int, asyncio.Future[Answer]]:
        """Return the number of a new request, and its answer to be."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = pack, answer
        return number, answer

    def end(self, number: int) -> None:
        """Forget a request that has its answer, or for which nobody waits any more."""
        self._open.pop(number, None)

    def messages(self) -> list[str]:
        """Return the messages of all requests, for a new link."""
        return [pack(number) for number, (pack, _) in self._open.items()]

    def answered(self, answer: Answer) -> None:
        """Hand an answer out."""
        for number in answer.numbers:
            if number in self._open and not self._open[number][1].done():
                self._open[number][1].set_result(answer)

    def fail(self, error: ServiceError) -> None:
        """Fail all requests: there will be no link any more."""
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)


# As many unanswered BEATs as this, and the orchestrator is taken for dead or frozen.
MOST_UNANSWERED = 3
# Other nodes are pinged every 0.1 s: by then the age of one that lives is a fresh one.
EXTRA_BEAT_SECONDS = 0.2
REGISTER_SECONDS = 5.0

_NEVER = float("inf")


class LinkSession:
    """One connection to the orchestrator: its registrations and its BEATs.

    Registering is a promise to take no term that an earlier generation of the store has announced.
    So a term only counts if no registration waits for an answer, and if the term was announced in
    the generation that the last answer named.

    Attributes:
        generation: of the store with which the agent has registered last, here or elsewhere.
        number: of the last BEAT.
        due: when there is something to do: to send a BEAT, unless :meth:`is_silent`.
    """

    def __init__(self, generation: int, beat_seconds: float) -> None:
        self.generation = generation
        self.number = 0
        self._beat_seconds = beat_seconds
        self._pending = 0
        self._answer_due = _NEVER
        self._beat_due = _NEVER
        self._extra_due = _NEVER
        self._unanswered: deque[int] = deque()

    @property
    def due(self) -> float:
        return min(self._answer_due, self._beat_due, self._extra_due)

    @property
    def is_registered(self) -> bool:
        """True while no registration waits for its answer."""
        return self._pending == 0

    def registers(self, now: float) -> None:
        """Note that REGISTER is sent."""
        self._pending += 1
        self._answer_due = min(self._answer_due, now + REGISTER_SECONDS)

    def registered(self, generation: int, now: float) -> None:
        """Note the answer to a REGISTER; with the first one, BEATs begin."""
        self._pending = max(0, self._pending - 1)
        self.generation = generation
        self._answer_due = now + REGISTER_SECONDS if self._pending else _NEVER
        if self._beat_due == _NEVER:
            self._beat_due = now

    def takes_term_of(self, generation: int) -> bool:
        """Return True if a term that was announced in this generation counts."""
        return self.is_registered and generation == self.generation

    def beat(self, now: float) -> int:
        """Note that a BEAT is sent, and return its number."""
        self.number += 1
        if now >= self._beat_due:
            self._beat_due = now + self._beat_seconds
            self._unanswered.append(self.number)
        if now >= self._extra_due:
            self._extra_due = _NEVER
        return self.number

    def answered(self, number: int) -> None:
        """Note the answer to a BEAT."""
        while self._unanswered and self._unanswered[0] <= number:
            self._unanswered.popleft()

    def wants_extra_beat(self, now: float) -> None:
        """Make a BEAT due as soon as another node had the time to answer a ping."""
        self._extra_due = min(self._extra_due, now + EXTRA_BEAT_SECONDS)

    def is_silent(self, now: float) -> bool:
        """Return True if the orchestrator owes answers for too long."""
        return now >= self._answer_due or (
            now >= self._beat_due and len(self._unanswered) >= MOST_UNANSWERED
        )
