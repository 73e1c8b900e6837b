"""The nodes in Redis: who is registered, whose lease runs, and which lives are to be cleared up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import WatchError

from allfold_core.errors import AllfoldError
from allfold_orchestrator import keys
from allfold_orchestrator.batching import Batches
from allfold_orchestrator.clock import Clock
from allfold_orchestrator.failures import store_errors
from allfold_orchestrator.group_state import NodeInfo
from allfold_orchestrator.nodes import Admission, NodeRecord, admit
from allfold_orchestrator.redis_client import Client, Pipeline

# Nodes that are gone stay in the list of nodes for an hour.
DEPARTED_SECONDS = 3600
# Progress is kept longer than any lease, and not for ever.
PROGRESS_SECONDS = 600


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as people see it. ``lease_expiry`` is ``None`` once it is gone."""

    record: NodeRecord
    lease_expiry: float | None
    progress: tuple[dict[str, Any], ...]


Outcome = TypeVar("Outcome")
Registered = NodeInfo | AllfoldError | None
"""The earlier life that a registration replaces, or the error if the name is taken."""


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    life: str
    progress_key: str
    progress: str


class NodeStore:
    """All nodes."""

    def __init__(self, client: Client, clock: Clock, lease_seconds: float) -> None:
        self._client = client
        self._clock = clock
        self.lease_seconds = lease_seconds
        self._heartbeats = Batches(self._write_heartbeats, asyncio.Lock())
        self._registrations = Batches(self._register, asyncio.Lock())
        self._unfinished = Batches(self._read_unfinished, asyncio.Lock())

    async def get(self, node: str) -> NodeRecord | None:
        """The record of a node that is registered, or was until lately."""
        with store_errors():
            return _parse(await self._client.get(keys.node(node)))

    async def register(self, applicant: NodeRecord) -> Registered:
        """Let the node in and start its lease.

        Returns the earlier life that it replaces, which must now be cleared up, or ``None``; or
        the error if the name is taken.
        """
        return await self._registrations.submit(applicant)

    async def _register(self, applicants: Sequence[NodeRecord]) -> list[Registered]:
        outcomes: list[Registered] = []
        for distinct in _by_distinct_names(applicants):
            with store_errors():
                outcomes += await _until_undisputed(partial(self._try_register, distinct))
        return outcomes

    async def _try_register(self, applicants: Sequence[NodeRecord]) -> list[Registered]:
        now = self._clock.now()
        names = [keys.node(applicant.info.node) for applicant in applicants]
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(*names)
            existing = [_parse(text) for text in await pipe.mget(names)]
            alive = await self._leases_alive(pipe, existing, now)
            verdicts = [
                admit(record, lease_alive=lease_alive, applicant=applicant)
                for record, lease_alive, applicant in zip(existing, alive, applicants, strict=True)
            ]
            pipe.multi()
            for verdict in verdicts:
                if isinstance(verdict, Admission):
                    self._queue_admission(pipe, verdict, now)
            await pipe.execute()
        return [v.replaced if isinstance(v, Admission) else v for v in verdicts]

    def _queue_admission(self, pipe: Pipeline, admission: Admission, now: float) -> None:
        info, replaced = admission.record.info, admission.replaced
        pipe.set(keys.node(info.node), admission.record.to_json())
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
        self, node: str, incarnation: str, progress: Sequence[dict[str, Any]]
    ) -> bool:
        """Extend the lease; ``False`` if there is none (any more)."""
        life = keys.life(node, incarnation)
        said = json.dumps(list(progress)) if progress else "[]"
        return await self._heartbeats.submit(_Heartbeat(life, keys.progress(node), said))

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

    async def expired(self, now: float) -> list[tuple[str, str]]:
        """The lives whose lease is over."""
        with store_errors():
            lives = await self._client.zrangebyscore(keys.LEASES, "-inf", f"({now}")
        return [keys.parse_life(life) for life in lives]

    async def evict(self, node: str, incarnation: str, *, expired_at: float = float("inf")) -> bool:
        """End this life of a node, if its lease was over at ``expired_at``.

        ``False`` if the lease was extended since, or if somebody else ended it already. A heartbeat
        that comes at this very moment may be too late although it is answered: the next one tells.

        From here on it can take no seat. Freeing those it has is the caller's next step, and is
        remembered as an eviction until :meth:`forget_eviction`.
        """
        with store_errors():
            return await _until_undisputed(lambda: self._try_evict(node, incarnation, expired_at))

    async def _try_evict(self, node: str, incarnation: str, expired_at: float) -> bool:
        now = self._clock.now()
        life = keys.life(node, incarnation)
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.node(node))
            record = _parse(await pipe.get(keys.node(node)))
            expiry = await pipe.zscore(keys.LEASES, life)
            if expiry is None or float(expiry) >= expired_at:
                return False
            pipe.multi()
            pipe.zrem(keys.LEASES, life)
            pipe.zadd(keys.EVICTIONS, {life: now})
            if record is not None and record.is_alive_as(incarnation):
                gone = replace(record, lost_at=now)
                pipe.set(keys.node(node), gone.to_json(), ex=DEPARTED_SECONDS)
                pipe.zadd(keys.DEPARTED, {node: now})
            removed, *_ = await pipe.execute()
        return bool(removed)

    async def evictions(self) -> list[tuple[str, str]]:
        """The lives that ended and may still hold seats."""
        with store_errors():
            lives = await self._client.zrange(keys.EVICTIONS, 0, -1)
        return [keys.parse_life(life) for life in lives]

    async def unfinished_evictions(self, node: str) -> list[str]:
        """Those of one node, by incarnation. All who ask at once share one look."""
        return await self._unfinished.submit(node)

    async def _read_unfinished(self, nodes: Sequence[str]) -> list[list[str]]:
        incarnations: dict[str, list[str]] = {node: [] for node in nodes}
        for node, incarnation in await self.evictions():
            if node in incarnations:
                incarnations[node].append(incarnation)
        return [incarnations[node] for node in nodes]

    async def groups_of(self, node: str, incarnation: str) -> list[str]:
        """The groups in which this life of the node took a seat."""
        with store_errors():
            return sorted(await self._client.smembers(keys.groups_of(keys.life(node, incarnation))))

    async def forget_eviction(self, node: str, incarnation: str) -> None:
        """All seats of this life are free."""
        with store_errors():
            await _until_undisputed(lambda: self._try_forget(node, incarnation))

    async def _try_forget(self, node: str, incarnation: str) -> None:
        life = keys.life(node, incarnation)
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(keys.node(node))
            record = _parse(await pipe.get(keys.node(node)))
            pipe.multi()
            pipe.zrem(keys.EVICTIONS, life)
            if record is None or not record.is_alive_as(incarnation):
                # A node that was only silent comes back as the same life, and may sit again.
                pipe.delete(keys.groups_of(life))
            await pipe.execute()

    async def all(self) -> list[NodeStatus]:
        """Every node that is here, or was within the last hour."""
        oldest = self._clock.now() - DEPARTED_SECONDS
        with store_errors():
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zremrangebyscore(keys.DEPARTED, "-inf", oldest)
                pipe.zrange(keys.LEASES, 0, -1, withscores=True)
                pipe.zrange(keys.DEPARTED, 0, -1)
                _, leases, departed = await pipe.execute()
            expiries = {keys.parse_life(life): float(score) for life, score in leases}
            names = sorted({node for node, _ in expiries} | set(departed))
            return await self._statuses(names, expiries)

    async def _statuses(
        self, names: list[str], expiries: dict[tuple[str, str], float]
    ) -> list[NodeStatus]:
        if not names:
            return []
        texts = await self._client.mget([keys.node(name) for name in names])
        progress = await self._client.mget([keys.progress(name) for name in names])
        return [
            NodeStatus(
                record,
                expiries.get((record.info.node, record.info.incarnation)),
                tuple(json.loads(said)) if said else (),
            )
            for record, said in zip(map(_parse, texts), progress, strict=True)
            if record is not None
        ]


async def _until_undisputed(attempt: Callable[[], Awaitable[Outcome]]) -> Outcome:
    """Try again for as long as others write in between."""
    while True:
        try:
            return await attempt()
        except WatchError:
            continue


def _by_distinct_names(applicants: Sequence[NodeRecord]) -> Iterator[list[NodeRecord]]:
    """Runs of applicants without two of one name: the second must find what the first one left."""
    run: dict[str, NodeRecord] = {}
    for applicant in applicants:
        if applicant.info.node in run:
            yield list(run.values())
            run = {}
        run[applicant.info.node] = applicant
    yield list(run.values())


def _parse(text: str | None) -> NodeRecord | None:
    return NodeRecord.from_json(text) if text else None


def _life(info: NodeInfo) -> str:
    return keys.life(info.node, info.incarnation)
