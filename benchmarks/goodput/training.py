"""A training on several nodes of this machine: agents, and a rank on each."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from allfold_cluster import Cluster, free_address
from allfold_cluster.processes import Child, stop_all, wait_for
from benchmarks.children import environment
from benchmarks.errors import BenchmarkFailed
from benchmarks.goodput.accounts import Step, read

_PATIENCE_SECONDS = 60.0
_LOOK_AGAIN_SECONDS = 0.02


@dataclass
class RankProcess:
    """One rank, with its log."""

    node: str
    child: Child
    log: Path


class Training:
    """An orchestrator, agents, and a rank per agent, which can be killed and replaced.

    Args:
        world: how many agents, and ranks.
        command: of the rank of a seat, given its agent's socket and the file for its steps.
    """

    def __init__(self, world: int, command: Callable[[str, int, Path], list[str]]) -> None:
        self._world = world
        self._command = command
        self._ending = ExitStack()
        self._started: list[RankProcess] = []
        self._living: dict[str, RankProcess] = {}
        self.nodes = [f"node{number}" for number in range(world)]
        self._cluster = Cluster(env=environment(), address=free_address)

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            ending.enter_context(self._cluster)
            ending.callback(self._end_ranks)
            self._cluster.start(self._world)
            for node in self.nodes:
                self._start_rank(node)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def logs(self) -> list[list[Step]]:
        """Return what each rank that was ever there has logged."""
        return [read(file) for file in self.files()]

    def files(self) -> list[Path]:
        """Return the log of each rank that was ever there."""
        return [rank.log for rank in self._started]

    def await_all(self) -> None:
        """Wait until every rank that lives has committed a step that all ranks have made."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while not all(self._is_in(rank) for rank in self._living.values()):
            if time.monotonic() > until:
                raise BenchmarkFailed(
                    f"not all ranks were in the group after {_PATIENCE_SECONDS:g} s\n"
                    + self._cluster.log_tails()
                )
            self.watch(_LOOK_AGAIN_SECONDS)

    def _is_in(self, rank: RankProcess) -> bool:
        steps = read(rank.log)[-1:]
        return any(step.counts and step.world == self._world for step in steps)

    def watch(self, seconds: float) -> None:
        """Let time pass; raises ``BenchmarkFailed`` if a rank ends meanwhile."""
        ended = wait_for([rank.child for rank in self._living.values()], seconds)
        if ended:
            ended[0].reap()
            raise BenchmarkFailed(
                f"{ended[0].name} {ended[0].ending}; what it said is above\n"
                + self._cluster.log_tails()
            )

    def kill(self, node: str, *, with_agent: bool) -> None:
        """SIGKILL the rank of a node, perhaps with its agent, and start others in their place."""
        rank = self._living.pop(node)
        if with_agent:
            self._cluster.agents[node].child.signal(signal.SIGKILL)
        rank.child.signal(signal.SIGKILL)
        stop_all([rank.child])
        if with_agent:
            self._cluster.kill_agent(node)
            self._cluster.launch_agent(node)
            self._cluster.await_agent(node, registered=False)
        self._start_rank(node)

    def _start_rank(self, node: str) -> None:
        log = self._cluster.folder / f"{node}.{len(self._started)}.steps"
        command = self._command(self._cluster.socket_of(node), self.nodes.index(node), log)
        child = Child(f"the rank on {node}", command, env=self._cluster.env)
        self._living[node] = RankProcess(node, child, log)
        self._started.append(self._living[node])

    def _end_ranks(self) -> None:
        stop_all([rank.child for rank in self._living.values()], grace=0.0)
