"""A real orchestrator on a real Redis, under the requests of a cluster's agents."""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from allfold_cluster import Cluster, RedisServer
from benchmarks.children import environment
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import percentile
from benchmarks.scale.beats import Beats
from benchmarks.scale.cluster import PROBE, VIEW, ImaginaryCluster
from benchmarks.scale.http_load import Clients, Load
from benchmarks.usage import cpu_seconds, peak_bytes

# No node has a control link that extends its lease, and none of them shall be taken for lost.
LEASE = {"ALLFOLD_LEASE_SECONDS": "3600", "ALLFOLD_HEARTBEAT_SECONDS": "60"}
OK = 200


@dataclass(frozen=True, slots=True)
class Service:
    """A process that was started here and ends here."""

    pid: int
    address: str

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        return cpu_seconds([self.pid])

    @property
    def peak_bytes(self) -> int:
        """The largest resident set so far."""
        return peak_bytes(self.pid)


@contextmanager
def redis_server(folder: Path) -> Iterator[Service]:
    """The system's ``redis-server``, in memory only."""
    if shutil.which("redis-server") is None:
        raise BenchmarkFailed("the part orchestrator needs a redis-server on the PATH")
    server = RedisServer(folder)
    try:
        server.start()
        yield Service(server.pid, f"127.0.0.1:{server.port}")
    finally:
        server.stop()


@contextmanager
def orchestrator(redis: str, **settings: str) -> Iterator[Service]:
    """One replica on the Redis at ``redis``; ``settings`` are environment variables."""
    url, env = f"redis://{redis}/0", environment() | settings
    with Cluster(redis_url=url, token="", env=env) as cluster:
        child = cluster.start_orchestrator()
        yield Service(child.pid, cluster.listen)


@dataclass(frozen=True, slots=True)
class Services:
    """The processes under measurement."""

    redis: Service
    replicas: Sequence[Service]

    def cpu(self) -> tuple[float, float]:
        """Seconds of the orchestrators together, and of Redis."""
        return sum(replica.cpu_seconds for replica in self.replicas), self.redis.cpu_seconds


class Phases:
    """Runs one kind of request after the other, and notes what each of them cost."""

    def __init__(self, services: Services, connections: int) -> None:
        self._services = services
        self._connections = connections
        self.results: dict[str, dict[str, Any]] = {}

    async def run(self, name: str, requests: Iterable[bytes], connections: int = 0) -> Load:
        """Send all ``requests`` as fast as they are answered."""
        prepared, count = list(requests), connections or self._connections
        async with self._clients(count) as clients:
            before = self._services.cpu()
            load = await clients.run(prepared, count)
            self._note(name, load, before)
        return load

    async def beats(self, cluster: ImaginaryCluster) -> None:
        """Agents beat on their control links as fast as they are answered."""
        async with Beats(cluster, [each.address for each in self._services.replicas]) as links:
            before = self._services.cpu()
            self._note("beats", await links.run(), before)

    async def complete(self, last_join: bytes, waits: Sequence[bytes]) -> None:
        """The last join, while a long-poll of each node waits for the plan.

        Times are from the moment at which that join is sent.
        """
        replicas, all_sent = len(self._services.replicas), asyncio.Event()
        async with self._clients(len(waits)) as clients, self._clients(replicas) as last:
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(clients.run(waits, len(waits), all_sent))
                await all_sent.wait()
                # They come behind the waits, and are answered after their start.
                await last.run([PROBE] * replicas, replicas)
                before = self._services.cpu()
                seated = await last.run([last_join], 1)
            self._note("plan", waiting.result(), before, since=seated.begun)
            self.results["plan"]["seated_after_seconds"] = round(max(seated.times()), 4)

    @asynccontextmanager
    async def _clients(self, count: int) -> AsyncIterator[Clients]:
        clients = Clients([replica.address for replica in self._services.replicas])
        try:
            await clients.open(count)
            yield clients
        finally:
            clients.close()

    def _note(
        self, name: str, load: Load, before: tuple[float, float], since: float | None = None
    ) -> None:
        if set(load.statuses) != {OK}:
            raise BenchmarkFailed(f"{name}: not all requests were granted: {load.statuses}")
        ours, redis = (now - then for now, then in zip(self._services.cpu(), before, strict=True))
        seconds = load.finished - (load.begun if since is None else since)
        times = load.times(since)
        self.results[name] = {
            "requests": len(load.answers),
            "seconds": round(seconds, 4),
            "per_second": round(len(load.answers) / seconds, 1),
            "orchestrator_cpu_seconds": round(ours, 2),
            "redis_cpu_seconds": round(redis, 2),
            "median_seconds": round(statistics.median(times), 5),
            "p99_seconds": round(percentile(times, 99), 5),
            "received_bytes": load.nbytes,
        }


def measure(cluster: ImaginaryCluster, replicas: int, connections: int) -> dict[str, Any]:
    """All phases of a cluster's life; raises ``BenchmarkFailed`` where one is refused."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        redis = stack.enter_context(redis_server(folder))
        started = [
            stack.enter_context(orchestrator(redis.address, **LEASE)) for _ in range(replicas)
        ]
        services = Services(redis, started)
        phases = Phases(services, connections)
        with asyncio.Runner(loop_factory=_fast_loop) as runner:
            runner.run(_life(cluster, phases))
        return {
            "nodes": cluster.nodes,
            "ranks_per_node": cluster.ranks_per_node,
            "replicas": replicas,
            "connections": connections,
            "orchestrator_peak_bytes": max(replica.peak_bytes for replica in started),
            "redis_peak_bytes": redis.peak_bytes,
            "phases": phases.results,
        }


def _fast_loop() -> asyncio.AbstractEventLoop:
    # The orchestrator has it, so it is there; the load costs half with it.
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _life(cluster: ImaginaryCluster, phases: Phases) -> None:
    await phases.run("register", cluster.registrations())
    await _form(cluster, phases, epoch=1)
    await phases.run("view", [VIEW])
    await phases.run("node_lost", [cluster.loss()], 1)
    await phases.run("leave", cluster.leaves())
    first_life = dict(phases.results)
    survivors = cluster.without_the_first()
    await _form(survivors, phases, epoch=2)
    again = {f"again_{name}": phases.results[name] for name in ("join", "plan")}
    await phases.beats(survivors)  # the last: nobody dials or evicts agents that have no link
    phases.results = {**first_life, **again, "beats": phases.results["beats"]}


async def _form(cluster: ImaginaryCluster, phases: Phases, epoch: int) -> None:
    """All ranks join; the last one while an agent of each node waits for the plan."""
    joins = list(cluster.joins())
    await phases.run("join", islice(joins, len(joins) - 1))
    waits = list(cluster.plans(epoch, every=cluster.ranks_per_node))
    await phases.complete(joins[-1], waits)
