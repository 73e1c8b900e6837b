"""The control link: this agent's connection to the orchestrator, kept open for the agent's life.

The node is registered over REST first. Then a WebSocket to the same replica carries the rest: BEATs
keep the node's lease, suspicions go up, terms and questions for signs of life come down. If the
link ends, or the replica falls silent, the agent tries the next replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

from allfold_agent.membership.control_socket import (
    ControlRequests,
    Dial,
    LinkSession,
    Pack,
    Socket,
    dial,
)
from allfold_agent.membership.orchestrator_client import (
    Forgotten,
    OrchestratorClient,
    Pauses,
    all_of,
    outcome,
)
from allfold_agent.membership.registration import NodeRegistration
from allfold_control import messages
from allfold_core.errors import AllfoldError, Evicted, OrchestratorUnreachable, ServiceError
from allfold_core.incident import Incident
from allfold_core.protocol.traffic import Cap
from allfold_core.survival.suspicion import SuspicionKind
from allfold_core.survival.term_record import TermRecord
from allfold_service.credentials import Credentials

log = logging.getLogger(__name__)


class ControlListener(Protocol):
    """The agent, as the control link sees it. All is called in the event loop; nothing may wait."""

    def held(self) -> list[messages.Held]:
        """Return all groups of this node for a registration.

        Each record is that of the newest term that :meth:`term` was given, whether or not it is
        acted upon yet: from here on no term of an earlier generation comes.
        """

    def has_unsaid(self) -> bool:
        """Return True if :meth:`held` has not reported a group that the orchestrator may lack."""

    def registered(self, generation: int, out: Sequence[str]) -> None:
        """A registration was answered: of the groups ``out`` this node is no member any more.

        Suspicions that were made before may be lost, and are to be made again.
        """

    def term(self, generation: int, group: str, record: TermRecord) -> None:
        """Take the term of a group, announced in the generation of the last registration."""

    def evicted(self, how: str) -> None:
        """The node's life is over in all its groups; the registration has a new incarnation.

        Args:
            how: that is known; a phrase to follow the node's name.
        """

    def cleared(self, node: str, incarnation: str, patience: float) -> None:
        """A suspected node lives, and may be silent for this long from now on."""

    def lag(self) -> float:
        """Return by how many seconds the thread is late that reads the links to other agents."""

    def heard(self) -> dict[str, float]:
        """Return the seconds since the last byte of each node that this one has a link to."""

    def progress(self) -> list[messages.Progress]:
        """Return how far each group is, for people."""

    def drain(self, reason: str) -> None:
        """Take no more ranks, and have those of this node leave."""

    def is_draining(self) -> bool:
        """Return True if the node takes no more ranks."""

    def limit(self, caps: Sequence[Cap]) -> None:
        """Keep to these caps from now on, in place of those that were given before."""


class _LifeIsOver(Exception):
    """The orchestrator has evicted this incarnation of the node; says how that is known."""


class ControlLink:
    """Keeps the node registered and linked to one of the orchestrator's replicas.

    :meth:`suspect`, :meth:`withdraw` and :meth:`report` are for any thread, the rest belongs to the
    event loop.
    """

    def __init__(
        self,
        client: OrchestratorClient,
        registration: NodeRegistration,
        listener: ControlListener,
        credentials: Credentials,
        dial: Dial = dial,
    ) -> None:
        self._client = client
        self._dial = dial
        self._registration = registration
        self._listener = listener
        self._credentials = credentials
        self._loop = asyncio.get_running_loop()
        self._session = LinkSession(0, registration.beat_seconds)
        self._socket: Socket | None = None
        self._outgoing: asyncio.Queue[str] | None = None
        self._requests = ControlRequests()
        self._pauses = Pauses()
        self._failures: dict[str, ServiceError] = {}

    def suspect(
        self, node: str, incarnation: str, kind: SuspicionKind, since: float, lag: float
    ) -> None:
        """Suspect another node. It is lost where there is no link, or one that ends just now; when
        :meth:`ControlListener.registered` is called next, it is to be said again.

        Args:
            since: seconds since the suspect was heard.
            lag: by how many seconds this node's own thread is late.
        """
        suspicion = messages.Suspect(
            node=node, incarnation=incarnation, kind=kind, since=since, lag=lag
        )
        self._tell(suspicion)

    def withdraw(self, node: str, incarnation: str, kind: SuspicionKind) -> None:
        """Take a suspicion back: the node was heard, or does its part again."""
        self._tell(messages.Withdraw(node=node, incarnation=incarnation, kind=kind))

    def report(self, found: Incident) -> None:
        """Tell of an incident; lost where there is no link, as it is told again while it lasts."""
        self._tell(messages.Told(incident=messages.IncidentReport(**found.to_dict())))

    def _tell(self, message: messages.Up) -> None:
        self._loop.call_soon_threadsafe(self._send, messages.dump(message))

    def opened(self) -> None:
        """A group was opened: register again if the orchestrator may not know of it.

        If there is no link, or an answer is still due, the agent registers again later anyway.
        """
        is_due = self._outgoing is not None and self._session.is_registered
        if is_due and self._listener.has_unsaid():
            log.info("a group has opened that the store may lack: registering again")
            self._register()

    @property
    def is_open(self) -> bool:
        """True while there is a link, though it may have broken just now."""
        return self._outgoing is not None

    async def ask(self, pack: Pack, deadline: float, grace: float = 0.0) -> dict[str, Any]:
        """Send a request and return its answer; where the link ends before, on the next one.

        Args:
            pack: makes its message, with the number that it is given.
            deadline: until which it is waited for a link (monotonic).
            grace: seconds behind the deadline, for an answer that is on its way.

        Raises:
            Forgotten: the orchestrator does not know what it was asked about.
            ServiceError: no answer in time.
            AllfoldError: the orchestrator's refusal.
        """
        number, answer = self._requests.begin(pack)
        try:
            self._send(pack(number))
            await asyncio.wait([answer], timeout=max(0.0, deadline - monotonic()))
            if self.is_open:
                await asyncio.wait([answer], timeout=grace)
            if not answer.done():
                raise self._registration.unanswered()
            return outcome(self._client.url, answer.result().status, answer.result().body)
        finally:
            self._requests.end(number)

    async def keep(self) -> None:
        """Register and link until cancelled; every failure is tried again.

        An open link stays open when this is cancelled: a node says goodbye before it hangs up.
        """
        try:
            await self._keep()
        finally:
            self._requests.fail(ServiceError("this node agent ends"))

    async def _keep(self) -> None:
        while True:
            try:
                await self._registration.enter()
                await self._link(self._client.url)
            except Forgotten as error:
                self._registration.forgotten(str(error))
            except _LifeIsOver as error:
                self._begin_new_life(str(error))
            except Evicted as error:  # in answer to the registration
                self._begin_new_life(str(error.details.get("how", "was evicted")))
            except AllfoldError as error:
                self._registration.hindered(error)
            except Exception as error:  # noqa: BLE001 - it is logged
                # Nobody foresaw it, but without a link the node and its ranks would be lost.
                failure = ServiceError(f"the control link failed: {error!r}")
                self._registration.hindered(failure, error)
            await asyncio.sleep(self._pauses.draw())

    async def close(self) -> None:
        """Hang up, after :meth:`keep` was cancelled."""
        if self._socket is not None:
            await self._socket.close()

    def _begin_new_life(self, how: str) -> None:
        log.warning(
            "node %s was evicted, as it %s: its groups go on without it, and its ranks get an "
            "error; it registers again as a new incarnation, so that new ranks can join",
            self._registration.node,
            how,
        )
        self._registration.renew()
        self._listener.evicted(how)

    # One connection

    async def _link(self, url: str) -> None:
        """Open a link and serve it until it ends, which is always an error."""
        try:
            self._socket = await self._dial(url, self._registration.node, self._credentials)
            await self._serve(self._socket)
        except ServiceError as error:
            self._client.move_on(url)
            self._failures[url] = error
            raise all_of([*self._failures.values()]) from error

    async def _serve(self, socket: Socket) -> None:
        self._session = LinkSession(self._session.generation, self._registration.beat_seconds)
        self._outgoing = asyncio.Queue()
        sending = asyncio.create_task(_send_all(socket, self._outgoing))
        try:
            self._register()
            for request in self._requests.messages():
                self._send(request)
            while True:
                if self._loop.time() >= self._session.due:
                    self._beat(socket.url)
                try:
                    async with asyncio.timeout_at(self._session.due):
                        text = await socket.receive()
                except TimeoutError:
                    continue
                self._take(socket.url, _parsed(socket.url, text))
        except Exception:
            self._socket = None
            socket.abort()
            raise
        finally:
            self._outgoing = None
            sending.cancel()
            await asyncio.wait([sending])

    def _send(self, text: str) -> None:
        if self._outgoing is not None:
            self._outgoing.put_nowait(text)

    def _register(self) -> None:
        """Say what the node holds. What :meth:`_take` gives the listener next is newer."""
        self._session.registers(self._loop.time())
        request = messages.Register(
            generation=self._session.generation,
            incarnation=self._registration.incarnation,
            groups=self._listener.held(),
        )
        self._send(messages.dump(request))

    def _beat(self, url: str) -> None:
        """Send a BEAT.

        Raises:
            OrchestratorUnreachable: the last ones were not answered, or the registration.
        """
        now = self._loop.time()
        if self._session.is_silent(now):
            raise OrchestratorUnreachable(
                f"the orchestrator at {url} does not answer on the control link"
            )
        listener = self._listener
        beat = messages.Beat(
            number=self._session.beat(now),
            lag=listener.lag(),
            heard=listener.heard(),
            progress=listener.progress(),
            draining=listener.is_draining(),
        )
        self._send(messages.dump(beat))

    def _take(self, url: str, message: messages.Down) -> None:
        match message:
            case messages.Registered():
                self._on_registered(url, message)
            case messages.BeatAnswered():
                self._session.answered(message.number)
                if message.limits is not None:
                    self._listener.limit([Cap.from_dict(each) for each in message.limits])
                self._pauses.reset()
            case messages.TermAnnounced():
                if self._session.takes_term_of(message.generation):
                    self._listener.term(message.generation, message.group, message.record)
            case messages.Probe():
                answer = messages.Alive(nonce=message.nonce, lag=self._listener.lag())
                self._send(messages.dump(answer))
            case messages.PingFor():
                self._session.wants_extra_beat(self._loop.time())
            case messages.Cleared():
                self._listener.cleared(message.node, message.incarnation, message.patience)
            case messages.Drain():
                self._listener.drain("an operator drains it")
            case messages.Answer():
                self._requests.answered(message)
            case messages.Recall():
                log.info("the orchestrator asks what this agent holds: registering again")
                self._register()

    def _on_registered(self, url: str, answer: messages.Registered) -> None:
        if answer.is_evicted:
            raise _LifeIsOver(answer.how)
        self._session.registered(answer.generation, self._loop.time())
        self._failures.clear()
        self._registration.linked(url)
        if self._session.is_registered:  # else what was said last is still on its way
            self._listener.registered(answer.generation, answer.out)
            self.opened()  # perhaps since it was said what the node holds


async def _send_all(socket: Socket, outgoing: asyncio.Queue[str]) -> None:
    while True:
        await socket.send(await outgoing.get())


def _parsed(url: str, text: str | bytes) -> messages.Down:
    try:
        return messages.from_orchestrator(text)
    except (TypeError, ValueError) as error:
        raise OrchestratorUnreachable(
            f"a message of the orchestrator at {url} cannot be read: {error}; agents and "
            "orchestrator should have the same version"
        ) from error
