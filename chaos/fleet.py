"""A whole Allfold of real processes: Redis, orchestrator, agents behind a proxy, and ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

from allfold_cluster import AgentProcess, Cluster, RedisServer, free_address
from allfold_cluster.environment import clean_environment
from allfold_cluster.processes import Child, stop_all, wait_until
from chaos import records
from chaos.proxy import Pair
from chaos.rank_program import Orders
from chaos.records import CRASHED, HUNG, KILLED, RankLog, last_world

ROOT = Path(__file__).parents[1]
# The host that agents advertise. They listen on 127.0.0.1, where nobody looks for them: neither is
# there a Unix socket for this address, by which agents of one machine would go past the proxy.
PROXY_HOST = "127.0.0.2"
_START_SECONDS = 90.0
_PROXY_SECONDS = 10.0
_TAIL_CHARACTERS = 2000

NewCluster = Callable[[Mapping[str, str]], Cluster]
"""Makes the cluster of a fleet, with variables that all of its processes find."""


class ProxyProcess:
    """The proxy in a process of its own."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_PROXY_SECONDS)
        with theirs, log.open("ab") as output:
            self._child = Child(
                "proxy",
                [sys.executable, "-m", "chaos.proxy"],
                env={"PYTHONPATH": str(ROOT)},
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
            )
        self._answers = self._channel.makefile("rb")

    def close(self) -> None:
        """End it."""
        self._answers.close()
        self._channel.close()
        stop_all([self._child])

    def listen(self, agent: AgentProcess) -> None:
        """Stand in front of both ports of an agent, which need not listen yet."""
        routes = [
            (f"{PROXY_HOST}:{address.rpartition(':')[2]}", address, framed)
            for address, framed in zip(agent.listens, (False, True), strict=True)
        ]
        self.ask("listen", node=agent.name, pid=agent.pid, routes=routes)

    def ask(self, do: str, pairs: Iterable[Pair] = (), **arguments: Any) -> Any:
        """Let the proxy do something; its answer. ``RuntimeError`` with its log if it has ended."""
        command = {"do": do, "pairs": list(pairs), **arguments}
        self._channel.sendall(json.dumps(command).encode() + b"\n")
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the proxy has ended: {self._log.read_text()[-_TAIL_CHARACTERS:]}")
        return json.loads(answer)


@dataclass
class RankProcess:
    """One rank of the present life."""

    orders: Orders
    node: str
    child: Child
    output: Path
    killed: bool = False
    lost: bool = False
    """A fault has taken it, alone or with its node; its process may still run."""

    @property
    def lives(self) -> bool:
        return not self.child.ended

    @property
    def is_ready(self) -> bool:
        return self.output.read_text().startswith("ready")

    def log(self) -> RankLog:
        """Read its log, after its end."""
        otherwise = KILLED if self.killed else CRASHED if self.child.ended else HUNG
        return records.read(Path(self.orders.log), self.orders.seat, self.node, otherwise)


