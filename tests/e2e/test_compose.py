"""The whole of docker-compose.yml for real: images, order of start, a training, no traces."""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.processes import docker
from tests.support.processes.ports import free_address
from tests.support.require import requires
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1500)]

TRAINING_SECONDS = 600.0  # seconds on a free machine
# What must be healthy, or done, before what starts.
GATES = {
    "orchestrator": ("redis", "token"),
    "agent-a": ("orchestrator",),
    "agent-b": ("orchestrator",),
    "train-a": ("agent-a",),
    "train-b": ("agent-b",),
}
KILLED = 137
LONG_RUNNING = ("redis", "orchestrator", "agent-a", "agent-b")


@dataclass(frozen=True)
class Stack:
    """The running project, and what its containers did until all had started."""

    project: docker.Project
    events: list[dict[str, Any]]

    @property
    def services(self) -> list[str]:
        return self.project.services()

    @property
    def url(self) -> str:
        return f"http://{self.project.env['ALLFOLD_PUBLISH']}"

    def token(self) -> str:
        shown = ("exec", self.project.container("orchestrator"), "cat", "/run/allfold-token/token")
        return self.project.docker(*shown)


@dataclass(frozen=True)
class Ending:
    exit_codes: dict[str, int]
    before: list[str]
    left: list[str]
    logs: str


# Each step has a fixture and a test of its own, so that none runs into faulthandler's time limit.
@pytest.fixture(scope="module")
def engine() -> Iterator[docker.Environment]:
    requires("docker")
    with docker.engine() as env:
        yield env


@pytest.fixture(scope="module")
def bases(engine: docker.Environment) -> docker.Environment:
    docker.provide_bases(engine)
    docker.provide_wheels(engine)
    return engine


@pytest.fixture(scope="module")
def images(bases: docker.Environment) -> docker.Project:
    name = f"allfold-test-{os.getpid()}"
    project = docker.Project.of(name, bases, ALLFOLD_PUBLISH=free_address(), ALLFOLD_TOKEN="")
    # One service per image: Compose v1 would build the others, which share them, once more.
    project.compose("build", "orchestrator", "agent-a", "train-a", seconds=1200.0)
    return project


@pytest.fixture(scope="module")
def up(request: pytest.FixtureRequest, images: docker.Project) -> Iterator[Stack]:
    with ended_with_logs_of_failures(request, images):
        with images.events() as events:
            images.compose("up", "--detach", "--no-build", seconds=300.0)
        yield Stack(images, events)


@pytest.fixture(scope="module")
def trained(up: Stack) -> Stack:
    """The stack after its training, however that ended."""
    up.project.wait("train-a", "train-b", seconds=TRAINING_SECONDS)
    return up


@dataclass(frozen=True)
class Scaling:
    """An elastic training whose containers became more and fewer while it ran.

    Attributes:
        said: the lines of its rank 0.
        sizes: the numbers of ranks that it has had, one after the other.
        statuses: the exit statuses of all containers, in the order in which they ended.
    """

    said: list[str]
    sizes: list[int]
    statuses: list[int]


@pytest.fixture(scope="module")
def scaled(request: pytest.FixtureRequest, trained: Stack) -> Scaling:
    """Scale the elastic training to 2, 4 and 2 containers, and let it end."""
    project = trained.project
    with logs_of_failures(request, project):
        with project.events() as events:
            for wanted in (2, 4, 2):
                scale(project, wanted)
            left = project.containers("elastic")
            project.docker("wait", *left, seconds=TRAINING_SECONDS)
        ends = [
            int(event["Actor"]["Attributes"]["exitCode"])
            for event in events
            if event["Action"] == "die" and service_of(event) == "elastic"
        ]
        return Scaling(said_by_rank_0(project), training_sizes(project), ends)


