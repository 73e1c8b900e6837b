"""The life of the store: its generation, which grows whenever it may have lost something."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from allfold_core.survival.term_record import StoreLife
from allfold_orchestrator.membership.terms import outgrow, store_life
from allfold_orchestrator.store import keys, schemas
from allfold_orchestrator.store.failures import store_errors, until_undisputed
from allfold_orchestrator.store.redis_client import Client

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
