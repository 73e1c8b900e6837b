"""The limits that operators have set: on what agents send, and on what is open for a token."""

from __future__ import annotations

from allfold_core.errors import InvalidArgument
from allfold_core.protocol.traffic import Cap
from allfold_orchestrator.membership.admission import TokenLimit
from allfold_orchestrator.store import keys, schemas
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.redis_client import Client, Commands

MOST_LIMITS = 1000


class LimitStore:
    """One cap at most for each thing that a cap is on, one limit for each name of tokens."""

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

    async def put_token(self, token: str, groups: int | None, ranks: int | None) -> None:
        """Set the limit of a token's name, or remove it."""
        with store_errors():
            if groups is ranks is None:
                await self._client.hdel(keys.TOKEN_LIMITS, token)
            else:
                text = schemas.dump(schemas.TOKEN_LIMIT, {"groups": groups, "ranks": ranks})
                await self._client.hset(keys.TOKEN_LIMITS, token, text)

    async def of_tokens(self) -> list[TokenLimit]:
        """Return what may be open, and is, sorted by the names of tokens."""
        with store_errors():
            return [limit for _, limit in sorted((await token_limits(self._client)).items())]


async def token_limits(source: Commands, besides: str = "") -> dict[str, TokenLimit]:
    """Return what may be open, and is besides one group, by the names of tokens."""
    limits, shares = await source.hgetall(keys.TOKEN_LIMITS), await source.hgetall(keys.SHARES)
    shares.pop(besides, None)
    try:
        stored = {name: schemas.load(schemas.TOKEN_LIMIT, text) for name, text in limits.items()}
        found = {name: TokenLimit(name, **limit) for name, limit in stored.items()}
        for text in shares.values():
            token, ranks = schemas.load(schemas.SHARE, text)["share"]
            found[token] = found.get(token, TokenLimit(token)).with_group(ranks)
    except (KeyError, TypeError, ValueError) as error:
        where = f"{keys.TOKEN_LIMITS} or {keys.SHARES}"
        raise schemas.unreadable("a token's limit", where, error, "delete it") from error
    return found
