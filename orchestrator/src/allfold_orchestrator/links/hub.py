"""All control links of one replica: what agents say goes to the jury, terms go down to them.

Agents may be linked to any replica. A replica hears of every change of a group on the store's
channel, and tells the agents that are linked to it. It announces nothing before it has looked once
more which generation of the store this is: an agent takes no term of an earlier one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic

from allfold_core.errors import ServiceError
from allfold_orchestrator.links import messages
from allfold_orchestrator.links.dial import Dialled, dial
from allfold_orchestrator.links.link import Link
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    Leave,
    Life,
    LossShown,
    Reason,
)
from allfold_orchestrator.membership.jury import (
    Charge,
    Cleared,
    Evict,
    Instruction,
    Jury,
    Probe,
)
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.membership.term_record import Registration, StoreLife, TermRecord
from allfold_orchestrator.membership.terms import may_evict
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
LIFE_SECONDS = 1.0
"""How often the store's generation is read."""

Dial = Callable[[str], Awaitable[Dialled]]


class UnknownNode(ValueError):
    """A node that the store does not know: it registers first, and then links."""


class LifeIsOver(ValueError):
    """A node that was evicted, or that has another incarnation by now."""


class Links:
    """The agents that are linked to this replica, and its jury."""

    def __init__(self, store: Store, orchestrator: Orchestrator, dial: Dial = dial) -> None:
        self._store = store
        self._orchestrator = orchestrator
        self._dial = dial
        self._jury = Jury()
        self._links: dict[Life, Link] = {}
        self._terms: dict[str, TermRecord] = {}  # of the groups of the agents that are linked
        self._generation = 0
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._verdicts: dict[Life, tuple[str, bool]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_failed = False
        store.on_change.append(self._hear)

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
            raise LifeIsOver(f"node {node} is not registered in this incarnation any more")
        link = Link(life)
        earlier = self._links.get(life)
        if earlier is not None:
            earlier.close()
        self._links[life] = link
        self._follow(self._jury.linked(monotonic(), life))
        self._spawn(self._reach(life, record.info.control_url))
        await self._register(link, request)
        return link

    def ended(self, link: Link) -> None:
        """Note that the connection of a link has ended."""
        link.close()
        if self._links.get(link.life) is not link:
            return  # it has another one by now
        del self._links[link.life]
        members = self._members_with(link.life)
        if members and not self._store.notifications.stopping:
            self._follow(self._jury.link_ended(monotonic(), link.life, members))

    async def receive(self, link: Link, message: messages.Up) -> None:
        """Act on a message of an agent, which is a sign of its life whatever it says."""
        lag = float("inf")
        if isinstance(message, messages.Beat):
            lag = message.lag
        elif isinstance(message, messages.Alive) and message.nonce in link.probes:
            link.probes.discard(message.nonce)
            lag = message.lag
        self._follow(self._jury.answered(monotonic(), link.life, lag))
        match message:
            case messages.Register():
                await self._register(link, message)
            case messages.Beat():
                await self._beat(link, message)
            case messages.Accuse():
                self._accuse(link, message)
            case messages.Seats():
                await self._seats(link, message)

    async def _register(self, link: Link, request: messages.Register) -> None:
        """Take in what the agent holds, with the generation of the store of this very moment."""
        life, out = await self._store.lives.read(), list[str]()
        for held in request.groups:
            link.groups.setdefault(held.group, None)
            while True:
                said = await self._report(held.group, request.report(link.life, held), life)
                if not isinstance(said, LossShown):
                    break
                life = await self._store.lives.outgrow(max(said.reported, life.generation))
            if said.is_out:
                out.append(held.group)
        link.generation = life.generation
        link.send(messages.registered(life.generation, is_evicted=False, out=out))
        self._recall_if_new(life)
        if life.generation < self._generation:  # it has changed while the agent registered
            link.send(messages.recall(self._generation))
        seated = await self._store.nodes.groups_of(*link.life)
        self._changed.update(seated, link.groups)
        self._wake.set()

    async def _report(
        self, group: str, report: Registration, life: StoreLife
    ) -> AgentRegistered | LossShown:
        until = self._store.clock.now() + self._store.nodes.lease_seconds
        said = await self._store.groups.submit(group, AgentRegisters(report, life, until))
        for each in said or ():
            if isinstance(each, AgentRegistered | LossShown):
                return each
        raise AssertionError("a report is always answered")

    async def _beat(self, link: Link, beat: messages.Beat) -> None:
        now, others = monotonic(), self._members_with(link.life)
        ages = {life: beat.heard[life[0]] for life in others if life[0] in beat.heard}
        self._follow(self._jury.told(now, link.life, ages))
        progress = [item.model_dump() for item in beat.progress]
        if await self._store.nodes.heartbeat(*link.life, progress):
            link.send(messages.beat(beat.number))
            return
        record = await self._store.nodes.get(link.life[0])
        if record is None:
            raise UnknownNode(f"node {link.life[0]} is not registered (any more)")
        self._tell_it_is_over(link.life)

    def _accuse(self, link: Link, accusation: messages.Accuse) -> None:
        accused = (accusation.node, accusation.incarnation)
        members = self._members_with(accused)
        if link.life in members and accused != link.life:
            charge = Charge(accusation.charge)
            log.info("node %s is accused: %s by %s", accused[0], charge.value, link.life[0])
            self._follow(self._jury.accused(monotonic(), link.life, accused, charge, members))

    async def _seats(self, link: Link, seats: messages.Seats) -> None:
        """Take the seats of dead ranks of this node back; a session names its rank."""
        state = await self._store.groups.read(seats.group)
        record = term_record(state)
        here = (
            {seat.session for seat in record.seats if seat.node == link.life[0]} if record else ()
        )
        finders = self._store.groups.finders(seats.group)
        for session in seats.dead:
            if session in here:
                current = state.current
                rank = finders.current.rank_of(current.seats, session) if current else None
                await self._orchestrator.leave(seats.group, Leave(rank or 0, session, Reason.LOST))

    # Terms

    def _hear(self, group: str | None) -> None:
        self._changed.update([*self._terms] if group is None else [group])
        self._wake.set()

    async def _announce(self) -> None:
        """Tell the agents of terms that have changed, if the store is still the one they know."""
        groups = self._changed
        self._changed = set()
        try:
            for group in groups:
                await self._take_up(group)
            self._recall_if_new(await self._store.lives.read())
        except BaseException:
            self._changed |= groups
            raise
        for group in groups & self._terms.keys():
            record = self._terms[group]
            for link in self._links.values():
                if link.generation == self._generation and link.is_due(group, record):
                    link.send(messages.term(self._generation, group, record))

    async def _take_up(self, group: str) -> None:
        """Note the present term of a group, and drop all charges of and by those it leaves out."""
        after = term_record(await self._store.groups.read(group))
        before = self._terms.pop(group, None)
        if after is not None and self._concerns_us(group, after):
            self._terms[group] = after
        for life in _lives(before) - {each for r in self._terms.values() for each in _lives(r)}:
            self._jury.forget(life)

    def _concerns_us(self, group: str, record: TermRecord) -> bool:
        return any(group in link.groups or record.has(link.life) for link in self._links.values())

    def _recall_if_new(self, life: StoreLife) -> None:
        """Let all agents register again if the store has begun another generation."""
        if life.generation <= self._generation:
            return
        self._generation = life.generation
        for link in self._links.values():
            if 0 < link.generation < life.generation:
                link.send(messages.recall(life.generation))

    def _members_with(self, life: Life) -> set[Life]:
        """Return the others that are in a group with this life."""
        records = [record for record in self._terms.values() if record.has(life)]
        return {each for record in records for each in _lives(record)} - {life}

    # The jury

    def _follow(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Probe(accused, members):
                    self._probe(accused, members)
                case Cleared(accuser, accused, patience):
                    self._send(accuser, messages.cleared(accused, patience))
                case Evict(lives, is_proven):
                    self._verdicts |= {life: (how, is_proven) for life, how in lives.items()}
                    self._wake.set()
        if not self._jury.is_idle:
            self._wake.set()

    def _send(self, life: Life, text: str) -> None:
        if life in self._links:
            self._links[life].send(text)

    def _probe(self, life: Life, members: Iterable[Life]) -> None:
        link = self._links.get(life)
        if link is not None:
            nonce = secrets.token_hex(8)
            link.probes.add(nonce)
            link.send(messages.probe(nonce))
        for member in members:
            self._send(member, messages.ping_for(life))
        url = self._control_url(life)
        if url is not None:
            self._spawn(self._look_for(life, url))

    def _control_url(self, life: Life) -> str | None:
        for record in self._terms.values():
            if record.has(life):
                return record.voters[life[0]].control_url
        return None

    async def _look_for(self, life: Life, url: str) -> None:
        match await self._dial(url):
            case Dialled.REFUSED:
                self._follow(self._jury.dial_refused(life))
            case Dialled.ANSWERED:
                self._follow(self._jury.answered(monotonic(), life, float("inf")))

    async def _reach(self, life: Life, url: str) -> None:
        if await self._dial(url) is not Dialled.REFUSED:
            self._jury.reached(life)

    async def _judge(self) -> None:
        ranks: Counter[str] = Counter()
        for record in self._terms.values():
            ranks.update(seat.node for seat in record.seats)
        leaders = {record.term.leader for record in self._terms.values()}
        self._follow(self._jury.decide(monotonic(), ranks, leaders, self._spared()))
        for life, (how, is_proven) in list(self._verdicts.items()):
            if await self._may_evict(life, is_proven):
                await self._evict(life, how)
                self._verdicts.pop(life, None)
            elif not is_proven:
                del self._verdicts[life]
                self._let_accuse_again(life)

    def _spared(self) -> set[Life]:
        """Return the lives that may not be evicted for silence, as a record may lack their term."""
        now = self._store.clock.now()
        return {
            life
            for record in self._terms.values()
            for life in _lives(record)
            if not may_evict(record, life[0], is_proven=False, now=now)
        }

    def _let_accuse_again(self, life: Life) -> None:
        """Drop a verdict that may not be carried out: the record was lost at this moment."""
        text = messages.cleared(life, self._jury.patience(life, monotonic()))
        for member in self._members_with(life):
            self._send(member, text)

    async def _may_evict(self, life: Life, is_proven: bool) -> bool:
        now = self._store.clock.now()
        for group in self._groups_of(life) | {*await self._store.nodes.groups_of(*life)}:
            record = term_record(await self._store.groups.read(group))
            if record is None or not record.has(life):
                continue
            if not may_evict(record, life[0], is_proven=is_proven, now=now):
                return False
        return True

    async def _evict(self, life: Life, how: str) -> None:
        """End a life: first in the store, so that any replica finishes what this one begins."""
        if await self._store.nodes.evict(*life):
            log.warning("node lost: %s", how, extra={"node": life[0]})
        await self._orchestrator.clear_up(*life, how, self._groups_of(life))
        self._tell_it_is_over(life)

    def _tell_it_is_over(self, life: Life) -> None:
        link = self._links.get(life)
        if link is not None:
            link.send(messages.registered(link.generation, is_evicted=True, out=[]))
            link.close()

    def _groups_of(self, life: Life) -> set[str]:
        """Return the groups of a life that this replica knows, also from reports alone."""
        return {group for group, record in self._terms.items() if record.has(life)}

    # The background task

    async def run(self) -> None:
        """Announce, judge and look after the store's generation, until cancelled."""
        looked = float("-inf")
        while True:
            waited = await self._pause()
            self._jury.lagged(max(0.0, waited - 2 * TICK_SECONDS))
            try:
                if monotonic() - looked >= LIFE_SECONDS:
                    self._recall_if_new(await self._store.lives.read())
                    looked = monotonic()
                if self._changed:
                    await self._announce()
                await self._judge()
                self._has_failed = False
            except ServiceError as error:
                self._has_failed = True  # the sweeper tells people
                log.debug("terms cannot be announced: %s", error.message)
            except Exception:
                log.exception("the control links failed")

    async def _pause(self) -> float:
        """Wait for something to do; return how much longer it took than it had to."""
        self._wake.clear()
        begun = monotonic()
        is_busy = self._verdicts or self._has_failed or not self._jury.is_idle
        seconds = TICK_SECONDS if is_busy else LIFE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return monotonic() - begun - seconds
        return 0.0

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Let go of everything; the process ends."""
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()


def _lives(record: TermRecord | None) -> set[Life]:
    if record is None:
        return set()
    voters: Mapping[str, object] = record.voters
    return {(name, record.voters[name].incarnation) for name in voters}
