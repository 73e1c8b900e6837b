"""The turn to decide whose life is over: one replica at a time."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import WatchError

from allfold_orchestrator.store import keys
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.redis_client import Client

# A replica that stops in its turn keeps the others from theirs for no longer than this.
TURN_MILLISECONDS = 2_000


class TurnIsOver(Exception):
    """A replica was stopped in its turn: another one may have decided meanwhile, and otherwise."""


class Judging:
    """Taken in turns, so that one dead link, judged at two replicas, costs one node and not two."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[str | None]:
        """Yield this replica's turn until the end of the block; ``None`` while another has one."""
        mine = secrets.token_hex(8)
        with store_errors():
            taken = await self._client.set(keys.JURY, mine, px=TURN_MILLISECONDS, nx=True)
        try:
            yield mine if taken else None
        finally:
            if taken:
                await self._end(mine)

    async def _end(self, mine: str) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            try:
                with store_errors():
                    await pipe.watch(keys.JURY)
                    if await pipe.get(keys.JURY) == mine:
                        pipe.multi()
                        pipe.delete(keys.JURY)
                        await pipe.execute()
            except WatchError:
                return  # the turn was over, and is another one's now
