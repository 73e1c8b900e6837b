"""Ranks that are told to leave: the others go on, and no op of theirs fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from allfold.cli._processes import Child, stop_all
from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ADMIN = "the-admins"
# Each sum is the number of ranks that took part. Those who stay end after some ops without the one
# that leaves; whoever is told to leave says with finally that it was not killed.
RANK = """
import sys, time
import numpy as np
from allfold import _registry
rank, count, stays = map(int, sys.argv[1:])
group = _registry.open_group(
    "dp", rank, count, on_loss="shrink", timeout=60.0, init_timeout=60.0, max_world=count
)
fewer = 0
try:
    while fewer < 20:
        ones = np.ones(4)
        group.all_reduce(ones)
        fewer += ones[0] == stays
        print("sum", int(ones[0]), flush=True)
        time.sleep(0.005)
    group.shutdown()
finally:
    print("the end", flush=True)
"""


class Ranks:
    """The processes of one job."""

    def __init__(self, services: Services, nodes: str, stays: int) -> None:
        self._folder = services.folder
        self.children: list[Child] = []
        for rank, node in enumerate(nodes):
            env = services.environment() | {"ALLFOLD_SOCKET": services.socket_of(node)}
            command = [sys.executable, "-c", RANK, *map(str, (rank, len(nodes), stays))]
            with self._log(rank).open("wb") as log:
                out, err = log, subprocess.STDOUT
                self.children.append(Child("a rank", command, env=env, stdout=out, stderr=err))

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def said(self, rank: int) -> list[str]:
        return self._log(rank).read_text().splitlines()

    def await_op(self) -> None:
        """Wait until the first op is done."""

        def has_op(rank: int) -> bool:
            return self.children[rank].ended or any("sum" in line for line in self.said(rank))

        for rank in range(len(self.children)):
            wait_until(partial(has_op, rank), "an op", 60.0)

    def end(self, rank: int) -> tuple[int | None, str]:
        """Wait for the end of a rank; return its status and its last line."""
        child = self.children[rank]
        wait_until(lambda: child.ended, f"rank {rank} ends", 60.0)
        child.reap()
        return child.status, self.said(rank)[-1]


@pytest.fixture
def services() -> Iterator[Services]:
    with Services(variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}) as services:
        services.start_orchestrator()
        services.start_agents("a", "b")
        yield services


@pytest.fixture
def ranks(services: Services) -> Iterator[Ranks]:
    """Three ranks, one of them on node b; those on node a end once they are two."""
    ranks = Ranks(services, "aab", stays=2)
    ranks.await_op()
    yield ranks
    stop_all(ranks.children, grace=0.0)


def allfold(services: Services, *arguments: str) -> str:
    """Run a command to its end, which must be a good one; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "allfold.cli", *arguments],
        env=services.environment() | {"ALLFOLD_ORCHESTRATOR_URL": services.orchestrator_url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_that_the_others_went_on(ranks: Ranks, leaver: int) -> None:
    for rank in {0, 1, 2} - {leaver}:
        assert ranks.end(rank) == (0, "the end"), ranks.said(rank)
        assert {line for line in ranks.said(rank) if "sum" in line} == {"sum 3", "sum 2"}


def test_a_rank_that_gets_sigterm_leaves_and_the_others_fail_no_op(ranks: Ranks) -> None:
    ranks.children[1].signal(signal.SIGTERM)
    assert ranks.end(1) == (0, "the end")
    check_that_the_others_went_on(ranks, leaver=1)


def test_a_node_drains_and_the_others_fail_no_op(services: Services, ranks: Ranks) -> None:
    said = allfold(services, "drain", "b", "--timeout", "50").splitlines()
    assert said[-1] == "node b has no rank left"
    assert ranks.end(2) == (0, "the end")
    check_that_the_others_went_on(ranks, leaver=2)
    assert "alive, drains" in allfold(services, "status")
    late = Ranks(services, "b", stays=1)
    status, last = late.end(0)
    assert status == 1
    assert "NodeDraining: [AF406 NodeDraining] no rank can join here: node b drains" in last
