"""The pods of two examples, as processes of this machine: their commands with their variables.

Kubernetes' part is played here: the index of a pod, and for the TrainJob the variables that
Kubeflow's Trainer gives torchrun. Addresses and sockets are of this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from allfold_cluster.environment import free_port
from allfold_cluster.processes import Child, stop_all, wait_for
from tests.deploy.manifests import EXAMPLES, Container, jobs, of_kind, read
from tests.support.processes.fixtures import services_with
from tests.support.processes.services import Services

OBJECTS = read(*EXAMPLES)
SECONDS = 100.0
PODS = 2
SOCKET = "/run/allfold/agent.sock"
PROGRAMS = {
    "allfold": [sys.executable, "-m", "allfold.cli"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}

services = services_with("node0", "node1")


def environment(container: Container) -> dict[str, str]:
    """Return the variables of a container; a field of the pod is what its path says."""
    return {
        name: str(each["value"]) if "value" in each else re.sub(r"\W+", "-", container.field(name))
        for name, each in container.environment.items()
    }


def started(
    services: Services, command: Sequence[str], variables: Mapping[str, str], pod: int
) -> Child:
    """Start the command of a pod on a node of its own."""
    socket = services.socket_of(f"node{pod}")
    here = {name: value.replace(SOCKET, socket) for name, value in variables.items()}
    program, *arguments = (
        re.sub(r"\$\((\w+)\)", lambda found: here[found[1]], each).replace(SOCKET, socket)
        for each in command
    )
    with log_of(services, pod).open("wb") as log:
        return Child(
            f"pod {pod}",
            [*PROGRAMS[program], *arguments],
            env=services.env | here,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def log_of(services: Services, pod: int) -> Path:
    return services.folder / f"pod-{pod}.log"


def run(
    services: Services, command: Sequence[str], variables: Mapping[str, str], index: str
) -> str:
    """Run a command in all pods, and return what they printed.

    Args:
        index: the variable that has the index of a pod.
    """
    pods = [started(services, command, {**variables, index: str(pod)}, pod) for pod in range(PODS)]
    try:
        ended = all(wait_for([pod], SECONDS) for pod in pods)
    finally:
        stop_all(
            pods, grace=30.0
        )  # torchrun has to end its ranks, which lead sessions of their own
    text = "".join(log_of(services, pod).read_text() for pod in range(PODS))
    assert ended, f"they hang\n{text}"
    assert [pod.status for pod in pods] == [0] * PODS, text
    return text


def groups_opened(services: Services) -> int:
    """Return how many groups the second node has been in."""
    return len(re.findall(r"opening \d+: \d+ ranks", (services.folder / "node1.log").read_text()))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_the_ddp_job_trains_on_allfold(services: Services) -> None:
    container = jobs(OBJECTS)["ddp"]
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = groups_opened(services)
    command = ["allfold", *container.spec["args"], "--backend", "gloo"]
    text = run(services, command, environment(container) | here, index="JOB_COMPLETION_INDEX")
    assert "ok accuracy=0." in text
    assert groups_opened(services) > before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_the_train_job_trains_on_allfold_with_the_environment_of_its_runtime(
    services: Services,
) -> None:
    container = jobs(OBJECTS)["allfold-torch"]
    ((_, job),) = of_kind(OBJECTS, "TrainJob").items()
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == PODS
    of_trainer = {
        "PET_NNODES": str(PODS),
        "PET_NPROC_PER_NODE": container.spec["resources"]["requests"]["cpu"],
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    here = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # the SDK is installed here
    before = groups_opened(services)
    variables = environment(container) | of_trainer | here
    text = run(services, trainer["command"], variables, index="PET_NODE_RANK")
    assert "ddp on gloo: ok accuracy=0." in text  # the script believes that it is
    assert groups_opened(services) > before
