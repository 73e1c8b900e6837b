"""Two groups of the same shape on this machine, of which one is observed."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from typing import IO, Self, cast

from allfold_cluster import Cluster
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed

_SECONDS = 60.0

Pair = tuple[list[float], list[float]]
"""The seconds of all-reduces without and with the observer."""

ORDERS = ("off", "on"), ("on", "off")
"""In which the group that is not observed, and the one that is, have their turn."""


class CostCluster:
    """Agents and ranks of both groups; only one of the groups works at a time.

    Args:
        order: in which they are started.
    """

    def __init__(self, nodes: int, per_node: int, order: tuple[str, str]) -> None:
        self._shape = nodes, per_node
        self._ending = ExitStack()
        self._ranks: dict[str, list[subprocess.Popen[bytes]]] = {each: [] for each in order}

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            for observer, ranks in self._ranks.items():
                cluster = ending.enter_context(
                    Cluster(
                        env=environment() | {"ALLFOLD_AGENT_THREADS": "1"},
                        agent_variables={"ALLFOLD_AGENT_OBSERVER": observer},
                    )
                )
                ending.callback(_end, ranks)
                self._start(cluster, ranks)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def _start(self, cluster: Cluster, ranks: list[subprocess.Popen[bytes]]) -> None:
        nodes, per_node = self._shape
        cluster.start(nodes)
        for rank in range(nodes * per_node):
            told = {
                "agent": cluster.socket_of(f"node{rank // per_node}"),
                "rank": rank,
                "world": nodes * per_node,
            }
            ranks.append(
                subprocess.Popen(
                    python("benchmarks.diagnosis.cost_rank", json.dumps(told)),
                    env=cluster.env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        for each in ranks:
            _answer(each)

    def time_both(self, nbytes: int, seconds: float, order: tuple[str, str]) -> Pair:
        """Have both groups do all-reduces, one after the other."""
        times = {observer: self._time(observer, nbytes, seconds) for observer in order}
        return times["off"], times["on"]

    def _time(self, observer: str, nbytes: int, seconds: float) -> list[float]:
        ranks = self._ranks[observer]
        for each in ranks:
            stream = cast(IO[bytes], each.stdin)
            stream.write(json.dumps({"nbytes": nbytes, "seconds": seconds}).encode() + b"\n")
            stream.flush()
        # Of each op the slowest rank counts; they begin it together, as the one before ended.
        return [max(times) for times in zip(*map(_answer, ranks), strict=True)]


def _answer(rank: subprocess.Popen[bytes]) -> list[float]:
    line = cast(IO[bytes], rank.stdout).readline()
    if not line:
        raise BenchmarkFailed(f"a rank ended with status {rank.wait(_SECONDS)}")
    return cast(list[float], json.loads(line))


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for each in ranks:
        each.kill()
        each.communicate()
