"""Ranks that are told to leave, and ranks that are started again: no op of the others fails."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from allfold_cluster.processes import Child, stop_all
from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ADMIN = "the-admins"
# A step is three ops; each sum is the number of ranks that took part. Ranks end after some steps of
# so many as are to be there in the end; whoever is told to leave says that it was not killed. Where
# it is to die, rank 1 does so after its first step, once.
RANK = """
import os, sys, time
import numpy as np
import allfold
joins, most, last, dies = sys.argv[1], *map(int, sys.argv[2:])
restarts = int(os.environ.get("ALLFOLD_RESTARTS", 0))
group = allfold.init(
    max_world=most, joins=joins, on_loss="shrink", timeout=60.0, init_timeout=60.0
)
changed = restarts > 0
steps = 0
try:
    while steps < 20:
        sums = []
        for _ in range(3):
            ones = np.ones(4)
            group.all_reduce(ones)
            sums.append(int(ones[0]))
        print("sums", *sums, flush=True)
        changed = changed or sums[2] != most
        steps += changed and sums[2] == last
        if dies and os.environ["RANK"] == "1" and not restarts:
            os.abort()
        if joins == "commit":
            group.boundary()
        time.sleep(0.005)
    group.shutdown()
finally:
    print("the end", flush=True)
"""
# A group that is not elastic; its ranks end together once the file is there.
FIXED = """
import os, sys
import numpy as np
import allfold
group = allfold.init(timeout=60.0, init_timeout=60.0)
done, steps = np.zeros(1), 0
while not done[0]:
    done = np.full(1, float(os.path.exists(sys.argv[1])))
    group.all_reduce(done)
    steps += 1
    print("step", steps, flush=True)
