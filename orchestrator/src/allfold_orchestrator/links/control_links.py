"""All control links of one replica: agents' news go to the failure detector, terms to agents.

Agents may be linked to any replica. A replica hears of every change of a group on the store's
channel, and tells the agents that are linked to it. Before it announces anything, it checks the
generation of the store once more, because an agent takes no term of an earlier generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from allfold_control import messages
from allfold_core.errors import ServiceError
from allfold_core.survival.term_record import Life, TermRecord
from allfold_orchestrator.links.detector_runner import TICK_SECONDS, DetectorRunner, Dial
from allfold_orchestrator.links.dial import dial
from allfold_orchestrator.links.known_terms import KnownTerms
from allfold_orchestrator.links.limits import KnownLimits
from allfold_orchestrator.links.link import Connected, Link
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    LossShown,
    StoreLife,
)
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

LIFE_SECONDS = 1.0
"""The interval at which the store's generation is read, in seconds."""


class UnknownNode(ValueError):
    """A node that the store does not know: it registers first, and then links."""


class LifeIsOver(ValueError):
    """A node that was evicted, or that has another incarnation by now; says how that is known."""


class ControlLinks:
    """The agents that are linked to this replica, and its failure detector."""

    def __init__(self, store: Store, orchestrator: Orchestrator, dial: Dial = dial) -> None:
        self._store = store
        self._orchestrator = orchestrator
        self._links = Connected()
        self._terms = KnownTerms()
        self._generation = 0
        self._changed: set[str] = set()
        self._has_missed = False  # changes of any group
        self._wake = asyncio.Event()
        self._limits = KnownLimits(store, self._wake)
        self._has_failed = False
        self._runner = DetectorRunner(
            store, orchestrator, self._terms, self._links, dial, self._take_up, self._wake
        )
        store.on_change.append(self._hear)
        store.on_probe.append(self._ask)
        store.on_drain.append(lambda life: self._links.send(life, messages.dump(messages.Drain())))

    @property
    def count(self) -> int:
        """The number of agents that are linked to this replica."""
        return len(self._links)

    # Links

    async def open(self, node: str, request: messages.Register) -> Link:
        """Begin a link.

        Raises:
            LifeIsOver: the node was evicted, or has another life by now.
            UnknownNode: it has not registered with this store.
        """
        life = (node, request.incarnation)
        record = await self._store.nodes.get(node)
        if record is None:
            raise UnknownNode(f"node {node} is not registered: POST /v1/nodes comes first")
        if not record.is_alive_as(request.incarnation):
            raise LifeIsOver(record.end_of(request.incarnation))
        link = Link(life)
        earlier = self._links.get(life)
        if earlier is not None:
            earlier.close()
        self._links[life] = link
        self._runner.execute(self._runner.detector.linked(monotonic(), life))
        self._runner.reach(life, record.info.control_url)
        try:
            await self._register(link, request)
        except BaseException:
            self.ended(link)
            raise
        return link

    def ended(self, link: Link) -> None:
        """Note that the connection of a link has ended."""
        link.close()
        if self._links.get(link.life) is not link:
            return  # it has another one by now
        del self._links[link.life]
        self._runner.detector.unlinked(link.life)
        if not self._terms.groups_of(link.life):
            self._runner.detector.over(link.life)
        elif not self._store.notifications.stopping:
            members = self._terms.members_with(link.life)
            self._runner.execute(self._runner.detector.link_ended(monotonic(), link.life, members))

    async def doubt(self, life: Life) -> None:
        """Look for a node that has a vote and beats at no replica any more."""
        detector = self._runner.detector
        detector.doubted(monotonic(), life)  # from here on its groups concern us
        for group in await self._store.nodes.groups_of(*life):
            await self._take_up(group)
        members = self._terms.members_with(life)
        self._runner.execute(detector.link_ended(monotonic(), life, members))

    async def receive(self, link: Link, message: messages.Up) -> None:
        """Act on a message of an agent, which is a sign of its life whatever it says."""
        has_been_asked, lag = False, float("inf")
        if isinstance(message, messages.Beat):
            lag = message.lag
        elif isinstance(message, messages.Alive) and message.nonce in link.probes:
            link.probes.discard(message.nonce)
            has_been_asked, lag = True, message.lag
        self._runner.execute(self._runner.detector.answered(monotonic(), link.life, lag))
        match message:
            case messages.Alive() if has_been_asked:  # perhaps for another replica
                await _if_possible(self._store.nodes.note_alive(*link.life))
            case messages.Register():
                await self._register(link, message)
            case messages.Beat():
                await self._beat(link, message)
            case messages.Suspect():
                await self._suspect(link, message)
            case messages.Told():
                await self._keep_incident(link, message.incident)
            case messages.Withdraw():
                suspected, kind = (message.node, message.incarnation), message.kind
                self._runner.detector.withdrawn(link.life, suspected, kind)
            case messages.Alive() | messages.Ask():
                pass  # no answer to a probe of this replica; a request, which another part takes

    async def _keep_incident(self, link: Link, incident: messages.IncidentReport) -> None:
        """Keep an incident that the node of this link has found.

        Raises:
            ValueError: it says that another node has found it, and might replace that one's.
        """
        if incident.reporter != link.life[0]:
            raise ValueError(f"node {link.life[0]} reports an incident of node {incident.reporter}")
        await self._orchestrator.incidents.report(incident.model_dump(mode="json"))

    async def _register(self, link: Link, request: messages.Register) -> None:
        """Take in what the agent holds, with the generation of the store of this very moment."""
        life, out = await self._store.lives.read(), list[str]()
        for held in request.groups:
            link.groups.setdefault(held.group, None)
            while True:
                outcome = await self._report(link.life, request, held, life)
                if not isinstance(outcome, LossShown):
                    break
                life = await self._store.lives.outgrow(max(outcome.reported, life.generation))
            if outcome.is_out:
                out.append(held.group)
        link.generation = life.generation
        link.groups = dict.fromkeys(link.groups)  # it drops what comes before this answer
        answer = messages.Registered(generation=life.generation, out=out)
        link.send(messages.dump(answer))
        self._recall_if_new(life)
        if life.generation < self._generation:  # it has changed while the agent registered
            link.send(_recall(self._generation))
        seated = await self._store.nodes.groups_of(*link.life)
        self._changed.update(seated, link.groups)
        self._wake.set()

    async def _report(
        self, node: Life, request: messages.Register, held: messages.Held, life: StoreLife
    ) -> AgentRegistered | LossShown:
        until = self._store.clock.now() + self._store.nodes.lease_seconds
        report = AgentRegisters(
            node, request.generation, held.record, life, until, is_out=held.is_out
        )
        try:
            outcomes = await self._store.groups.submit(held.group, report)
        except ServiceError as error:
            if not error.details.get("unreadable"):
                raise
            return AgentRegistered(is_out=False)  # for all that is known
        for outcome in outcomes or ():
            if isinstance(outcome, AgentRegistered | LossShown):
                return outcome
        raise AssertionError("a report is always answered")

    async def _beat(self, link: Link, beat: messages.Beat) -> None:
        heard = self._terms.named_beside(link.life, beat.heard)
        ages = {life: beat.heard[life[0]] for life in heard}
        self._runner.execute(self._runner.detector.told(monotonic(), link.life, ages, beat.lag))
        if await self._extend_lease(link.life, beat):
            link.answer_beat(beat.number, self._limits.caps)
            held = [(each.group, each.epoch) for each in beat.progress]
            if link.holds_ended(held, monotonic()):
                link.send(_recall(link.generation))  # the answer names what it is out of
            return
        node, incarnation = link.life
        record = await self._store.nodes.get(node)
        if record is not None and not record.is_alive_as(incarnation):
            link.end_life(record.end_of(incarnation))
        # It may have been registered again, with a store that has lost all, in this very moment.
        elif record is None or not await self._extend_lease(link.life, beat):
            raise UnknownNode(f"node {node} is not registered (any more)")

    async def _extend_lease(self, life: Life, beat: messages.Beat) -> bool:
        """Return False if there is none (any more)."""
        progress = [item.model_dump() for item in beat.progress]
        write = self._store.nodes.heartbeat(*life, progress, draining=beat.draining)
        written = await _if_possible(write)
        return written is not False

    async def _suspect(self, link: Link, suspicion: messages.Suspect) -> None:
        suspected = (suspicion.node, suspicion.incarnation)
        if link.life not in self._terms.members_with(suspected):
            # It may have linked just now, and says again what it said elsewhere.
            for group in await self._store.nodes.groups_of(*link.life):
                await self._take_up(group)
        members = self._terms.members_with(suspected)
        if link.life in members and suspected != link.life:
            kind, by = suspicion.kind, link.life
            facts = {"node": suspected[0], "by": by[0], "seconds": round(suspicion.since, 3)}
            log.info("node suspected: %s", kind, extra=facts)
            self._runner.suspect(by, suspected, kind, members, suspicion.lag)

    # Terms

    def _hear(self, group: str | None) -> None:
        if group is None:
            self._has_missed = True
        else:
            self._changed.add(group)
        self._wake.set()

    @property
    def _is_due(self) -> bool:
        return self._has_missed or self._limits.is_due or bool(self._changed)

    async def _possibly_changed(self) -> set[str]:
        """Return the groups that are known here, and those that linked agents may be in by now."""
        lives = [*self._links]
        seated = await asyncio.gather(*(self._store.nodes.groups_of(*life) for life in lives))
        return set(self._terms.records).union(*seated)

    async def _announce(self) -> None:
        """Tell the agents of terms that have changed, if the store is still the one they know."""
        groups, has_missed, generation = self._changed, self._has_missed, self._generation
        self._changed, self._has_missed = set(), False
        try:
            if has_missed:
                groups |= await self._possibly_changed()
            for group in groups:
                await self._take_up(group, with_seats=False)
            self._recall_if_new(await self._store.lives.read())
        except BaseException:
            self._changed |= groups
            self._has_missed |= has_missed
            raise
        if self._generation != generation:  # what was read may be what the store has lost
            self._changed |= groups
            return
        for group in groups & self._terms.records.keys():
            record = self._terms.records[group]
            linked = [link for link in self._links.values() if link.generation == self._generation]
            due = [link for link in linked if link.is_due(group, record)]
            if due:  # a term of thousands of nodes is megabytes: encoded once for all
                text = messages.dump(
                    messages.TermAnnounced(generation=self._generation, group=group, record=record)
                )
                for link in due:
                    link.send(text)
            for link in linked:
                if link.is_missed(group, record):
                    link.send(_recall(self._generation))

    async def _take_up(self, group: str, *, with_seats: bool = True) -> None:
        """Note the present term of a group, and drop all suspicions of and by those it leaves out.

        Where its record cannot be read it stays as it was known last.

        Args:
            with_seats: note also who has left since, which takes as long as there are ranks.
        """
        state = await self._store.groups.read_if_possible(group)
        if state is None:
            return
        record = None
        if state.term is None:
            for link in self._links.values():
                link.group_ended(group, monotonic())
        elif self._concerns_us(group, state.term):
            if not with_seats and self._is_told(group, state.term):
                return
            record = term_record(state)
        for life in self._terms.replace(group, record):
            if life in self._links:
                self._runner.detector.forget(life)
            else:
                self._runner.detector.over(life)

    def _is_told(self, group: str, record: TermRecord) -> bool:
        """Return True if all agents that are linked here know this term, and so do we."""
        return self._terms.knows(group, record) and not any(
            link.waits_for(group, record) for link in self._links.values()
        )

    def _concerns_us(self, group: str, record: TermRecord) -> bool:
        return any(map(record.has, self._runner.detector.suspected_lives)) or any(
            group in link.groups or record.has(link.life) for link in self._links.values()
        )

    def _recall_if_new(self, life: StoreLife) -> None:
        """Ask all agents to register again if the store has begun another generation."""
        if life.generation <= self._generation:
            return
        self._generation = life.generation
        for link in self._links.values():
            if 0 < link.generation < life.generation:
                link.send(_recall(life.generation))

    def _ask(self, life: Life) -> None:
        """Ask an agent for a sign of life that is linked here, whichever replica wants it."""
        if life in self._links:
            self._links[life].ask()

    # The background task

    async def run(self) -> None:
        """Announce terms, decide on suspects and watch the store's generation, until cancelled."""
        looked = float("-inf")
        while True:
            await self._pause()
            try:
                if monotonic() - looked >= LIFE_SECONDS:
                    self._recall_if_new(await self._store.lives.read())
                    looked = monotonic()
                if self._is_due:
                    await self._announce()
                await self._runner.decide_if_due()
                await self._limits.refresh()
                self._has_failed = False
            except ServiceError as error:
                self._has_failed = True  # the sweeper tells people
                if not error.details.get("unreadable"):  # one record says nothing of the store
                    self._runner.store_failed()
                log.debug("terms cannot be announced: %s", error.message)
            except Exception:
                self._has_failed = True
                log.exception("the control links failed; this is an error of Allfold, they go on")

    async def _pause(self) -> None:
        """Wait for something to do."""
        self._wake.clear()
        is_due = self._is_due or self._runner.has_unannounced  # while suspects were decided on
        if is_due and not self._has_failed:
            return
        is_busy = self._has_failed or not self._runner.is_idle
        with suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS if is_busy else LIFE_SECONDS):
                await self._wake.wait()

    def close(self) -> None:
        """Close all links and stop the failure detector; the process ends."""
        self._runner.close()
        for link in self._links.values():
            link.close()


def _recall(generation: int) -> str:
    return messages.dump(messages.Recall(generation=generation))


async def _if_possible(write: Awaitable[T]) -> T | None:
    """Await a write; ``None`` if the store takes none, which the sweeper tells people.

    No link is ended for that: another replica could not write either, and all leases are suspended.
    """
    try:
        return await write
    except ServiceError as error:
        if not error.details.get("refuses_writes"):
            raise
        return None
