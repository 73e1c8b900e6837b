"""Retention: how long, and how much, is kept of nodes and groups that are over.

Everything that is over has a time after which it goes, and a number beyond which the oldest go
first. So neither a busy day nor a year leaves more behind than this module says.

    nodes that are gone         an hour       1 000    shown to people
    records of idle groups      a day         1 000    shown to people
    tombstones of idle groups   30 days     100 000    no epoch is used twice
    incidents                   a week          512    shown to people

Redis ends what has a time of its own by itself; the sweeper ends what is beyond the numbers.
"""

from __future__ import annotations

from redis.exceptions import WatchError

from allfold_orchestrator.store import keys
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.redis_client import Client

DEPARTED_SECONDS = 3600
MAX_DEPARTED = 1_000
IDLE_RECORD_SECONDS = 24 * 3600
MAX_IDLE_GROUPS = 1_000
# No agent remembers an epoch of a group for longer.
TOMBSTONE_SECONDS = 30 * 24 * 3600
MAX_TOMBSTONES = 100_000
MAX_INCIDENTS = 512
INCIDENT_SECONDS = 7 * 24 * 3600

# What one sweep does at most, so that it does not hold up the next.
AT_ONCE = 500


class Retention:
    """Removes what is over and beyond its time or number."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def apply(self, now: float) -> None:
        """Remove some of what is no longer to be kept; call it now and then.

        Args:
            now: the time, on the clock by which nodes and groups were noted as over.
        """
        with store_errors():
            for node in await self._surplus(keys.DEPARTED, MAX_DEPARTED, now - DEPARTED_SECONDS):
                owned = (keys.node(node), keys.progress(node))
                await self._remove(keys.DEPARTED, node, *owned)
            for group in await self._surplus(keys.IDLE, MAX_IDLE_GROUPS, now - IDLE_RECORD_SECONDS):
                await self._remove(keys.IDLE, group, keys.group(group), keys.log(group))
            for group in await self._surplus(
                keys.TOMBSTONES, MAX_TOMBSTONES, now - TOMBSTONE_SECONDS
            ):
                await self._remove(keys.TOMBSTONES, group, keys.tombstone(group))

            await self._remove_incidents(now)

    async def _remove_incidents(self, now: float) -> None:
        surplus = await self._surplus(keys.INCIDENT_TIMES, MAX_INCIDENTS, now - INCIDENT_SECONDS)
        if surplus:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hdel(keys.INCIDENTS, *surplus)
                pipe.zrem(keys.INCIDENT_TIMES, *surplus)
                await pipe.execute()

    async def _surplus(self, index: str, most: int, oldest: float) -> list[str]:
        """Return the oldest members of an index that are too many, or too old."""
        too_many = await self._client.zrange(index, 0, -most - 1)
        too_old = await self._client.zrangebyscore(index, "-inf", f"({oldest}")
        # Both begin with the oldest, so one of them has all of the other.
        return max(too_many, too_old, key=len)[:AT_ONCE]

    async def _remove(self, index: str, name: str, *owned: str) -> None:
        """Remove a member of an index and the keys it owns, unless it just came back."""
        async with self._client.pipeline(transaction=True) as pipe:
            await pipe.watch(owned[0])
            if await pipe.zscore(index, name) is None:
                return
            pipe.multi()
            pipe.delete(*owned)
            pipe.zrem(index, name)
            try:
                await pipe.execute()
            except WatchError:
                return
