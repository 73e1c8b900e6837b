"""The nodes in Redis: who is registered, whose lease runs, and which lives are to be cleared up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import WatchError

from allfold_core.errors import AllfoldError
from allfold_orchestrator import keys
from allfold_orchestrator.clock import Clock
from allfold_orchestrator.failures import store_errors
from allfold_orchestrator.group_state import NodeInfo
from allfold_orchestrator.nodes import NodeRecord, admit
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


class NodeStore:
    """All nodes."""

    def __init__(self, client: Client, clock: Clock, lease_seconds: float) -> None:
        self._client = client
        self._clock = clock
        self.lease_seconds = lease_seconds

    async def get(self, node: str) -> NodeRecord | None:
        """The record of a node that is registered, or was until lately."""
        with store_errors():
            return _parse(await self._client.get(keys.node(node)))

    async def register(self, applicant: NodeRecord) -> NodeInfo | AllfoldError | None:
        """Let the node in and start its lease.

        Returns the earlier life that it replaces, which must now be cleared up, or ``None``; or
        the error if the name is taken.
        """
        with store_errors():
            while True:
                try:
                    return await self._try_register(applicant)
                except WatchError:
                    continue

    async def _try_register(self, applicant: NodeRecord) -> NodeInfo | AllfoldError | None:
        now = self._clock.now()
        key = keys.node(applicant.info.node)
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(key)
            existing = _parse(await pipe.get(key))
            lease_alive = existing is not None and await self._lease_alive(pipe, existing, now)
            verdict = admit(existing, lease_alive=lease_alive, applicant=applicant)
            if isinstance(verdict, AllfoldError):
                return verdict
            pipe.multi()
            pipe.set(key, verdict.record.to_json())
            pipe.zadd(keys.LEASES, {_life(applicant.info): now + self.lease_seconds})
            pipe.zrem(keys.DEPARTED, applicant.info.node)
            if verdict.replaced is not None:
                pipe.zrem(keys.LEASES, _life(verdict.replaced))
                pipe.zadd(keys.EVICTIONS, {_life(verdict.replaced): now})
            await pipe.execute()
            return verdict.replaced

    async def _lease_alive(self, pipe: Pipeline, record: NodeRecord, now: float) -> bool:
        expiry = await pipe.zscore(keys.LEASES, _life(record.info))
        return expiry is not None and float(expiry) > now

    async def heartbeat(
        self, node: str, incarnation: str, progress: Sequence[dict[str, Any]]
    ) -> bool:
        """Extend the lease; ``False`` if there is none (any more). One round trip, no lock."""
        life = keys.life(node, incarnation)
        with store_errors():
            async with self._client.pipeline(transaction=False) as pipe:
                expiry = self._clock.now() + self.lease_seconds
                pipe.zadd(keys.LEASES, {life: expiry}, xx=True)
                pipe.zscore(keys.LEASES, life)
                pipe.set(keys.progress(node), json.dumps(list(progress)), ex=PROGRESS_SECONDS)
                _, score, _ = await pipe.execute()
        return score is not None

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
            while True:
                try:
                    return await self._try_evict(node, incarnation, expired_at)
                except WatchError:
                    continue

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

    async def groups_of(self, node: str, incarnation: str) -> list[str]:
        """The groups in which this life of the node took a seat."""
        with store_errors():
            return sorted(await self._client.smembers(keys.groups_of(keys.life(node, incarnation))))

    async def forget_eviction(self, node: str, incarnation: str) -> None:
        """All seats of this life are free."""
        with store_errors():
            while True:
                try:
                    return await self._try_forget(node, incarnation)
                except WatchError:
                    continue

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


def _parse(text: str | None) -> NodeRecord | None:
    return NodeRecord.from_json(text) if text else None


def _life(info: NodeInfo) -> str:
    return keys.life(info.node, info.incarnation)