group.shutdown()
print("the end", flush=True)
"""
_NUMBERS = itertools.count()


class Ranks:
    """The processes of one job, on the nodes with these names."""

    def __init__(
        self,
        services: Services,
        *nodes: str,
        last: int = 0,
        joins: str = "any",
        most: int = 0,
        fixed_until: Path | None = None,
    ) -> None:
        self._services = services
        self._group = f"job{next(_NUMBERS)}"
        self._nodes = nodes
        self._program = [RANK, joins, str(most or len(nodes)), str(last), "0"]
        if fixed_until is not None:
            self._program = [FIXED, str(fixed_until)]
        self.children = [self._start(rank) for rank in range(len(nodes))]

    def _start(self, rank: int) -> Child:
        env = self._services.env | {
            "ALLFOLD_SOCKET": self._services.socket_of(self._nodes[rank]),
            "ALLFOLD_GROUP": self._group,
            "ALLFOLD_RANK": str(rank),
            "ALLFOLD_WORLD_SIZE": str(len(self._nodes)),
        }
        command = [sys.executable, "-c", *self._program]
        with self._log(rank).open("wb") as log:
            return Child("a rank", command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _log(self, rank: int) -> Path:
        return self._services.folder / f"{self._group}.{rank}.log"

    def said(self, rank: int) -> list[str]:
        return self._log(rank).read_text().splitlines()

    def sums(self, rank: int) -> set[str]:
        return {line for line in self.said(rank) if line.startswith("sums")}

    def await_step(self) -> None:
        """Wait until the first step is done on every rank."""

        def has_step(rank: int) -> bool:
            return self.children[rank].ended or bool(self.said(rank))

        for rank in range(len(self.children)):
            wait_until(partial(has_step, rank), "a step", 60.0)

    def end(self, rank: int) -> tuple[int | None, str]:
        """Wait for the end of a rank; return its status and its last line."""
        child = self.children[rank]
        wait_until(lambda: child.ended, f"rank {rank} ends", 60.0)
        child.reap()
        return child.status, self.said(rank)[-1]

    def check_that_the_others_went_on(self, leaver: int) -> None:
        for rank in {*range(len(self.children))} - {leaver}:
            assert self.end(rank) == (0, "the end"), self.said(rank)
            assert "sums 2 2 2" in self.sums(rank)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services(variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}) as services:
        services.start_orchestrator()
        services.start_agents("a")
        yield services


Start = Callable[..., Ranks]


@pytest.fixture
def start(services: Services) -> Iterator[Start]:
    """Start the ranks of a job, which have done a step when it returns."""
    started: list[Child] = []

    def start(*nodes: str, **options: object) -> Ranks:
        ranks = Ranks(services, *nodes, **options)  # type: ignore[arg-type]
        started.extend(ranks.children)
        ranks.await_step()
        return ranks

    yield start
    stop_all(started, grace=0.0)


def allfold(services: Services, *arguments: str) -> str:
    """Run a command to its end, which must be a good one; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "allfold.cli", *arguments],
        env=services.env | {"ALLFOLD_ORCHESTRATOR_URL": services.orchestrator_url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_rank_that_gets_sigterm_leaves_and_the_others_fail_no_op(start: Start) -> None:
    ranks = start("a", "a", "a", last=2)
    ranks.children[1].signal(signal.SIGTERM)
    assert ranks.end(1) == (0, "the end")
    ranks.check_that_the_others_went_on(leaver=1)


@pytest.mark.long
def test_a_rank_of_a_group_that_commits_its_state_leaves_between_two_steps(start: Start) -> None:
    ranks = start("a", "a", "a", last=2, joins="commit")
    ranks.children[0].signal(signal.SIGTERM)
    assert ranks.end(0) == (0, "the end")
    ranks.check_that_the_others_went_on(leaver=0)
    assert ranks.sums(0) == {"sums 3 3 3"}
    assert ranks.sums(1) == ranks.sums(2) == {"sums 3 3 3", "sums 2 2 2"}


def test_a_node_drains_and_the_others_fail_no_op(services: Services, start: Start) -> None:
    services.start_agents("drained")
    ranks = start("a", "a", "drained", last=2)
    said = allfold(services, "drain", "drained", "--timeout", "50").splitlines()
    assert said[-1] == "node drained has no rank left"
    assert ranks.end(2) == (0, "the end")
    ranks.check_that_the_others_went_on(leaver=2)
    assert "alive, drains" in allfold(services, "status")
    status, last = start("drained", last=1).end(0)
    assert status == 1
    assert "NodeDraining: [AF406 NodeDraining] no rank can join here: node drained" in last


@pytest.mark.long
def test_an_agent_that_is_told_to_end_lets_its_ranks_leave_first(
    services: Services, start: Start
) -> None:
    services.start_agents("ended")
    agent = services.agents["ended"].child
    ranks = start("a", "a", "ended", last=2)
    agent.signal(signal.SIGTERM)
    wait_until(lambda: agent.ended, "the agent ends", 60.0)
    assert agent.reap() == 0
    assert ranks.end(2) == (0, "the end")
    ranks.check_that_the_others_went_on(leaver=2)


@pytest.mark.long
def test_an_agent_that_waits_for_all_ranks_is_replaced_without_a_failed_op(
    services: Services, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an update in Kubernetes does it: also under a group whose ranks cannot leave."""
    monkeypatch.setitem(services.agent_variables, "ALLFOLD_DRAIN_FOR", "all")
    monkeypatch.setitem(services.agent_variables, "ALLFOLD_DRAIN_SECONDS", "100")
    services.start_agents("updated")
    agent = services.agents["updated"].child
    ranks = start("a", "updated", fixed_until=tmp_path / "done")
    agent.signal(signal.SIGTERM)
    log = services.folder / "updated.log"
    wait_until(lambda: "cannot leave before its end" in log.read_text(), "it drains", 60.0)
    status, last = start("updated", last=1).end(0)
    assert status == 1
    assert "NodeDraining" in last
    steps = len(ranks.said(1))
    wait_until(lambda: len(ranks.said(1)) > steps + 20, "the job goes on", 60.0)
    assert not agent.ended

    (tmp_path / "done").touch()
    assert [ranks.end(rank) for rank in (0, 1)] == [(0, "the end")] * 2
    wait_until(lambda: agent.ended, "the agent ends", 60.0)
    assert agent.reap() == 0
    services.start_agents("updated")
    anew = start("a", "updated", fixed_until=tmp_path / "done")
    assert [anew.end(rank) for rank in (0, 1)] == [(0, "the end")] * 2


def test_a_rank_that_is_killed_is_started_again_and_rejoins(services: Services) -> None:
    script = services.folder / "rejoins.py"
    script.write_text(RANK)
    agent = ("--agent", services.socket_of("a"))
    options = ("--nproc-per-node", "3", "--max-restarts", "1", "--no-prefix", "--timeout", "90")
    said = allfold(services, "run", *agent, *options, str(script), "commit", "3", "3", "1")
    lines = said.splitlines()
    assert lines.count("the end") == 3
    assert "sums 2 2 2" in lines
    assert [line for line in lines if "sums" in line][-1] == "sums 3 3 3"