class Fleet:
    """The services, and the ranks of one life after the other.

    Args:
        cluster: its services, none of which runs yet.
        program: the module that plays a rank; it takes :class:`Orders`.
    """

    def __init__(self, nodes: int, ranks_per_node: int, cluster: Cluster, program: str) -> None:
        self._program = program
        self.nodes = [f"node{number}" for number in range(nodes)]
        self.ranks_per_node = ranks_per_node
        self.ranks: list[RankProcess] = []
        self.cluster = cluster
        self.cluster.agent_variables["ALLFOLD_AGENT_ADVERTISE"] = PROXY_HOST
        self.redis = RedisServer(self.cluster.folder)
        self.cluster.redis_url = self.redis.url
        self.proxy = ProxyProcess(self.cluster.folder / "proxy.log")

    def start(self) -> None:
        """Start everything but ranks."""
        self.redis.start()
        self.cluster.start_orchestrator()
        self.start_agents()

    def start_agents(self) -> None:
        """Start those that do not run, and wait until the orchestrator knows all."""
        agents = self.cluster.agents
        dead = [name for name in self.nodes if name not in agents or agents[name].child.ended]
        for name in dead:
            self.restart_agent(name)
        for name in self.nodes:
            self.cluster.await_agent(name)
        self.cluster.await_all_registered()

    def close(self, logs: Path | None = None) -> None:
        """End everything, whatever it does; its logs are copied into a folder, if there is one."""
        with ExitStack() as ending:
            ending.callback(self.cluster.close)
            ending.callback(self._keep_logs, logs)
            ending.callback(self.redis.stop)
            ending.callback(self.proxy.close)
            self.end_ranks()

    def _keep_logs(self, folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for pattern in ("*.log", "*.jsonl"):
                for file in self.cluster.folder.glob(pattern):
                    shutil.copy(file, folder)

    # Ranks

    @property
    def world(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    @property
    def stop_file(self) -> Path:
        return self.cluster.folder / "stop"

    def start_ranks(self, group: str, seed: int, timeout: float, on_loss: str) -> None:
        """Begin a life: all ranks, which play until they are told to stop."""
        self.begin_life()
        for seat in range(self.world):
            self._start_rank(group, seat, seed, timeout, on_loss)
        for rank in self.ranks:
            wait_until(partial(_ready_or_ended, rank), "the ranks play", _START_SECONDS)
            assert rank.lives, f"{rank.output.read_text()}\n{self.cluster.log_tails()}"

    def begin_life(self) -> None:
        """Forget the ranks of the life before."""
        self.stop_file.unlink(missing_ok=True)
        self.ranks = []

    def _start_rank(self, group: str, seat: int, seed: int, timeout: float, on_loss: str) -> None:
        # Neighbours in number are on different nodes, so that every op crosses them.
        node = self.nodes[seat % len(self.nodes)]
        orders = Orders(
            seat=seat,
            world=self.world,
            group=group,
            agent=self.cluster.socket_of(node),
            seed=seed,
            timeout=timeout,
            on_loss=on_loss,
            stop=str(self.stop_file),
            log=str(self.log_of(group, seat)),
        )
        self.launch_rank(orders, node, self._program)

    def log_of(self, group: str, seat: int) -> Path:
        """Return the file for the records of a rank."""
        return self.cluster.folder / f"{group}-{seat}.jsonl"

    def launch_rank(self, orders: Orders, node: str, program: str) -> RankProcess:
        """Start one more rank of the present life, without waiting for it."""
        output = Path(orders.log).with_suffix(".log")
        with output.open("wb") as file:
            child = self.cluster.start_module(
                f"{orders.group}-{orders.seat}",
                [program, json.dumps(asdict(orders))],
                self.cluster.env,
                file.fileno(),
            )
        rank = RankProcess(orders, node, child, output)
        self.ranks.append(rank)
        return rank

    @property
    def living(self) -> list[RankProcess]:
        """The ranks that play, and that no fault has taken."""
        return [each for each in self.ranks if each.lives and not each.lost]

    @property
    def living_nodes(self) -> int:
        """The number of nodes that have a living rank."""
        return len({rank.node for rank in self.living})

    @property
    def members(self) -> int:
        """The size of the group: the largest that any living rank has seen."""
        return max((last_world(Path(rank.orders.log)) for rank in self.living), default=0)

    def await_end(self, lost: frozenset[int], seconds: float) -> list[RankLog]:
        """Wait for the ranks that are not lost, which have been told to stop; all ranks' logs."""
        left = [rank for rank in self.ranks if rank.orders.seat not in lost]
        with suppress(TimeoutError):
            wait_until(lambda: not any(rank.lives for rank in left), "all ended", seconds)
        hanging = [rank for rank in left if rank.lives]
        for rank in hanging:
            rank.child.signal(signal.SIGCONT)
            rank.child.signal(signal.SIGUSR1)  # its log gets the stacks
        logs = [rank.log() for rank in self.ranks]
        self.end_ranks()
        return logs

    def end_ranks(self) -> None:
        """Kill the ranks that are left."""
        for rank in self.ranks:
            rank.child.signal(signal.SIGKILL)
        stop_all([rank.child for rank in self.ranks])

    # Nodes

    def between(self, node: str) -> list[Pair]:
        """Return both directions between a node and all others."""
        return [pair for pair in permutations(self.nodes, 2) if node in pair]

    def away_from(self, node: str) -> list[Pair]:
        """Return the directions from a node to all others."""
        return [(node, other) for other in self.nodes if other != node]

    def kill_agent(self, node: str) -> None:
        """Its port refuses from now on, as it would without a proxy."""
        self.cluster.kill_agent(node)
        self.proxy.ask("refuse", node=node)

    def restart_agent(self, node: str) -> None:
        """Start a dead one again under its name, without waiting for it."""
        self.proxy.listen(self.cluster.launch_agent(node))

    @property
    def orchestrator_answers(self) -> bool:
        """True once the orchestrator answers that was started last."""
        return self.cluster.ready_file("orchestrator").exists()

    def accepts_ranks(self, node: str) -> bool:
        """Return True once ranks can connect to an agent that was started again."""
        return self.cluster.ready_file(node).exists()


def _ready_or_ended(rank: RankProcess) -> bool:
    return rank.is_ready or not rank.lives


def checked_cluster(variables: Mapping[str, str]) -> Cluster:
    """Return a cluster whose agents check the order of their locks, and keep their addresses."""
    return Cluster(env=environment() | dict(variables), address=free_address)


def environment() -> dict[str, str]:
    """Return the environment of all processes of a fleet."""
    found = clean_environment("ALLFOLD_")
    path = [str(ROOT), *filter(None, [found.get("PYTHONPATH")])]  # of the programs of ranks
    return found | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "ALLFOLD_AGENT_THREADS": "2",
        "ALLFOLD_CHECK_LOCKS": "1",
    }


@contextmanager
def fleet(
    nodes: int,
    ranks_per_node: int,
    variables: dict[str, str] | None = None,
    program: str = "chaos.rank_program",
    logs: Path | None = None,
    new_cluster: NewCluster = checked_cluster,
) -> Iterator[Fleet]:
    """A fleet that is ready for its first life; nothing is left of it afterwards."""
    found = Fleet(nodes, ranks_per_node, new_cluster(variables or {}), program)
    try:
        found.start()
        yield found
    finally:
        found.close(logs)
