"""The client of a Redis that Sentinels watch, while its master dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from allfold_core.errors import ServiceError
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.life import StoreLives
from allfold_orchestrator.store.redis_client import Client, connect
from tests.support.processes.sentinels import WatchedRedis
from tests.support.require import requires
from tests.support.waiting import until, until_found

pytestmark = [pytest.mark.anyio, pytest.mark.redis]

FAILOVER_SECONDS = 30.0
MORE_THAN_THE_POOL = 100


async def reads(client: Client) -> set[str | None]:
    """Return what all connections of the pool read; nothing where one of them reaches no master."""
    try:
        with store_errors():
            gets = (client.get("key") for _ in range(MORE_THAN_THE_POOL))
            return set(await asyncio.gather(*gets))
    except ServiceError:
        return set()


async def answers(client: Client) -> bool:
    try:
        with store_errors():
            await client.ping()
    except ServiceError:
        return False
    return True


async def test_the_client_follows_the_master_and_its_store_has_another_life(
    tmp_path: Path,
) -> None:
    requires("redis")
    with WatchedRedis(tmp_path) as redis:
        client = connect(redis.url)
        try:
            lives = StoreLives(client)
            first = await lives.read()
            await client.set("key", "value")
            assert await reads(client) == {"value"}
            await until(redis.replica_is_up_to_date, "the replica has the key")
            redis.master.stop()
            assert not await answers(client)
            await until_found(lambda: answers(client), "the failover", FAILOVER_SECONDS)
            for _ in range(3):  # the pool has all its connections, also those to the dead master
                # For a moment after a failover the Sentinels may know no master that is up.
                found = await until_found(lambda: reads(client), "a master", FAILOVER_SECONDS)
                assert found == {"value"}
            # Its last writes may be lost, so agents are asked again what they hold.
            assert (await lives.read()).generation == first.generation + 1
        finally:
            await client.aclose()