def scale(project: docker.Project, number: int) -> None:
    """Have so many containers train; those that are there stay as they are."""
    command = ("--profile", "elastic", "up", "--detach", "--no-build", "--no-recreate")
    project.compose(*command, "--scale", f"elastic={number}", "elastic", seconds=300.0)
    wait_until(
        lambda: training_sizes(project)[-1:] == [number],
        f"{number} ranks train",
        TRAINING_SECONDS,
    )


def said_by_rank_0(project: docker.Project) -> list[str]:
    """The lines of the container that is rank 0 of the elastic training: the first in the group."""
    logs = [project.docker("logs", each) for each in project.containers("elastic")]
    return max(logs, key=len).splitlines()


def training_sizes(project: docker.Project) -> list[int]:
    """The numbers of ranks that the elastic training has had so far."""
    found = (re.fullmatch(r"epoch \d+ of \d+, ranks: (\d+)", s) for s in said_by_rank_0(project))
    return [int(size[1]) for size in found if size]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, trained: Stack, scaled: Scaling) -> Ending:
    """Stop the stack and take it down, after all other tests; return its exit codes and remains."""
    project = trained.project
    with ended_with_logs_of_failures(request, project):
        project.compose("stop", "--timeout", "10", *LONG_RUNNING)
        codes = {name: project.inspect(name)["State"]["ExitCode"] for name in LONG_RUNNING}
        before, logs = project.leftovers(), project.logs()
    return Ending(codes, before, project.leftovers(), logs)


@contextmanager
def ended_with_logs_of_failures(
    request: pytest.FixtureRequest, project: docker.Project
) -> Iterator[None]:
    """Take the project down in the end; its logs go to the terminal before if anything failed."""
    try:
        with logs_of_failures(request, project):
            yield
    finally:
        project.down()


@contextmanager
def logs_of_failures(request: pytest.FixtureRequest, project: docker.Project) -> Iterator[None]:
    """Show the project's logs on the terminal if anything has failed."""
    good = False
    try:
        yield
        good = request.session.testsfailed == 0
    finally:
        if not good and project.leftovers():
            show(request, project.logs())


def show(request: pytest.FixtureRequest, logs: str) -> None:
    """Straight to the terminal: pytest keeps what a fixture prints for the fixture's failures."""
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.write_sep("=", "logs of all services")
        reporter.write_line(logs)


