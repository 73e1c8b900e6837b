"""The jury at work: it looks for signs of life, and carries out what the jury decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from time import monotonic

from allfold_core.errors import ServiceError
from allfold_orchestrator.links import messages
from allfold_orchestrator.links.dial import Dialled
from allfold_orchestrator.links.known_terms import KnownTerms
from allfold_orchestrator.links.link import Connected
from allfold_orchestrator.membership.group_state import Life
from allfold_orchestrator.membership.jury import Ask, Cleared, Evict, Instruction, Jury, Probe
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.membership.term_record import TermRecord
from allfold_orchestrator.membership.terms import may_evict
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store

log = logging.getLogger(__name__)

REDIAL_SECONDS = 0.02

Dial = Callable[[str], Awaitable[Dialled]]
Refresh = Callable[[str], Awaitable[None]]


class Court:
    """This replica's jury, with the paths on which it reaches nodes and the store.

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
        self._verdicts: dict[Life, Evict] = {}
        self._leases: dict[Life, float | None] = {}  # as they were when a node was accused
        self._tasks: set[asyncio.Task[None]] = set()
        self.jury = Jury()

    @property
    def is_idle(self) -> bool:
        """True while nothing is to be decided or carried out."""
        return self.jury.is_idle and not self._verdicts

    def follow(self, instructions: Iterable[Instruction]) -> None:
        """Do what the jury says."""
        for instruction in instructions:
            match instruction:
                case Probe(accused, members):
                    self._probe(accused, members)
                case Ask(accuser, accused):
                    self._links.send(accuser, messages.ping_for(accused))
                case Cleared(accuser, accused, patience):
                    self._links.send(accuser, messages.cleared(accused, patience))
                case Evict(lives):
                    self._verdicts |= dict.fromkeys(lives, instruction)
        if not self.is_idle:
            self._wake.set()

    # Signs of life

    def reach(self, life: Life, url: str) -> None:
        """Dial a node while it lives: only then a refusal later on says something."""
        self._spawn(self._reach(life, url))

    async def _reach(self, life: Life, url: str) -> None:
        if await self._dial(url) is not Dialled.REFUSED:
            self.jury.reached(life)

    def _probe(self, life: Life, members: Iterable[Life]) -> None:
        self._spawn(self._ask_other_replicas(life))
        for member in members:
            self._links.send(member, messages.ping_for(life))
        url = self._terms.control_url(life)
        if url is not None:
            self._spawn(self._look_for(life, url))

    async def _look_for(self, life: Life, url: str) -> None:
        """Dial a node until it answers, or refuses, or is judged: one that dies resets at first."""
        while await self._dial_once(life, url) is Dialled.SILENT:
            await asyncio.sleep(REDIAL_SECONDS)
            if life not in self.jury.accused_lives:
                return

    async def _dial_once(self, life: Life, url: str) -> Dialled:
        dialled = await self._dial(url)
        match dialled:
            case Dialled.REFUSED:
                self.follow(self.jury.dial_refused(life))
            case Dialled.ANSWERED if await self._is_replaced(life, url):
                self.follow(self.jury.gone(life, "has been started anew"))
            case Dialled.ANSWERED:
                self.follow(self.jury.answered(monotonic(), life, float("inf")))
        return dialled

    async def _is_replaced(self, life: Life, url: str) -> bool:
        """Return True if the store knows that another life of the node has this address now."""
        info = None
        with suppress(ServiceError):
            record = await self._store.nodes.get(life[0])
            info = record.info if record is not None else None
        return info is not None and info.incarnation != life[1] and info.control_url == url

    async def _ask_other_replicas(self, life: Life) -> None:
        """Let a node be probed on its link, whichever replica has it.

        The lease is read first: whatever extends it from then on is a sign of life.
        """
        leases = await self._store.nodes.leases([life])
        self._leases |= leases
        await self._store.nodes.ask_all_to_probe(*life)

    async def _listen_to_others(self) -> None:
        """Take in the signs of life that other replicas have noted in the store."""
        accused = self.jury.accused_lives
        self._leases = {life: at for life, at in self._leases.items() if life in accused}
        now_is = await self._store.nodes.leases([*self._leases])
        for life, lease in now_is.items():
            if lease is not None and lease != self._leases.get(life, lease):
                self.follow(self.jury.answered(monotonic(), life, float("inf")))

    # Verdicts

    async def sit(self) -> None:
        """Decide what is due, if it is this replica's turn, and carry it out."""
        await self._listen_to_others()
        if self.jury.is_due(monotonic(), self._spared()):
            async with self._store.judging.turn() as is_ours:
                if is_ours:
                    await self._decide()
        await self._carry_out()

    def _spared(self) -> set[Life]:
        """The lives that may not be evicted now, for what is known of each."""
        now, refused = self._store.clock.now(), self.jury.refused_lives
        spared = self._terms.spared(now)
        return spared - (refused - self._terms.spared(now, is_proven=True)) if refused else spared

    async def _decide(self) -> None:
        # What others have decided in their turn takes accusations away.
        for group in [*self._terms.records]:
            await self._refresh(group)
        terms = self._terms
        verdicts = self.jury.decide(monotonic(), terms.ranks, terms.leaders, self._spared())
        self.follow(verdicts)
        await self._carry_out()

    async def _carry_out(self) -> None:
        """End the lives that are over, all together: each group gets one term for them."""
        over = {}
        for life, verdict in list(self._verdicts.items()):
            if await self._may_evict(life, verdict.is_proven or verdict.is_refused):
                over[life] = verdict.lives[life]
            elif not verdict.is_proven:
                del self._verdicts[life]
                self._let_accuse_again(life)
        await self._evict(over)
        for life in over:
            self._verdicts.pop(life, None)

    async def _may_evict(self, life: Life, is_proven: bool) -> bool:
        groups = self._terms.groups_of(life) | {*await self._store.nodes.groups_of(*life)}
        found = [await self._record(group) for group in groups]
        records = [record for record in found if record is not None and record.has(life)]
        now = self._store.clock.now()
        return may_evict(records, life[0], is_proven=is_proven, now=now)

    async def _record(self, group: str) -> TermRecord | None:
        """Return the term of a group; as it was known last, where it cannot be read."""
        state = await self._store.groups.read_if_possible(group)
        return self._terms.records.get(group) if state is None else term_record(state)

    async def _evict(self, lives: Mapping[Life, str]) -> None:
        """End lives: first in the store, so that any replica finishes what this one begins."""
        for life, how in lives.items():
            if await self._store.nodes.evict(*life, how):
                log.warning("node lost: %s", how, extra={"node": life[0]})
        groups = {group for life in lives for group in self._terms.groups_of(life)}
        await self._orchestrator.clear_up(lives, groups)
        for life, how in lives.items():
            if life in self._links:
                self._links[life].end_life(how)

    def _let_accuse_again(self, life: Life) -> None:
        """Drop a verdict that may not be carried out: the record was lost at this moment."""
        text = messages.cleared(life, self.jury.patience(life, monotonic()))
        for member in self._terms.members_with(life):
            self._links.send(member, text)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a sign of life could not be looked for: %r", task.exception())

    def close(self) -> None:
        """Stop looking for signs of life."""
        for task in self._tasks:
            task.cancel()
