"""The lease sweeper: evicts nodes whose lease has expired, but not after an outage of our own.

A node with a vote in a group is spared, however long it is silent: only the failure detector evicts
it, after asking the other nodes of its groups. If all of them are silent, the orchestrator itself
may be cut off while the group is well. Such a group's name is freed when another group waits for
it, or after a day.

The store may have been restored to an old record of a group that has ended since. If none of its
nodes registers within the grace period, its name is freed for a group that waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from allfold_core.errors import ServiceError
from allfold_core.survival.term_record import Life, TermRecord
from allfold_orchestrator.membership.group_state import GroupState
from allfold_orchestrator.membership.nodes import ABANDONED, LEASE_ENDED
from allfold_orchestrator.membership.terms import may_evict
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_YET = "no sweep yet"

WANTED_SECONDS = 60.0
"""The silence of all its nodes after which a group's name is freed for one that waits."""
ABANDONED_SECONDS = 24 * 3600.0
"""The silence of all its nodes after which a group is ended."""
LOOK_AGAIN_SECONDS = 10.0
"""The interval of the search for silent nodes that have a vote, in seconds."""
WAITED_FOR = (
    "the groups of node %s wait for it: their records were lost, and too few of their nodes have "
    "reported to evict it for silence; start its agent again, or remove it: "
    "DELETE /v1/nodes/%s?force=true"
)

OnSilent = Callable[[Life], Awaitable[None]]


async def _ignore(_: Life) -> None:
    """Do nothing: the default where there is no failure detector."""


@dataclass(slots=True)
class Grace:
    """The grace period after a start or an outage, in which no node is evicted.

    While the store or this process was away, no heartbeat could be noted, and every lease looks
    expired although the agents are fine. So a sweeper that has just started, or could not sweep for
    more than half a lease, gives all nodes a full lease to send a heartbeat first.
    """

    lease_seconds: float
    last_sweep: float | None = None
    until: float = float("-inf")
    generation: int = 0

    def allows_eviction(self, now: float, generation: int = 0) -> bool:
        """Note a sweep at ``now``; return True if it may evict.

        Args:
            generation: of the store; a later one has lost something, and may hold old leases.
        """
        is_late = self.last_sweep is None or abs(now - self.last_sweep) > self.lease_seconds / 2
        if is_late or generation != self.generation:
            self.until = now + self.lease_seconds
        self.last_sweep, self.generation = now, generation
        return now >= self.until


