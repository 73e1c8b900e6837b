"""Nodes in Redis: registrations, leases, and incarnations whose seats are still to be freed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from allfold_core.errors import AllfoldError, ServiceError
from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.group_state import NodeInfo
from allfold_orchestrator.membership.nodes import (
    LEASE_ENDED,
    RESTARTED,
    Admission,
    NodeRecord,
    admit,
    reason_of,
)
from allfold_orchestrator.store import keys, schemas
from allfold_orchestrator.store.batching import Batches
from allfold_orchestrator.store.failures import store_errors, until_undisputed
from allfold_orchestrator.store.life import DEPARTED_SECONDS, Clock, TurnIsOver
from allfold_orchestrator.store.records import dump, parse, readable
from allfold_orchestrator.store.redis_client import Client, Pipeline

log = logging.getLogger(__name__)

# Progress is kept longer than any lease, but not without end.
PROGRESS_SECONDS = 600


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node with its lease and what it said last. ``lease_expiry`` is ``None`` once it is gone."""

    record: NodeRecord
    lease_expiry: float | None
    progress: tuple[dict[str, Any], ...]
    draining: bool = False


Registered = NodeInfo | AllfoldError | None
"""The earlier life that a registration replaces, or the error of one that is refused."""


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    life: str
    progress_key: str
    progress: str


