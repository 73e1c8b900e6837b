"""A replica that is frozen between deciding and telling who is evicted, while another goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from allfold_cluster.processes import Child, stop_all
from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from tests.orchestrator.fake_agent import SECONDS, FakeAgent, Replica, agents, replica
from tests.orchestrator.stopping_replica import STEPS
from tests.support.processes.forked import start_module
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.redis, pytest.mark.slow]

START_SECONDS = 40.0
# A link is not taken for dead while its replica is frozen.
PATIENT = {"ALLFOLD_LEASE_SECONDS": "120", "ALLFOLD_HEARTBEAT_SECONDS": "30"}
EVICTED, GROUPS, ANNOUNCED = STEPS


class StoppingReplica:
    """An orchestrator in a process of its own, which stops itself before one step."""

    def __init__(self, process: Child, address: str, log: Path) -> None:
        self.address = address
        self.http = httpx.AsyncClient(base_url=f"http://{address}", timeout=SECONDS)
        self._process = process
        self._log = log

    @property
    def is_stopped(self) -> bool:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def go_on(self) -> None:
        self._process.signal(signal.SIGCONT)


@asynccontextmanager
async def stopping_replica(
    before: str, redis_url: str, folder: Path
) -> AsyncIterator[StoppingReplica]:
    log, ready = folder / "log", folder / "ready"
    options = ["--listen", "127.0.0.1:0", "--redis-url", redis_url, "--ready-file", str(ready)]
    command = ["tests.orchestrator.stopping_replica", before, *options]
    with log.open("wb") as output:
        environment = {**os.environ, **PATIENT, "OMP_NUM_THREADS": "1"}
        process = start_module("replica", command, environment, output=output.fileno())
    try:
        await until(ready.exists, "it listens", START_SECONDS)
        served = StoppingReplica(process, ready.read_text().strip(), log)
        yield served
        await served.http.aclose()
    finally:
        stop_all([process], grace=0.0)


@asynccontextmanager
async def group_of_two_replicas(
    before: str, redis: RedisServer, folder: Path
) -> AsyncIterator[tuple[StoppingReplica, Replica, list[FakeAgent]]]:
    """Five agents in one group: a, c and e linked to the replica that will stop."""
    async with AsyncExitStack() as stack:
        store = Store(connect(redis.url), 120.0)
        other = await stack.enter_async_context(replica(store, heartbeat_seconds=30))
        stopping = await stack.enter_async_context(stopping_replica(before, redis.url, folder))
        linked = await agents(stack, [stopping, other], "abcde")
        yield stopping, other, linked


async def a_link_dies(linked: Sequence[FakeAgent], stopping: StoppingReplica) -> None:
    """The one of a and b, of which b has to go; the replica stops on the way."""
    for agent in linked:
        agent.heard = dict.fromkeys("abcde", 0.0)
    a = linked[0]
    a.heard["b"] = 60.0
    await a.suspect(linked[1])
    await until(lambda: stopping.is_stopped, "it has stopped", START_SECONDS)


async def all_hold(*staying: FakeAgent, number: int) -> None:
    """They hold the term of this number, and no two of them ever heard of different ones."""
    names = [agent.name for agent in staying]
    for agent in staying:
        record = await agent.holds(*names)
        assert record["term"]["number"] - record["epoch"] == number - 1
    told: dict[int, list[str]] = {}
    for agent in staying:
        terms = [message["record"]["term"] for message in agent.received("term")]
        numbers = [term["number"] for term in terms]
        assert numbers == sorted(numbers), f"{agent.name} was told of terms in this order"
        for term in terms:
            assert told.setdefault(term["number"], term["voters"]) == term["voters"]


async def goes_on_without(leaver: FakeAgent, at: Replica, *staying: FakeAgent, number: int) -> None:
    query = {"incarnation": "1"}
    (await at.http.delete(f"/v1/nodes/{leaver.name}", params=query)).raise_for_status()
    await all_hold(*staying, number=number)


async def test_what_a_frozen_replica_decided_is_void_where_another_one_has_decided_since(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """Else a link that died costs both its ends: one died meanwhile, so there is no such link."""
    async with group_of_two_replicas(EVICTED, own_redis, tmp_path) as (stopping, other, linked):
        a, b, c, d, e = linked
        await a_link_dies(linked, stopping)
        await a.die()
        for agent in linked:
            agent.heard["a"] = 60.0
        await d.suspect(a, "refused")
        for agent in (b, d):
            await agent.holds(*"bcde")
        stopping.go_on()
        await until(lambda: "the turn of this replica was over" in stopping.log, "it gives way")
        await all_hold(b, c, d, e, number=2)
        await goes_on_without(d, other, b, c, e, number=3)


@pytest.mark.parametrize("before", [GROUPS, ANNOUNCED])
async def test_what_a_replica_has_begun_before_it_was_frozen_another_one_finishes(
    own_redis: RedisServer, tmp_path: Path, before: str
) -> None:
    async with group_of_two_replicas(before, own_redis, tmp_path) as (stopping, other, linked):
        a, _, c, d, e = linked
        await a_link_dies(linked, stopping)
        a.at = other
        await a.link()
        for agent in (a, d):
            await agent.holds(*"acde")
        stopping.go_on()
        await all_hold(a, c, d, e, number=2)
        await goes_on_without(d, other, a, c, e, number=3)
