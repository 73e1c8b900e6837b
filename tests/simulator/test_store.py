"""The store of the simulation does what fakeredis does, with the commands that the product uses."""

from __future__ import annotations

import asyncio
from typing import Any

from fakeredis import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import WatchError

from allfold_orchestrator.store.redis_client import connect_embedded
from tests.simulator.network import Network
from tests.simulator.store import Client, Server
from tests.support.virtual_clock import virtual_time
from tests.support.virtual_loop import Process

KEYS = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["x", "y", "z"])
FEW = st.integers(-3, 3)
COMMANDS = st.one_of(
    st.tuples(st.just("hset"), KEYS.map("hash:{}".format), NAMES, NAMES),
    st.tuples(st.just("hdel"), KEYS.map("hash:{}".format), NAMES),
    st.tuples(st.just("hget"), KEYS.map("hash:{}".format), NAMES),
    st.tuples(st.just("hgetall"), KEYS.map("hash:{}".format)),
    st.tuples(st.just("set"), KEYS, NAMES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("lpush"), KEYS.map("list:{}".format), NAMES),
    st.tuples(st.just("ltrim"), KEYS.map("list:{}".format), FEW, FEW),
    st.tuples(st.just("lrange"), KEYS.map("list:{}".format), FEW, FEW),
    st.tuples(st.just("sadd"), KEYS.map("set:{}".format), NAMES),
    st.tuples(st.just("srem"), KEYS.map("set:{}".format), NAMES),
    st.tuples(st.just("smembers"), KEYS.map("set:{}".format)),
    st.tuples(st.just("zadd"), KEYS.map("zset:{}".format), st.dictionaries(NAMES, FEW, min_size=1)),
    st.tuples(st.just("zrem"), KEYS.map("zset:{}".format), NAMES),
    st.tuples(st.just("zscore"), KEYS.map("zset:{}".format), NAMES),
    st.tuples(st.just("zrange"), KEYS.map("zset:{}".format), FEW, FEW),
    st.tuples(
        st.just("zrangebyscore"), KEYS.map("zset:{}".format), FEW, st.sampled_from(["(2", 1])
    ),
)


async def outcomes(client: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Return the answers: of all but the last three one by one, of these in a transaction."""
    found = [await getattr(client, name)(*args) for name, *args in commands[:-3]]
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch("a", "hash:a")
        if len(commands) % 2:
            await client.hset("hash:a", "x", "changed")
        pipe.multi()
        for name, *args in commands[-3:]:
            getattr(pipe, name)(*args)
        try:
            found += await pipe.execute()
        except WatchError:
            found.append("somebody else has changed it")
    return [bool(each) if each in (None, False, True) else each for each in found]


def simulated(commands: list[tuple[Any, ...]]) -> list[Any]:
    with virtual_time() as loop:
        server = Server(loop, Network(loop, 0))
        client = Client(Process(loop, "a replica", "o0"), server)
        found: list[Any] = loop.run_until_complete(outcomes(client, commands))
        return found


@settings(max_examples=60, deadline=None)
@given(st.lists(COMMANDS, min_size=1, max_size=12))
def test_commands_and_transactions_have_the_answers_of_redis(
    commands: list[tuple[Any, ...]],
) -> None:
    expected = asyncio.run(outcomes(connect_embedded(FakeServer()), commands))
    assert simulated(commands) == expected


def test_a_key_is_gone_when_its_time_is_over() -> None:
    with virtual_time() as loop:
        client = Client(Process(loop, "a replica", "o0"), Server(loop, Network(loop, 0)))

        async def turns() -> list[Any]:
            first = await client.set("turn", "1", px=2000, nx=True)
            second = await client.set("turn", "2", px=2000, nx=True)
            await asyncio.sleep(2.1)
            return [first, second, await client.set("turn", "3", px=2000, nx=True)]

        assert loop.run_until_complete(turns()) == [True, None, True]