class NodeStore:
    """The nodes of all replicas.

    Attributes:
        ended: how many lives this replica has ended, by the reason.
    """

    def __init__(self, client: Client, clock: Clock, lease_seconds: float) -> None:
        self._client = client
        self._clock = clock
        self.lease_seconds = lease_seconds
        self.ended: Counter[str] = Counter()
        self._heartbeats = Batches(self._write_heartbeats, asyncio.Lock())
        self._registrations = Batches(self._register, asyncio.Lock())
        self._unfinished = Batches(self._read_unfinished, asyncio.Lock())

    async def get(self, node: str) -> NodeRecord | None:
        """Return the record of a node that is registered, or was within the last hour."""
        with store_errors():
            return parse(node, await self._client.get(keys.node(node)))

    async def register(self, applicant: NodeRecord) -> Registered:
        """Register the node and start its lease.

        Returns the earlier incarnation that it replaces, whose seats must now be freed, or
        ``None``; or the error if the name is taken, or if this life of the node is over.
        """
        return await self._registrations.submit(applicant)

    async def _register(self, applicants: Sequence[NodeRecord]) -> list[Registered]:
        outcomes: list[Registered] = []
        for distinct in _by_distinct_names(applicants):
            outcomes += await until_undisputed(
                _nodes_named(distinct), partial(self._try_register, distinct)
            )
        return outcomes

    async def _try_register(self, applicants: Sequence[NodeRecord]) -> list[Registered]:
        now = self._clock.now()
        names = [keys.node(applicant.info.node) for applicant in applicants]
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(*names)
            texts = await pipe.mget(names)
            found = [
                _existing(applicant.info.node, text)
                for applicant, text in zip(applicants, texts, strict=True)
            ]
            existing = [None if isinstance(each, AllfoldError) else each for each in found]
            alive = await self._leases_alive(pipe, existing, now)
            results = [
                each
                if isinstance(each, AllfoldError)
                else admit(each, lease_alive=lease_alive, applicant=applicant)
                for each, lease_alive, applicant in zip(found, alive, applicants, strict=True)
            ]
            pipe.multi()
            for result in results:
                if isinstance(result, Admission):
                    self._queue_admission(pipe, result, now)
            await pipe.execute()
        admissions = [each for each in results if isinstance(each, Admission)]
        self.ended[RESTARTED] += sum(each.replaced is not None for each in admissions)
        return [each.replaced if isinstance(each, Admission) else each for each in results]

    def _queue_admission(self, pipe: Pipeline, admission: Admission, now: float) -> None:
        info, replaced = admission.record.info, admission.replaced
        pipe.set(keys.node(info.node), dump(admission.record))
        pipe.zadd(keys.LEASES, {_life(info): now + self.lease_seconds})
        pipe.zrem(keys.DEPARTED, info.node)
        if replaced is not None:
            pipe.zrem(keys.LEASES, _life(replaced))
            pipe.zadd(keys.EVICTIONS, {_life(replaced): now})

    async def _leases_alive(
        self, pipe: Pipeline, records: Sequence[NodeRecord | None], now: float
    ) -> list[bool]:
        lives = [_life(record.info) for record in records if record]
        expiries = iter(await pipe.zmscore(keys.LEASES, lives) if lives else ())
        known = (next(expiries) if record else None for record in records)
        return [expiry is not None and float(expiry) > now for expiry in known]

    async def heartbeat(
        self,
        node: str,
        incarnation: str,
        progress: Sequence[dict[str, Any]],
        *,
        draining: bool = False,
    ) -> bool:
        """Extend the lease; return False if there is none (any more)."""
        life = keys.life(node, incarnation)
        text = schemas.dump(schemas.PROGRESS, {"groups": list(progress), "draining": draining})
        return await self._heartbeats.submit(_Heartbeat(life, keys.progress(node), text))

    async def _write_heartbeats(self, beats: Sequence[_Heartbeat]) -> list[bool]:
        """One round trip for all that came together, no lock."""
        expiry = self._clock.now() + self.lease_seconds
        with store_errors():
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zadd(keys.LEASES, {beat.life: expiry for beat in beats}, xx=True)
                pipe.zmscore(keys.LEASES, [beat.life for beat in beats])
                for beat in beats:
                    pipe.set(beat.progress_key, beat.progress, ex=PROGRESS_SECONDS)
                _, scores, *_ = await pipe.execute()
        return [score is not None for score in scores]

    async def note_alive(self, node: str, incarnation: str) -> None:
        """Extend the lease of a node that has answered a probe."""
        expiry = self._clock.now() + self.lease_seconds
        with store_errors():
            await self._client.zadd(keys.LEASES, {keys.life(node, incarnation): expiry}, xx=True)

    async def leases(self, lives: Sequence[Life]) -> dict[Life, float | None]:
        """Return when each lease ends. It is another value whenever the node was heard again."""
        if not lives:
            return {}
        with store_errors():
            expiries = await self._client.zmscore(keys.LEASES, [keys.life(*each) for each in lives])
        return dict(zip(lives, expiries, strict=True))

    async def ask_all_to_probe(self, node: str, incarnation: str) -> None:
        """Ask the replica to which the node is linked to look for a sign of its life."""
        with store_errors():
            await self._client.publish(keys.CHANGES, keys.life(node, incarnation))

    async def ask_to_drain(self, node: str, incarnation: str) -> None:
        """Ask the replica to which the node is linked to tell it that it is to drain."""
        with store_errors():
            await self._client.publish(keys.CHANGES, keys.drain(keys.life(node, incarnation)))

    async def expired(self, now: float) -> list[tuple[str, str]]:
        """Return the nodes, with incarnations, whose lease is over."""
        with store_errors():
            lives = await self._client.zrangebyscore(keys.LEASES, "-inf", f"({now}")
        return [keys.parse_life(life) for life in lives]

    async def evict(
        self,
        node: str,
        incarnation: str,
        how: str = LEASE_ENDED,
        *,
        expired_at: float = float("inf"),
        turn: str | None = None,
    ) -> bool:
        """End this incarnation of a node, if its lease was over at ``expired_at``.

        ``False`` if the lease was extended since, or if somebody else ended it already. A heartbeat
        that comes at this very moment may be too late although it is answered: the next one tells.

        From here on it can take no seat. Freeing those it has is the caller's next step, and is
        remembered as an eviction until :meth:`forget_eviction`.

        Args:
            how: its end is known; kept for those who were in a group with it.
            turn: in which that was decided, see :class:`DecisionTurns`.

        Raises:
            TurnIsOver: nothing has changed, as it may have been decided otherwise meanwhile.
        """
        attempt = partial(self._try_evict, node, incarnation, how, expired_at, turn)
        is_over = await until_undisputed(f"node {node}", attempt)
        self.ended[reason_of(how)] += is_over
        return is_over

    async def _try_evict(
        self, node: str, incarnation: str, how: str, expired_at: float, turn: str | None
    ) -> bool:
        now = self._clock.now()
        life = keys.life(node, incarnation)
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.node(node), keys.DETECTOR)
            if turn is not None and await pipe.get(keys.DETECTOR) != turn:
                raise TurnIsOver
            record = parse(node, await pipe.get(keys.node(node)))
            expiry = await pipe.zscore(keys.LEASES, life)
            if expiry is None or float(expiry) >= expired_at:
                return False
            pipe.multi()
            pipe.zrem(keys.LEASES, life)
            pipe.zadd(keys.EVICTIONS, {life: now})
            if record is not None and record.is_alive_as(incarnation):
                gone = replace(record, lost_at=now, lost_how=how)
                pipe.set(keys.node(node), dump(gone), ex=DEPARTED_SECONDS)
                pipe.zadd(keys.DEPARTED, {node: now})
            removed, *_ = await pipe.execute()
        return bool(removed)

    async def ends_of(
        self, lives: Collection[Life], known: Mapping[Life, str] | None = None
    ) -> dict[Life, str]:
        """Return how the end of each of these lives is known.

        Args:
            known: what the caller knows, for nodes of which the store has lost the record.
        """
        with store_errors():
            texts = await self._client.mget([keys.node(name) for name, _ in lives])
        records = [readable(name, text) for (name, _), text in zip(lives, texts, strict=True)]
        return {
            life: record.end_of(life[1]) if record else (known or {}).get(life, LEASE_ENDED)
            for life, record in zip(lives, records, strict=True)
        }

    async def evictions(self) -> list[tuple[str, str]]:
        """Return the nodes, with incarnations, that ended and may still hold seats."""
        with store_errors():
            lives = await self._client.zrange(keys.EVICTIONS, 0, -1)
        return [keys.parse_life(life) for life in lives]

    async def unfinished_evictions(self, node: str) -> list[str]:
        """Return those of one node, by incarnation. Simultaneous callers share one read."""
        return await self._unfinished.submit(node)

    async def _read_unfinished(self, nodes: Sequence[str]) -> list[list[str]]:
        incarnations: dict[str, list[str]] = {node: [] for node in nodes}
        for node, incarnation in await self.evictions():
            if node in incarnations:
                incarnations[node].append(incarnation)
        return [incarnations[node] for node in nodes]

    async def groups_of(self, node: str, incarnation: str) -> list[str]:
        """Return the groups in which this incarnation of the node took a seat."""
        with store_errors():
            return sorted(await self._client.smembers(keys.groups_of(keys.life(node, incarnation))))

    async def forget_eviction(self, node: str, incarnation: str) -> None:
        """Note that all seats of this incarnation are free."""
        await until_undisputed(f"node {node}", partial(self._try_forget, node, incarnation))

    async def _try_forget(self, node: str, incarnation: str) -> None:
        life = keys.life(node, incarnation)
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.node(node))
            record = parse(node, await pipe.get(keys.node(node)))
            pipe.multi()
            pipe.zrem(keys.EVICTIONS, life)
            if record is None or not record.is_alive_as(incarnation):
                # A life whose record was lost is registered anew, and may sit again.
                pipe.delete(keys.groups_of(life))
            await pipe.execute()

    async def names(self) -> list[str]:
        """Return the sorted names of the nodes that are here, or were within the last hour."""
        oldest = self._clock.now() - DEPARTED_SECONDS
        with store_errors():
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zrange(keys.LEASES, 0, -1)
                pipe.zrangebyscore(keys.DEPARTED, oldest, "+inf")
                leases, departed = await pipe.execute()
        return sorted({keys.parse_life(life)[0] for life in leases} | set(departed))

    async def statuses(self, names: Sequence[str]) -> list[NodeStatus]:
        """Return the nodes of these names; those without a record are left out."""
        if not names:
            return []
        with store_errors():
            texts = await self._client.mget([keys.node(name) for name in names])
            progress = await self._client.mget([keys.progress(name) for name in names])
            records = [readable(name, text) for name, text in zip(names, texts, strict=True)]
            lives = [_life(record.info) for record in records if record]
            found = await self._client.zmscore(keys.LEASES, lives) if lives else []
        expiries = dict(zip(lives, found, strict=True))
        return [
            NodeStatus(record, expiries[_life(record.info)], *_last_said(record.info.node, said))
            for record, said in zip(records, progress, strict=True)
            if record is not None
        ]


