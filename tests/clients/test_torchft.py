"""torchft on Allfold: its process group, and a training whose replicas come and go.

`make test-clients` installs torchft; without it these tests are skipped.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from allfold_cluster.processes import Child, stop_all
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import Program, RankPool, results
from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

pytest.importorskip("torchft")

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseServer

from tests.clients import torchft_programs as programs

SECONDS = 120.0
STEPS = 400
NODES = (0, 0, 1)
services = services_with("node0", "node1")
pool = pool_of_ranks()

pytestmark = pytest.mark.slow


class Quorums:
    """Replicas that a test puts into quorums; their store is the test's."""

    def __init__(self, services: Services, pool: RankPool, ending: ExitStack) -> None:
        self._services = services
        self._pool = pool
        self._ending = ending
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, program: Program, nodes: tuple[int, ...] = NODES) -> list[Any]:
        """Let a replica on each of the nodes run a program."""
        job = self._ending.enter_context(self._pool.unregistered(nodes))
        return [
            job.ranks[rank].start(
                program,
                rank=rank,
                world_size=len(nodes),
                agent=self._services.socket_of(f"node{node}"),
                store=f"127.0.0.1:{self._store.port}",
            )
            for rank, node in enumerate(nodes)
        ]


@pytest.fixture
def quorums(services: Services, pool: RankPool) -> Iterator[Quorums]:
    with ExitStack() as ending:
        yield Quorums(services, pool, ending)


def test_what_torchft_calls_gives_what_it_gives_elsewhere(quorums: Quorums) -> None:
    for rank, found in enumerate(results(quorums.start(programs.collectives), SECONDS)):
        assert found == {
            "allgather": [1.0, 2.0, 3.0],
            "reduce_scatter": [6.0 * (rank + 1)],
            "broadcast": [1.0],
            "mean": [2.0],
            "passed": [1.0 if rank == 1 else 0.0],
        }


def test_a_lost_replica_fails_the_op_of_all_others_and_the_next_quorum_works(
    quorums: Quorums,
) -> None:
    for call in quorums.start(programs.lose_the_last)[:-1]:
        found = call.result(SECONDS)
        assert "PeerLost" in found["error"]
        assert "torchft does this step again" in found["error"]
        assert found["noted"] == [True, True, True]
        assert found["sum"] == 2.0


def test_a_replica_that_dies_before_it_comes_is_named_and_the_next_quorum_works(
    quorums: Quorums,
) -> None:
    (found,) = results(quorums.start(programs.wait_for_one_that_never_comes, (0,)), SECONDS)
    assert "is not complete after 0.2 s: rank 1 of 2 did not" in found["error"]
    assert found["sum"] == 3.0


def test_a_new_quorum_ends_what_was_in_flight_in_the_one_before(quorums: Quorums) -> None:
    calls = quorums.start(programs.reconfigure_with_an_op_in_flight)
    found, *others = results(calls, SECONDS)
    assert found["error"] == "PeerLost"
    assert [each["sum"] for each in (found, *others)] == [3.0] * 3


def test_a_future_is_done_once_its_op_was_waited_for(quorums: Quorums) -> None:
    assert all(results(quorums.start(programs.wait_then_look_at_the_future), SECONDS))


def test_a_backward_pass_goes_on_after_a_loss(quorums: Quorums) -> None:
    assert results(quorums.start(programs.backward_after_a_loss, (0,)), SECONDS) == [True]


class Training:
    """The example, each replica a process."""

    def __init__(self, services: Services, folder: Path, lighthouse: str) -> None:
        self._services = services
        self._folder = folder
        self._lighthouse = lighthouse
        self._children: dict[Path, Child] = {}

    def start(self, replica: int, node: str, attempt: int = 0) -> Path:
        """Start a replica; the file that it prints into."""
        output = self._folder / f"{replica}-{attempt}.log"
        options = ["--replica", str(replica), "--steps", str(STEPS), "--step-seconds", "0.1"]
        with output.open("wb") as file:
            self._children[output] = Child(
                output.name,
                [sys.executable, str(ROOT / "examples" / "train_torchft.py"), *options],
                env=self._services.env
                | {
                    "ALLFOLD_SOCKET": self._services.socket_of(node),
                    "TORCHFT_LIGHTHOUSE": self._lighthouse,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return output

    def kill(self, output: Path) -> None:
        """SIGKILL."""
        self._children[output].signal(signal.SIGKILL)

    def await_step_of(self, replicas: int, output: Path) -> None:
        """Wait until a replica has committed a step that so many took part in."""
        told = f"of {replicas} replicas: committed"
        size = output.stat().st_size
        wait_until(
            lambda: told in output.read_text()[size:] or self._children[output].ended, told, SECONDS
        )
        assert not self._children[output].ended, output.read_text()

    def end(self, output: Path) -> str:
        """Wait for the end of a replica; what it has printed last."""
        wait_until(lambda: self._children[output].ended, "the end of a replica", SECONDS)
        return output.read_text().splitlines()[-1]

    def close(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        stop_all(self._children.values())


@pytest.fixture
def training(services: Services, tmp_path: Path) -> Iterator[Training]:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    found = Training(services, tmp_path, lighthouse.address())
    yield found
    found.close()
    lighthouse.shutdown()


@pytest.mark.timeout(2 * SECONDS)
def test_replicas_go_on_without_one_that_is_killed_and_with_it_once_it_is_back(
    training: Training,
) -> None:
    kept = [training.start(number, f"node{number}") for number in range(2)]
    killed = training.start(2, "node1")
    training.await_step_of(3, killed)
    training.kill(killed)
    training.await_step_of(2, kept[0])
    back = training.start(2, "node1", attempt=1)
    training.await_step_of(3, back)
    words = [training.end(each) for each in (*kept, back)]
    assert len(set(words)) == 1, words
    (accuracy,) = re.findall(r"ok accuracy=([\d.]+)", words[0])
    assert float(accuracy) > 0.95