class Sweeper:
    """The background task of every replica that ends expired leases.

    Args:
        on_silent: called at intervals with each life that has a vote and an expired lease.
    """

    def __init__(
        self, store: Store, orchestrator: Orchestrator, on_silent: OnSilent = _ignore
    ) -> None:
        self._store = store
        self._orchestrator = orchestrator
        self._on_silent = on_silent
        self._grace = Grace(store.nodes.lease_seconds)
        self._pause = min(1.0, store.nodes.lease_seconds / 5)
        self._unreadable: set[str] = set()  # nodes of which it has been logged
        self._waited_for: set[Life] = set()  # of which it has been logged
        self._look_again: dict[Life, float] = {}  # silent nodes that have a vote
        self.problem: str | None = _NOT_YET
        self._failed_at: float | None = None

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await self.sweep()
                self._report(None)
                await self._orchestrator.incidents.store_works()
            except ServiceError as error:
                refuses = error.details.get("refuses_writes")
                problem = "refuses writes" if refuses else "does not answer"
                self._report(f"the state store {problem}", error.message)
                self._orchestrator.incidents.store_failed(error.message)
            except Exception as error:
                log.exception("the sweeper failed")
                self._report("the sweeper failed; the log says why", repr(error))
            await asyncio.sleep(self._pause)

    async def sweep(self) -> list[str]:
        """Evict the nodes whose lease has expired; return their names."""
        await self._store.synchronize()
        now = self._store.clock.now()
        # A store that takes no heartbeats lets all leases end, and is an outage like any other.
        await self._store.prove_writable()
        await self._store.groups.prune_some()
        await self._store.retention.apply(now)
        for life in await self._store.nodes.evictions():
            await self._spare_others(life[0], self._orchestrator.clear_up([life]))
        generation = (await self._store.lives.read()).generation
        if not self._grace.allows_eviction(now, generation):
            return []
        expired = await self._store.nodes.expired(now)
        self._look_again = {life: self._look_again.get(life, 0.0) for life in expired}
        due = [life for life in expired if now >= self._look_again[life]]
        ended = [life for life in due if await self._spare_others(life[0], self._end(life, now))]
        if ended:  # all at once: the first one to go makes a new term for the others
            await self._spare_others(ended[0][0], self._orchestrator.clear_up(ended))
        await self._free_names(now)
        return [node for node, _ in ended]

    async def _free_names(self, now: float) -> None:
        """End groups whose names others wait for, and whose nodes have no leases.

        Nodes whose leases the store has lost are in no list of expired ones.
        """
        for name in self._orchestrator.wanted:
            state = await self._store.groups.read_if_possible(name)
            if state is None:
                continue
            self._orchestrator.wanted.forget_if_unwanted(state, now)
            leases = await self._store.nodes.leases([*state.term.lives] if state.term else [])
            if not leases or any(expiry is not None for expiry in leases.values()):
                continue
            if await self._are_abandoned([state], now):
                log.warning("group is over: %s", ABANDONED, extra={"group": name})
                await self._orchestrator.clear_up(
                    [*leases], [name], dict.fromkeys(leases, ABANDONED)
                )

    async def _spare_others(self, node: str, work: Awaitable[T]) -> T | None:
        """Await work on one node; log an unreadable record, so that work on others goes on."""
        try:
            return await work
        except ServiceError as error:
            if not error.details.get("unreadable"):
                raise
            if node not in self._unreadable:
                log.error("%s", error.message, extra={"node": node})
                self._unreadable.add(node)
            return None

    async def _end(self, life: Life, now: float) -> bool:
        """End the life of a silent node, unless it has a vote in a group that may be well.

        It counts as having one in a group whose record cannot be read.
        """
        groups = self._store.groups
        names = await self._store.nodes.groups_of(*life)
        states = [await groups.read_if_possible(name) for name in names]
        voting = [state for state in states if state and state.term and state.term.has(life)]
        how = LEASE_ENDED
        if voting or None in states:
            if None in states or not await self._are_abandoned(voting, now):
                if not any(self._orchestrator.wanted.has(state, now) for state in voting):
                    self._look_again[life] = now + LOOK_AGAIN_SECONDS
                self._warn_if_waited_for(life, voting, now)
                await self._on_silent(life)
                return False
            how = ABANDONED
        first = await self._store.nodes.evict(*life, how, expired_at=now)
        if first:  # of all replicas
            log.warning("node lost: %s", how, extra={"node": life[0]})
        return first

    def _warn_if_waited_for(self, life: Life, groups: Sequence[GroupState], now: float) -> None:
        """Log once what to do where too few nodes have registered ever to evict a silent one."""
        records = [state.term for state in groups if state.term]
        ends = [record.recall.until for record in records if record.recall]
        if not ends or now < max(ends) or life in self._waited_for:
            return
        if not may_evict(records, life[0], is_proven=False, now=now):
            self._waited_for.add(life)
            log.warning(WAITED_FOR, life[0], life[0], extra={"node": life[0]})

    async def _are_abandoned(self, groups: Sequence[GroupState], now: float) -> bool:
        """Return True if all nodes of these groups were silent long enough to be gone."""
        seconds = self._silence_of(groups, now)
        lives = {life for state in groups if state.term for life in state.term.lives}
        leases = (await self._store.nodes.leases([*lives])).values()
        # During our own outage no node could be heard; one without a lease was not heard since.
        heard = (expiry or self._grace.until for expiry in leases)
        return all(now - max(each, self._grace.until) > seconds for each in heard)

    def _silence_of(self, groups: Sequence[GroupState], now: float) -> float:
        """Return the silence of all nodes of these groups after which the groups have ended."""
        if not any(self._orchestrator.wanted.has(state, now) for state in groups):
            return ABANDONED_SECONDS
        records = [state.term for state in groups if state.term]
        return 0.0 if all(self._is_unclaimed(each, now) for each in records) else WANTED_SECONDS

    def _is_unclaimed(self, record: TermRecord, now: float) -> bool:
        """Return True if the record may be an old one that no node has confirmed in time."""
        if record.generation < self._grace.generation:
            return True
        return record.is_unclaimed and record.is_trusted(now)

    def _report(self, problem: str | None, cause: str = "") -> None:
        """Log when the store fails and when it is back, not every second in between.

        ``problem`` is the answer to readiness probes; ``cause`` is for the log.
        """
        if problem and self.problem in (None, _NOT_YET):
            self._failed_at = time.monotonic()
            log.error(
                "leases cannot be watched: %s (%s); groups that run go on, bring Redis back",
                problem,
                cause,
            )
        elif self.problem and not problem:
            seconds = time.monotonic() - self._failed_at if self._failed_at else None
            again = "" if seconds is None else f" again, after {seconds:.1f} s"
            log.info("leases are watched%s", again)
            self._failed_at = None
        self.problem = problem
