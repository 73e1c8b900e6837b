"""The store's life and clock, its retention, and the replicas' turns to decide on suspects."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from redis.exceptions import WatchError

from allfold_orchestrator.membership.group_state import StoreLife
from allfold_orchestrator.membership.terms import outgrow, store_life
from allfold_orchestrator.store import keys, schemas
from allfold_orchestrator.store.failures import store_errors, until_undisputed
from allfold_orchestrator.store.redis_client import Client

DEPARTED_SECONDS = 3600
MAX_DEPARTED = 1_000
IDLE_RECORD_SECONDS = 24 * 3600
MAX_IDLE_GROUPS = 1_000
# No agent remembers an opening of a group for longer.
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


class Clock(Protocol):
    """A clock that all replicas share."""

    def now(self) -> float:
        """Return the time, in seconds since a moment that all replicas share."""

    async def synchronize(self) -> None:
        """Read the shared time again."""


class StoreClock:
    """Redis' clock, kept as an offset to the local monotonic one.

    So a wrong or jumping wall clock of one replica cannot end anybody's lease.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset

    async def synchronize(self) -> None:
        before = time.monotonic()
        seconds, microseconds = await self._client.time()
        middle = (before + time.monotonic()) / 2
        self._offset = seconds + microseconds / 1e6 - middle


# A replica that stops in its turn keeps the others from theirs for no longer than this.
TURN_MILLISECONDS = 2_000


class TurnIsOver(Exception):
    """A replica was stopped in its turn: another one may have decided meanwhile, and otherwise."""


class DecisionTurns:
    """The replicas' turns to decide: two at once might evict both ends of one dead link."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[str | None]:
        """Yield this replica's turn until the end of the block; ``None`` while another has one."""
        mine = secrets.token_hex(8)
        with store_errors():
            taken = await self._client.set(keys.DETECTOR, mine, px=TURN_MILLISECONDS, nx=True)
        try:
            yield mine if taken else None
        finally:
            if taken:
                await self._end(mine)

    async def _end(self, mine: str) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            try:
                with store_errors():
                    await pipe.watch(keys.DETECTOR)
                    if await pipe.get(keys.DETECTOR) == mine:
                        pipe.multi()
                        pipe.delete(keys.DETECTOR)
                        await pipe.execute()
            except WatchError:
                return  # the turn was over, and is another one's now


_NO_LIFE = StoreLife(0, "")
# An in-process Redis ends with the process, so a name of the process is one of its life.
_PROCESS = secrets.token_hex(20)


class StoreLives:
    """This replica's view of the store's life; it is the same on all replicas."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.known = _NO_LIFE
        self._first_read = asyncio.Lock()

    async def read(self) -> StoreLife:
        """Read the life of the store; where it is a new one, be the first to say so.

        Raises:
            ServiceError: Redis does not answer.
        """
        seen = self.known.generation  # what others find meanwhile may be later than the answer
        with store_errors():
            run_id = await self._run_id()
            stored = _load(await self._client.get(keys.STORE))
        is_same = stored is not None and stored.run_id == run_id and stored.generation >= seen
        return self._know(stored if is_same and stored else await self._change(seen))

    def _know(self, life: StoreLife) -> StoreLife:
        """Return the later one of two lives: answers may come in another order."""
        if life.generation >= self.known.generation:
            self.known = life
        return self.known

    async def present(self) -> StoreLife:
        """Return the life as it was read last; reads it where it never was."""
        if not self.known.generation:
            async with self._first_read:  # one for all who come while it is under way
                if not self.known.generation:
                    await self.read()
        return self.known

    async def outgrow(self, generation: int) -> StoreLife:
        """Begin a later generation than this one, in which the store has lost something."""
        return self._know(await self._change(generation))

    async def _change(self, above: int) -> StoreLife:
        async def attempt() -> StoreLife:
            async with self._client.pipeline(transaction=True) as pipe:
                await pipe.watch(keys.STORE)
                stored = _load(await pipe.get(keys.STORE))
                life = store_life(stored, await self._run_id())
                if life.generation <= above:
                    life = outgrow(life, above)
                if life != stored:
                    pipe.multi()
                    pipe.set(keys.STORE, schemas.dump(schemas.STORE, _dict(life)))
                    await pipe.execute()
                return life

        return await until_undisputed("the store's generation", attempt)

    async def _run_id(self) -> str:
        if self._client.is_embedded:
            return _PROCESS
        found: dict[str, Any] = await self._client.info("server")
        return str(found["run_id"])


def _load(text: str | None) -> StoreLife | None:
    return None if text is None else StoreLife(**schemas.load(schemas.STORE, text))


def _dict(life: StoreLife) -> dict[str, Any]:
    return {"generation": life.generation, "run_id": life.run_id}