def _nodes_named(applicants: Sequence[NodeRecord]) -> str:
    names = [applicant.info.node for applicant in applicants]
    return f"node {names[0]}" + (f" or one of {len(names) - 1} more" if names[1:] else "")


def _by_distinct_names(applicants: Sequence[NodeRecord]) -> Iterator[list[NodeRecord]]:
    """Runs of applicants without two of one name: the second must find what the first one left."""
    run: dict[str, NodeRecord] = {}
    for applicant in applicants:
        if applicant.info.node in run:
            yield list(run.values())
            run = {}
        run[applicant.info.node] = applicant
    yield list(run.values())


def _existing(node: str, text: str | None) -> NodeRecord | ServiceError | None:
    """Return the record of one of several nodes, or why it cannot be read: the others can."""
    try:
        return parse(node, text)
    except ServiceError as error:
        return error


def _last_said(node: str, text: str | None) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Return the progress that a node last reported, and whether it drains.

    Nothing if it cannot be read: the next report replaces it.
    """
    if not text:
        return (), False
    try:
        said = schemas.load(schemas.PROGRESS, text)
        return tuple(said["groups"]), bool(said.get("draining"))
    except (KeyError, TypeError, ValueError) as error:
        log.warning("the progress of a node cannot be read: %r", error, extra={"node": node})
        return (), False


def _life(info: NodeInfo) -> str:
    return keys.life(info.node, info.incarnation)
