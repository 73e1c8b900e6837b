"""Nodes with an agent and a rank each, on lines of their own or on this machine's loopback."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.request import Request, urlopen

from allfold_cluster import Cluster
from allfold_cluster.network import Network
from allfold_cluster.network.links import NetworkCluster, connected
from allfold_cluster.network.namespaces import Namespaces, entered
from allfold_cluster.processes import Child, stop_all, wait_for
from allfold_service.credentials import Tokens
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.rounds.seat import Seat
from benchmarks.usage import cpu_seconds

_ASK_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 0.1
_SENT = re.compile(r'^allfold_agent_edge_bytes_total\{.*direction="out".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Told:
    """The reports of the ranks.

    Attributes:
        reports: by rank.
        sent: bytes of tensors by node, as agents count them, since the report before.
        cpu: CPU seconds of all agents since then.
    """

    reports: list[dict[str, Any]]
    sent: list[int]
    cpu: float = 0.0


class Nodes:
    """Nodes that run; ranks are started on them, one run after the other."""

    def __init__(self, cluster: Cluster, spaces: Namespaces | None) -> None:
        self._cluster = cluster
        self._spaces = spaces
        self._numbers = count()

    def run(self, module: str, orders: Sequence[Any], seconds: float) -> Told:
        """Run ranks that tell of one thing; see :meth:`run_parts`."""
        (told,) = self.run_parts(module, orders, seconds, [""])
        return told

    def run_parts(
        self, module: str, orders: Sequence[Any], seconds: float, parts: Sequence[str]
    ) -> list[Told]:
        """Run a rank on each node; they tell of several parts one after the other.

        Args:
            module: the program of a rank, whose arguments are a :class:`Seat` and its orders.
            orders: by rank.
            seconds: the deadline of all parts together.

        Raises:
            BenchmarkFailed: a rank has ended early, or the time is over.
        """
        name, folder = f"rounds{next(self._numbers)}", str(self._cluster.folder)
        seats = [Seat(rank, len(orders), name, folder) for rank in range(len(orders))]
        ranks: list[Child] = []
        deadline = time.monotonic() + seconds
        try:
            for seat, order in zip(seats, orders, strict=True):
                ranks.append(self._started(module, seat, order))
            found, before, cpu = [], [0] * len(seats), self._cpu()
            for part in parts:
                reports = self._reports(part, seats, ranks, deadline)
                sent = self._sent()
                more = [now - then for now, then in zip(sent, before, strict=True)]
                found.append(Told(reports, more, self._cpu() - cpu))
                before, cpu = sent, self._cpu()
                seats[0].seen(part).touch()
            self._await_end(ranks, deadline)
            return found
        finally:
            stop_all(ranks)

    def _started(self, module: str, seat: Seat, orders: Any) -> Child:
        node = f"node{seat.rank}"
        with self._inside(seat.rank):
            return Child(
                f"rank {seat.rank} of {module}",
                python(module, *seat.arguments(orders)),
                env=environment() | self._cluster.environment(node),
            )

    def _inside(self, node: int | None) -> AbstractContextManager[None]:
        """Enter the namespace of a node, or the switch's, if there are any."""
        if self._spaces is None:
            return nullcontext()
        return entered(self._spaces.switch if node is None else self._spaces.nodes[node])

    def _reports(
        self, part: str, seats: Sequence[Seat], ranks: Sequence[Child], deadline: float
    ) -> list[dict[str, Any]]:
        files = [seat.told(part) for seat in seats]
        while not all(file.exists() for file in files):
            if ended := wait_for(ranks, _LOOK_AGAIN_SECONDS):
                raise self._failed(ended[0])
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"not all ranks have told of {part or 'it'} in time")
        return [json.loads(file.read_text()) for file in files]

    def _await_end(self, ranks: Sequence[Child], deadline: float) -> None:
        waiting = list(ranks)
        while waiting:
            ended = wait_for(waiting, deadline - time.monotonic())
            if not ended:
                raise BenchmarkFailed(f"{waiting[0].name} has not ended in time")
            waiting = [rank for rank in waiting if rank not in ended]

    def _failed(self, rank: Child) -> BenchmarkFailed:
        rank.reap()
        what = f"{rank.name} {rank.ending}; what it said is above"
        return BenchmarkFailed(f"{what}\n{self._cluster.log_tails()}")

    def _cpu(self) -> float:
        return cpu_seconds(agent.pid for agent in self._cluster.agents.values())

    def _sent(self) -> list[int]:
        return [self._sent_by(agent.control_url) for agent in self._cluster.agents.values()]

    def _sent_by(self, url: str) -> int:
        request = Request(f"{url}/metrics", headers=Tokens(self._cluster.token).headers())
        with self._inside(None), urlopen(request, timeout=_ASK_SECONDS) as answer:
            text = answer.read().decode()
        return int(sum(float(value) for value in _SENT.findall(text)))


@contextmanager
def nodes(world: int, network: Network | None = None) -> Iterator[Nodes]:
    """Nodes that are ready for ranks; nothing is left of them afterwards."""
    with ExitStack() as ending:
        if network is None:
            cluster, spaces = ending.enter_context(Cluster(env=environment())), None
        else:
            spaces = ending.enter_context(Namespaces(world))
            ending.enter_context(connected(network, spaces))
            cluster = ending.enter_context(NetworkCluster(spaces, env=environment()))
        cluster.start(world)
        yield Nodes(cluster, spaces)
