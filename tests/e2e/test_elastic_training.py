"""A training of which half of the nodes are replaced ends as one that nothing happens to."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from allfold_cluster.http import post
from allfold_cluster.processes import Child, stop_all
from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ADMIN = "the-admins"
EPOCHS = 10
TEST_IMAGES = 360
SECONDS = 120.0
# Ranks of the example are forked from a process that has imported torch, which takes most of the
# time of a start: else a training might end before it is joined. A line on stdin has the
# environment, the arguments and the files of a rank. In the end each writes what it has, and how
# often a step did not count.
RANKS = """
import json, os, signal, sys
sys.path.insert(0, {folder!r})
import allfold, numpy, torch, train_elastic
from torch.nn.utils import parameters_to_vector

torch.optim.SGD([torch.zeros(1)], 0.1)  # imports more of torch
init, train, commit = allfold.init, train_elastic.train, allfold.ElasticSampler.commit
redone = []

def say_and_init(**options):
    print("joins", flush=True)
    return init(**options)

def train_and_write(group, state, *others):
    print("trains", flush=True)
    train(group, state, *others)
    weights = parameters_to_vector(state.model.parameters()).detach().numpy()
    numpy.savez(result, weights=weights, counts=state.counts, redone=len(redone))

def commit_and_count(sampler):
    counts = commit(sampler)
    redone.extend([] if counts else [True])
    return counts

allfold.init, train_elastic.train = say_and_init, train_and_write
allfold.ElasticSampler.commit = commit_and_count
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is not there any more
for line in sys.stdin:
    env, arguments, log, result = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.environ.update(env)
        sys.argv[1:] = arguments
        output = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1), os.dup2(output, 2)
        train_elastic.main()
        break
    print(pid, flush=True)
"""


class Ranks:
    """The process that forks ranks; all of them end with it."""

    def __init__(self, services: Services) -> None:
        reader, self._orders = os.pipe2(os.O_CLOEXEC)
        self._child = Child(
            "the ranks",
            [sys.executable, "-c", RANKS.format(folder=str(ROOT / "examples"))],
            env=services.env,
            stdin=reader,
            stdout=subprocess.PIPE,
        )
        os.close(reader)

    def start(self, env: dict[str, str], arguments: list[str], log: Path, result: Path) -> int:
        """Start a rank; return a descriptor that is readable once it has ended."""
        line = json.dumps([env, arguments, str(log), str(result)]) + "\n"
        os.write(self._orders, line.encode())
        assert self._child.stdout is not None
        return os.pidfd_open(int(self._child.stdout.readline()))

    def close(self) -> None:
        """End all ranks."""
        stop_all([self._child], grace=0.0)
        self._child.close_streams()
        os.close(self._orders)


class Training:
    """One run of the example: its ranks, each on a node of its own.

    Args:
        nodes: with a rank from the beginning.
        spare: with a rank that joins as soon as another one has gone.
    """

    def __init__(
        self, services: Services, ranks: Ranks, name: str, nodes: list[str], spare: list[str]
    ) -> None:
        self._services = services
        self._ranks = ranks
        self._name = name
        self._world = len(nodes)
        self._pidfds: dict[str, int] = {}
        for rank, node in enumerate(nodes):
            numbers = {"ALLFOLD_RANK": str(rank), "ALLFOLD_WORLD_SIZE": str(len(nodes))}
            self._start(node, numbers)
        self.await_ranks("trains", len(nodes))
        for node in spare:
            self._start(node, {})
        self.await_ranks("joins", len(nodes + spare))

    def _start(self, node: str, numbers: dict[str, str]) -> None:
        where = {"ALLFOLD_SOCKET": self._services.socket_of(node), "ALLFOLD_GROUP": self._name}
        options = ["--epochs", str(EPOCHS), "--max-world", str(self._world), "--pause", "0.02"]
        files = self._file(node, "log"), self._file(node, "npz")
        self._pidfds[node] = self._ranks.start(where | numbers, options, *files)

    def _file(self, node: str, suffix: str) -> Path:
        return self._services.folder / f"{self._name}.{node}.{suffix}"

    def await_ranks(self, word: str, number: int) -> None:
        """Wait until so many ranks have said a word, those that are gone by now included."""
        what = f"{number} ranks say: {word}"
        wait_until(lambda: self.said().count(f"{word}\n") >= number, what, SECONDS)

    def await_end(self, node: str) -> None:
        """Wait until the rank on a node has ended."""
        ended = select.poll()
        ended.register(self._pidfds[node], select.POLLIN)
        assert ended.poll(SECONDS * 1000), f"the rank on {node} goes on; {self.said()}"

    def end(self) -> dict[str, np.ndarray]:
        """Wait for the end; return what all ranks have that came to it, the same on each."""
        for node in self._pidfds:
            self.await_end(node)
        files = [self._file(node, "npz") for node in self._pidfds]
        results = [dict(np.load(file)) for file in files if file.exists()]
        assert len(results) == self._world, self.said()
        for name in ("weights", "counts"):
            for each in results[1:]:
                np.testing.assert_array_equal(each[name], results[0][name], name)
        return results[0] | {"redone": max(each["redone"] for each in results)}

    def accuracy(self) -> float:
        """Return what the program has printed in the end."""
        found = re.search(r"elastic: ok accuracy=(\S+) each_image_once_per_epoch=yes", self.said())
        assert found, self.said()
        return float(found[1])

    def said(self) -> str:
        """Return what all ranks have printed."""
        logs = (self._file(node, "log") for node in self._pidfds)
        return "".join(log.read_text() for log in logs if log.exists())

    def drain(self, node: str) -> None:
        """Have a node drain, and wait until its rank has left."""
        post(f"{self._services.orchestrator_url}/v1/nodes/{node}/drain", ADMIN)
        self.await_end(node)

    def kill(self, node: str) -> None:
        """SIGKILL a node's agent and rank."""
        self._services.agents[node].child.signal(signal.SIGKILL)
        signal.pidfd_send_signal(self._pidfds[node], signal.SIGKILL)
        self._services.kill_agent(node)

    def close(self) -> None:
        """Forget the ranks."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)


class Nodes:
    """Nodes that nobody has used, one after the other."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._numbers = itertools.count()

    def start(self, number: int) -> list[str]:
        names = [f"node{next(self._numbers)}" for _ in range(number)]
        self._services.start_agents(*names)
        return names


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services(variables={"ALLFOLD_ADMIN_TOKEN": ADMIN}) as services:
        services.start_orchestrator()
        yield services


