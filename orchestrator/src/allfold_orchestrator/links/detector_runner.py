"""Runs the failure detector of a replica: finds signs of life, and does what it decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from time import monotonic

from allfold_control import messages
from allfold_core.errors import ServiceError
from allfold_core.survival.suspicion import SuspicionKind
from allfold_core.survival.term_record import Life, TermRecord
from allfold_orchestrator.links.dial import Dialled
from allfold_orchestrator.links.known_terms import KnownTerms
from allfold_orchestrator.links.link import Connected
from allfold_orchestrator.membership.failure_detector import FailureDetector
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.membership.suspects import (
    Ask,
    Cleared,
    Evict,
    Instruction,
    Probe,
)
from allfold_orchestrator.membership.terms import may_evict
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.life import TurnIsOver
from allfold_orchestrator.store.store import Store

log = logging.getLogger(__name__)

REDIAL_SECONDS = 0.02
TICK_SECONDS = 0.05
"""Between two looks at suspects."""
RETURN_SECONDS = 2.0
"""After a failure of the store: agents whose links it has ended link anew within a second."""

Dial = Callable[[str], Awaitable[Dialled]]
Refresh = Callable[[str], Awaitable[None]]


class DetectorRunner:
    """Gives the failure detector what it asks for, from nodes and the store; does what it says.

    Args:
        refresh: reads the term of a group anew.
        wake: set when there is something to decide.
    """

    def __init__(
        self,
        store: Store,
        orchestrator: Orchestrator,
        terms: KnownTerms,
        links: Connected,
        dial: Dial,
        refresh: Refresh,
        wake: asyncio.Event,
    ) -> None:
        self._store = store
        self._orchestrator = orchestrator
        self._terms = terms
        self._links = links
        self._dial = dial
        self._refresh = refresh
        self._wake = wake
        self._proven: dict[Life, Evict] = {}  # and not carried out yet
        self._suspected_meanwhile: set[Life] = set()  # since evictions are carried out
        self._unannounced: set[Life] = set()  # suspected, and other replicas do not know it yet
        self._leases: dict[Life, float | None] = {}  # as they were when a node was suspected
        self._has_store_failed = False  # since the last turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._lag_watch: asyncio.Task[None] | None = None
        self.detector = FailureDetector()

    @property
    def is_idle(self) -> bool:
        """True while nothing is to be decided or carried out."""
        return self.detector.is_idle and not self._proven

    @property
    def has_unannounced(self) -> bool:
        """True if other replicas do not know of all who are suspected here."""
        return bool(self._unannounced)

    def execute(self, instructions: Collection[Instruction]) -> None:
        """Do what the failure detector says."""
        for instruction in instructions:
            match instruction:
                case Probe(suspected, members):
                    self._probe(suspected, members)
                case Ask(reporter, suspected):
                    self._links.send(reporter, _ping_for(suspected))
                case Cleared(reporter, suspected, patience):
                    node, incarnation = suspected
                    news = messages.Cleared(node=node, incarnation=incarnation, patience=patience)
                    self._links.send(reporter, messages.dump(news))
                case Evict(lives):
                    self._proven |= dict.fromkeys(lives, instruction)
        if instructions:
            self._wake.set()
        if not self.is_idle and (self._lag_watch is None or self._lag_watch.done()):
            self._lag_watch = self._spawn(self._watch_lag())

    async def _watch_lag(self) -> None:
        """Extend the detector's waits by as much as this process itself is late, or was frozen."""
        while not self.is_idle:
            begun = monotonic()
            await asyncio.sleep(TICK_SECONDS)
            late = monotonic() - begun - TICK_SECONDS
            self.detector.lagged(max(0.0, late - 2 * TICK_SECONDS))

    def suspect(
        self, by: Life, suspected: Life, kind: SuspicionKind, members: Collection[Life], lag: float
    ) -> None:
        """Take in a suspicion; see :meth:`FailureDetector.suspected`."""
        self._suspected_meanwhile.add(suspected)
        self.execute(self.detector.suspected(monotonic(), by, suspected, kind, members, lag))

    # Signs of life

    def reach(self, life: Life, url: str) -> None:
        """Dial a node while it lives: only then a refusal later on says something."""
        self._spawn(self._reach(life, url))

    async def _reach(self, life: Life, url: str) -> None:
        if await self._dial(url) is not Dialled.REFUSED and life in self._links:
            self.detector.reached(life)

    def _probe(self, life: Life, members: Iterable[Life]) -> None:
        self._unannounced.add(life)
        if life in self._links:
            self._links[life].ask()
        for member in members:
            self._links.send(member, _ping_for(life))
        url = self._terms.control_url(life)
        if url is not None:
            self._spawn(self._look_for(life, url))

    async def _look_for(self, life: Life, url: str) -> None:
        """Dial a suspect until it answers, refuses or is decided on; a dying one first resets."""
        while await self._dial_once(life, url) is Dialled.SILENT:
            await asyncio.sleep(REDIAL_SECONDS)
            if life not in self.detector.suspected_lives:
                return

    async def _dial_once(self, life: Life, url: str) -> Dialled:
        dialled = await self._dial(url)
        match dialled:
            case Dialled.REFUSED:
                self.execute(self.detector.dial_refused(life))
            case Dialled.ANSWERED if await self._is_replaced(life, url):
                self.execute(self.detector.gone(life, "has been started anew"))
            case Dialled.ANSWERED:
                self.execute(self.detector.answered(monotonic(), life, float("inf")))
        return dialled

    async def _is_replaced(self, life: Life, url: str) -> bool:
        """Return True if the store knows that another life of the node has this address now."""
        info = None
        with suppress(ServiceError):
            record = await self._store.nodes.get(life[0])
            info = record.info if record is not None else None
        return info is not None and info.incarnation != life[1] and info.control_url == url

    async def _ask_all_replicas(self) -> None:
        """Ask every replica to probe the suspects on the links that it has.

        The lease is read first: whatever extends it from then on is a sign of life.
        """
        self._unannounced &= self.detector.suspected_lives
        for life in [*self._unannounced]:
            self._leases |= await self._store.nodes.leases([life])
            await self._store.nodes.ask_all_to_probe(*life)
            self.detector.asked(monotonic(), life)
            self._unannounced.discard(life)

    async def _listen_to_others(self) -> None:
        """Take in the signs of life that other replicas have noted in the store."""
        suspected = self.detector.suspected_lives
        self._leases = {life: at for life, at in self._leases.items() if life in suspected}
        now_is = await self._store.nodes.leases([*self._leases])
        for life, lease in now_is.items():
            if lease is not None and lease != self._leases.get(life, lease):
                self.execute(self.detector.answered(monotonic(), life, float("inf")))

    # Decisions

    async def decide_if_due(self) -> None:
        """Decide what is due, if it is this replica's turn, and carry it out."""
        await self._ask_all_replicas()
        await self._listen_to_others()
        now = monotonic()
        if self.detector.is_due(now) and self.detector.is_due(now, self._protected()):
            async with self._store.decisions.turn() as turn:
                if turn is not None:
                    await self._decide(turn)
        await self._carry_out([*self._proven.values()])

    def _protected(self) -> set[Life]:
        """The lives that may not be evicted now, for what is known of each."""
        now, refused = self._store.clock.now(), self.detector.refused_lives
        generation = self._store.lives.known.generation
        protected = self._terms.protected(self.detector.lives_in_question, now, generation)
        at_all = self._terms.protected(refused, now, generation, is_proven=True)
        return protected - (refused - at_all)

    def store_failed(self) -> None:
        """Note that the store does not answer, or takes no writes.

        Answers of agents are lost by that, whichever replica they are linked to.
        """
        self._has_store_failed = True

    async def _decide(self, turn: str) -> None:
        if self._has_store_failed:  # it works by now, as this is a turn
            self._has_store_failed = False
            self.detector.wait_until(monotonic() + RETURN_SECONDS)
            return
        # What others have decided in their turn takes suspicions away.
        await asyncio.gather(*map(self._refresh, await self._groups_concerned()))
        self.execute(self.detector.questions(monotonic()))
        terms = self._terms
        evictions = self.detector.decide(monotonic(), terms.ranks, terms.leaders, self._protected())
        await self._carry_out(evictions, turn)

    async def _groups_concerned(self) -> set[str]:
        """Return the groups of the lives in question, and no others: a turn is short."""
        lives = self.detector.lives_in_question
        seated = await asyncio.gather(*(self._store.nodes.groups_of(*life) for life in lives))
        return set[str]().union(*seated, *map(self._terms.groups_of, lives))

    async def _carry_out(self, evictions: Iterable[Evict], turn: str | None = None) -> None:
        """End the lives that are over, all together: each group gets one term for them.

        A suspect stays one if its life must not be ended now, because the record was just lost or
        because this replica's turn is over. So does one of which members have told meanwhile: the
        store may have lost their group, or that the life is over, and heard of it from them since.
        """
        self._suspected_meanwhile.clear()
        over = {
            life: how
            for eviction in evictions
            for life, how in eviction.lives.items()
            if await self._may_evict(life, eviction.is_proven or eviction.is_refused)
        }
        for life in await self._evict(over, turn):
            if life not in self._suspected_meanwhile:
                self._proven.pop(life, None)
                self.detector.over(life)

    async def _may_evict(self, life: Life, is_proven: bool) -> bool:
        groups = self._terms.groups_of(life) | {*await self._store.nodes.groups_of(*life)}
        found = [await self._record(group) for group in groups]
        records = [record for record in found if record is not None and record.has(life)]
        # Read after the records: they may be older than the store, and never newer.
        generation = (await self._store.lives.read()).generation
        now = self._store.clock.now()
        return may_evict(records, life[0], is_proven=is_proven, now=now, generation=generation)

    async def _record(self, group: str) -> TermRecord | None:
        """Return the term of a group; as it was known last, where it cannot be read."""
        state = await self._store.groups.read_if_possible(group)
        return self._terms.records.get(group) if state is None else term_record(state)

    async def _evict(self, lives: Mapping[Life, str], turn: str | None) -> list[Life]:
        """End lives in the store and in their groups; return those that are over.

        First in the store, so that any replica finishes what this one begins.
        """
        over = [life for life, how in lives.items() if await self._end(life, how, turn)]
        groups = set[str]().union(*map(self._terms.groups_of, over))
        await self._orchestrator.clear_up(over, groups, lives)
        for life in over:
            if life in self._links:
                self._links[life].end_life(lives[life])
        return over

    async def _end(self, life: Life, how: str, turn: str | None) -> bool:
        """End a life in the store; return True if it is over, whoever has ended it."""
        try:
            if await self._store.nodes.evict(*life, how, turn=turn):
                log.warning("node lost: %s", how, extra={"node": life[0]})
        except TurnIsOver:
            log.info(
                "node %s is decided on again: the turn of this replica was over before", life[0]
            )
            return False
        return True

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a sign of life could not be looked for: %r", task.exception())

    def close(self) -> None:
        """Stop looking for signs of life."""
        for task in self._tasks:
            task.cancel()


def _ping_for(life: Life) -> str:
    """Return the request to ping another node, whose age in the next BEAT is the answer."""
    return messages.dump(messages.PingFor(node=life[0], incarnation=life[1]))