def fetch(url: str, token: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_base_images_are_pulled_or_stood_in_for(bases: docker.Environment) -> None:
    for image in docker.BASE_IMAGES:
        docker.run(["docker", "image", "inspect", image], bases)


def test_all_images_build(images: docker.Project) -> None:
    for image in ("orchestrator", "agent", "job"):
        assert f"allfold-{image}" in images.docker("image", "ls")


def test_all_services_come_up(up: Stack) -> None:
    assert moments(up, "start").keys() == set(up.services)


def test_the_training_ends_well_on_both_nodes(trained: Stack) -> None:
    for service in ("train-a", "train-b"):
        assert trained.project.inspect(service)["State"]["ExitCode"] == 0, service


def test_rank_0_reports_its_accuracy_and_identical_ranks_last(trained: Stack) -> None:
    printed = trained.project.docker("logs", trained.project.container("train-a")).splitlines()
    last = [line for line in printed if line.startswith("[0] ")][-1]
    assert re.fullmatch(r"\[0\] demo: ok accuracy=\d+\.\d+ ranks_identical=yes", last), last


def test_nothing_starts_before_what_it_depends_on_is_ready(up: Stack) -> None:
    started = moments(up, "start")
    ready = moments(up, "die") | moments(up, "health_status: healthy")
    late = [(a, b) for a, gates in GATES.items() for b in gates if not ready[b] < started[a]]
    assert late == []


def moments(stack: Stack, action: str) -> dict[str, int]:
    """Return the time of each service's first event of the kind, in nanoseconds."""
    first: dict[str, int] = {}
    for event in stack.events:
        if event["Action"] == action:
            first.setdefault(service_of(event), event["timeNano"])
    return first


def service_of(event: dict[str, Any]) -> str:
    return str(event["Actor"]["Attributes"][docker.SERVICE_LABEL])


def test_no_service_runs_as_root(up: Stack) -> None:
    users = {service: up.project.inspect(service)["Config"]["User"] for service in up.services}
    assert [service for service, user in users.items() if user in ("", "0", "root")] == []
    for service in LONG_RUNNING:
        shown = up.project.docker("top", up.project.container(service), "-eo", "pid,uid")
        owners = [line.split()[1] for line in shown.splitlines()[1:]]
        assert owners
        assert "0" not in owners, f"{service} has a process of root"


def test_every_service_has_a_read_only_root_and_no_capabilities(up: Stack) -> None:
    for service in up.services:
        host = up.project.inspect(service)["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service


def test_only_the_orchestrator_is_published_and_only_to_this_machine(up: Stack) -> None:
    bindings = {
        service: up.project.inspect(service)["HostConfig"]["PortBindings"] or {}
        for service in up.services
    }
    published = {service: ports for service, ports in bindings.items() if ports}
    assert list(published) == ["orchestrator"]
    assert [
        [place["HostIp"] for place in places] for places in published["orchestrator"].values()
    ] == [["127.0.0.1"]]


def test_jobs_have_no_network_at_all(up: Stack) -> None:
    for service in ("train-a", "train-b"):
        assert list(up.project.inspect(service)["NetworkSettings"]["Networks"]) == ["none"]


def test_the_orchestrator_is_ready_on_its_published_port(up: Stack) -> None:
    status, body = fetch(f"{up.url}/readyz")
    assert status == 200, body


def test_the_api_wants_the_token_that_was_made_for_this_project(up: Stack) -> None:
    assert fetch(f"{up.url}/v1/nodes")[0] == 401
    status, body = fetch(f"{up.url}/v1/nodes", up.token())
    assert status == 200, body
    assert "agent-a" in body
    assert "agent-b" in body


@pytest.mark.parametrize("service", ["orchestrator", "agent-a"])
def test_status_in_a_container_needs_no_arguments(up: Stack, service: str) -> None:
    shown = json.loads(allfold_in(up, service, "status", "--json"))
    assert sorted(node["node"] for node in shown["nodes"]) == ["agent-a", "agent-b"]
    assert sorted(each["node"] for each in shown["agents"].values()) == ["agent-a", "agent-b"]
    assert shown["problems"] == {}


@pytest.mark.parametrize("service", ["orchestrator", "agent-a"])
def test_doctor_in_a_container_finds_every_way_between_the_nodes_open(
    up: Stack, service: str
) -> None:
    report = json.loads(allfold_in(up, service, "doctor", "--json"))
    assert report["counts"]["fail"] == 0
    assert {(each["source"], each["target"]) for each in report["links"]} == {
        ("agent-a", "agent-b"),
        ("agent-b", "agent-a"),
    }


def allfold_in(stack: Stack, service: str, *arguments: str) -> str:
    """The output of the allfold command in a service's container; it must end with status 0."""
    return stack.project.compose("exec", "-T", service, "allfold", *arguments)


def test_the_token_shows_in_no_inspect(up: Stack) -> None:
    token = up.token()
    assert len(token) >= 32
    assert [s for s in up.services if token in json.dumps(up.project.inspect(s))] == []


def test_a_training_goes_on_while_it_is_scaled_up_and_down(scaled: Scaling) -> None:
    """Every container ends well: those that leave, and those that stay to the end."""
    assert re.fullmatch(
        r"elastic: ok accuracy=\d+\.\d+ each_image_once_per_epoch=yes", scaled.said[-1]
    )
    assert {2, 4} <= set(scaled.sizes)
    assert scaled.statuses == [0] * 4


def test_services_end_by_themselves_when_told_to(ended: Ending) -> None:
    killed = [service for service, code in ended.exit_codes.items() if code == KILLED]
    assert killed == [], ended.logs


def test_down_leaves_nothing_behind(ended: Ending) -> None:
    assert ended.before != []
    assert ended.left == []