@pytest.fixture(scope="module")
def nodes(services: Services) -> Nodes:
    return Nodes(services)


@pytest.fixture(scope="module")
def ranks(services: Services) -> Iterator[Ranks]:
    ranks = Ranks(services)
    yield ranks
    ranks.close()


Start = Callable[..., Training]


@pytest.fixture(scope="module")
def start(services: Services, ranks: Ranks, nodes: Nodes) -> Iterator[Start]:
    """Start a training on nodes of its own; it has begun when this returns."""
    with ExitStack() as ending:

        def start(name: str, first: list[str], spare: list[str]) -> Training:
            training = Training(services, ranks, name, first, spare)
            ending.callback(training.close)
            return training

        yield start


Outcome = tuple[dict[str, np.ndarray], float]


@pytest.fixture(scope="module")
def undisturbed(start: Start, nodes: Nodes) -> Outcome:
    """Return the final state of four ranks, and its accuracy."""
    training = start("undisturbed", nodes.start(4), [])
    return training.end(), training.accuracy()


@pytest.mark.long
@pytest.mark.parametrize(("lose", "redone"), [(Training.drain, 0), (Training.kill, 2)])
def test_half_of_the_nodes_are_replaced_and_the_training_ends_as_if_nothing_had_happened(
    start: Start,
    nodes: Nodes,
    undisturbed: Outcome,
    lose: Callable[[Training, str], None],
    redone: int,
) -> None:
    first, spare = nodes.start(4), nodes.start(2)
    training = start(lose.__name__, first, spare)
    # Also the one with rank 0, which leads the decisions on losses.
    for number, node in enumerate((first[0], first[2]), start=1):
        lose(training, node)
        training.await_ranks("trains", len(first) + number)
    found, accuracy = training.end(), training.accuracy()
    expected, expected_accuracy = undisturbed
    assert (found["counts"] == EPOCHS).all(), "each image was used once in each epoch"
    assert found["redone"] == redone, "the steps in which somebody was killed, and no other"
    # The batches are the same, but their gradients are added up in another order: float32 rounds
    # them otherwise, by some 1e-7 of weights of up to 1.6. An image that has both classes alike by
    # that little may be taken for the other one.
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=0, atol=1e-5)
    assert accuracy == pytest.approx(expected_accuracy, abs=1.01 / TEST_IMAGES)
