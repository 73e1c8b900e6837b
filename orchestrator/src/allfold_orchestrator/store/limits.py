"""The caps that operators have set on what agents send."""

from __future__ import annotations

from allfold_core.errors import InvalidArgument
from allfold_core.protocol.traffic import Cap
from allfold_orchestrator.store import keys, schemas
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.redis_client import Client

MOST_LIMITS = 1000


class LimitStore:
    """One cap at most for each thing that a cap is on. All replicas are told of changes."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def all(self) -> tuple[Cap, ...]:
        """Return the caps, sorted."""
        with store_errors():
            found = await self._client.hgetall(keys.LIMITS)
        try:
            return tuple(
                sorted(Cap.from_dict(schemas.load(schemas.LIMIT, each)) for each in found.values())
            )
        except (KeyError, TypeError, ValueError, InvalidArgument) as error:
            remedy = "set the limits again after DEL of the key"
            raise schemas.unreadable("a limit", keys.LIMITS, error, remedy) from error

    async def put(self, cap: Cap) -> None:
        """Set a cap, in place of the one that there was on the same.

        Raises:
            InvalidArgument: there are too many.
        """
        known = await self.all()
        if len(known) >= MOST_LIMITS and all(each.scope != cap.scope for each in known):
            raise InvalidArgument(
                f"there are {MOST_LIMITS} limits, and there may be no more: remove some with "
                "`allfold limit none`"
            )
        with store_errors():
            text = schemas.dump(schemas.LIMIT, cap.to_dict())
            await self._client.hset(keys.LIMITS, cap.scope, text)
            await self._client.publish(keys.CHANGES, keys.LIMITS)

    async def remove(self, scope: str) -> None:
        """Remove the cap on something, if there is one."""
        with store_errors():
            await self._client.hdel(keys.LIMITS, scope)
            await self._client.publish(keys.CHANGES, keys.LIMITS)
