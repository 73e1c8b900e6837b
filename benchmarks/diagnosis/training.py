"""A training on nodes of their own network, in which faults are injected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self, cast

from allfold_cluster import RedisServer
from allfold_cluster.network import Network
from allfold_cluster.network.links import INTERFACE, NetworkCluster, connected
from allfold_cluster.network.namespaces import Namespaces, entered, tc
from allfold_cluster.processes import Child, stop_all, wait_for
from benchmarks.children import environment, python
from benchmarks.diagnosis.rank import Orders
from benchmarks.errors import BenchmarkFailed

_PATIENCE_SECONDS = 60.0
_BURST_BYTES = 40_000
_QUEUE_BYTES = 200_000
_TABLE = "allfold_diagnosis"


class Training:
    """An orchestrator with a Redis, agents, and ranks, each node behind a link of its own.

    Args:
        nodes: how many.
        per_node: the ranks of each.
        observer: whether agents observe: ``on`` or ``off``.
    """

    def __init__(
        self,
        nodes: int,
        per_node: int,
        network: Network,
        compute_seconds: float,
        observer: str = "on",
    ) -> None:
        self.nodes = [f"node{number}" for number in range(nodes)]
        self.per_node = per_node
        self.world = nodes * per_node
        self.network = network
        self.spaces = Namespaces(nodes)
        self._compute_seconds = compute_seconds
        self._ending = ExitStack()
        self._jobs = 0
        self.ranks: list[Child] = []
        self._pipes: list[Path] = []
        self.cluster = NetworkCluster(
            self.spaces,
            env=environment() | {"ALLFOLD_AGENT_THREADS": "1"},
            agent_variables={"ALLFOLD_AGENT_OBSERVER": observer},
        )
        self.redis = RedisServer(self.cluster.folder)
        self.cluster.redis_url = self.redis.url

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            ending.enter_context(self.spaces)
            ending.enter_context(connected(self.network, self.spaces))
            ending.enter_context(self.cluster)
            ending.callback(self.redis.stop)
            ending.callback(self.end_job)
            with entered(self.spaces.switch):
                self.redis.start()
            self.cluster.start_orchestrator()
            self.cluster.start_agents(*self.nodes)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    # The training

    def start_job(self) -> None:
        """Start the ranks, and wait until all of them train."""
        self._jobs += 1
        for rank in range(self.world):
            node = rank // self.per_node
            orders = Orders(
                f"diagnosis-{self._jobs}",
                self.cluster.socket_of(self.nodes[node]),
                rank,
                self.world,
                self._compute_seconds,
                str(self.cluster.folder / f"rank{rank}-{self._jobs}"),
            )
            os.mkfifo(orders.pipe)
            log_file = self.cluster.folder / "ranks.log"
            with log_file.open("ab") as log, entered(self.spaces.nodes[node]):
                child = Child(
                    f"rank {rank}",
                    python("benchmarks.diagnosis.rank", orders.pack()),
                    env=self.cluster.env,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            self.ranks.append(child)
            self._pipes.append(Path(orders.pipe))
        until = time.monotonic() + _PATIENCE_SECONDS
        for child in self.ranks:
            stream = cast(IO[bytes], child.stdout)
            if not wait_for([stream], until - time.monotonic()) or not stream.readline():
                raise BenchmarkFailed(f"{child.name} did not start\n{self.cluster.log_tails()}")

    def end_job(self) -> None:
        """Kill the ranks."""
        for child in self.ranks:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGKILL)
        stop_all(self.ranks)
        for child in self.ranks:
            child.close_streams()
        for pipe in self._pipes:
            pipe.unlink()
        self.ranks, self._pipes = [], []

    @property
    def is_whole(self) -> bool:
        """True while all ranks live."""
        return bool(self.ranks) and not any(child.ended for child in self.ranks)

    def tell(self, rank: int, *words: object) -> None:
        """Give a rank an order."""
        # Not only for writing, which would wait for a reader.
        pipe = os.open(self._pipes[rank], os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(pipe, " ".join(map(str, words)).encode() + b"\n")
        finally:
            os.close(pipe)

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self.nodes[rank // self.per_node]

    # Services and network

    def agent(self, node: str) -> Child:
        """Return the process of an agent."""
        return self.cluster.agents[node].child

    def restart_agent(self, node: str) -> None:
        """Start an agent anew."""
        self.agent(node).signal(signal.SIGCONT)
        self.cluster.kill_agent(node)
        self.cluster.launch_agent(node)
        self.cluster.await_agent(node)

    def limit(self, node: str, rate: str) -> None:
        """Give the link from a node to the others another rate, ``100mbit`` for instance."""
        bucket = ("tbf", "rate", rate, "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
        tc(self._space(node), "qdisc", "replace", "dev", INTERFACE, "root", *bucket)

    def unlimit(self, node: str) -> None:
        """Give the link from a node its first rate again."""
        self.limit(node, f"{self.network.rate:.0f}bit")

    def lose_packets(self, node: str, percent: int) -> None:
        """Drop some of what comes from a node: at the switch, as the sender would notice else."""
        port = f"port{self.nodes.index(node)}"
        self._nft(
            f"add table netdev {_TABLE}",
            f"add chain netdev {_TABLE} drops "
            f"{{ type filter hook ingress device {port} priority 0; }}",
            f"add rule netdev {_TABLE} drops meta length > 200 "
            f"numgen random mod 100 < {percent} drop",
        )

    def lose_no_packets(self) -> None:
        """End what :meth:`lose_packets` began."""
        self._nft(f"delete table netdev {_TABLE}")

    def _nft(self, *rules: str) -> None:
        with entered(self.spaces.switch):
            for rule in rules:
                subprocess.run(["nft", rule], check=True, timeout=10, capture_output=True)

    def _space(self, node: str) -> str:
        return self.spaces.nodes[self.nodes.index(node)]

    def redis_command(self, *words: str) -> None:
        """Send the store a command."""
        with entered(self.spaces.switch):
            command = ["redis-cli", "-p", str(self.redis.port), *words]
            subprocess.run(command, check=True, timeout=10, capture_output=True)

    # Reports

    def incidents(self) -> list[dict[str, Any]]:
        """Return what the orchestrator knows."""
        found = self.cluster.get(f"{self.cluster.orchestrator_url}/v1/incidents?limit=512")
        return cast(list[dict[str, Any]], found["incidents"])

    def await_quiet(self, seconds: float = 20.0) -> None:
        """Wait until no incident is open."""
        until = time.monotonic() + seconds
        while any(each["ended"] is None for each in self.incidents()):
            if time.monotonic() > until:
                still = [each["sentence"] for each in self.incidents() if each["ended"] is None]
                raise BenchmarkFailed(f"incidents that do not end: {json.dumps(still)}")
            wait_for(self.watched, 0.1)

    @property
    def watched(self) -> Sequence[Child]:
        """The processes whose end is worth a look."""
        return [child for child in self.ranks if not child.ended]
