"""The running stack of docker-compose.yml, for tests: what it says, and what its containers did."""

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import docker
from tests.support.waiting import wait_until

TRAINING_SECONDS = 600.0  # seconds on a free machine
LOOK_SECONDS = 0.5  # between two looks at a stack, each of which starts processes or asks services
LONG_RUNNING = ("redis", "orchestrator", "agent-a", "agent-b")

# Prints the modules that a read-only container would compile at each start. Compiled files have the
# time of their source.
PRINT_UNCOMPILED = """
from importlib.util import cache_from_source
from pathlib import Path

def is_compiled(source):
    compiled = Path(cache_from_source(source))
    made_of = int(source.stat().st_mtime).to_bytes(4, "little")
    return compiled.exists() and compiled.read_bytes()[8:12] == made_of

for source in Path("/opt/venv/lib").rglob("*.py"):
    if "tests" not in source.parts and not source.name.startswith("py312_"):
        if not is_compiled(source):
            print(source)
"""


@dataclass(frozen=True)
class Stack:
    """The running project, and what its containers did until all had started."""

    project: docker.Project
    events: list[dict[str, Any]]

    @property
    def address(self) -> str:
        """The address at which the orchestrator is published."""
        return self.project.env["ALLFOLD_PUBLISH"]

    def token(self) -> str:
        shown = ("exec", self.project.container("orchestrator"), "cat", "/run/allfold-token/token")
        return self.project.docker(*shown)

    def ask(self, path: str, token: str | None = None) -> tuple[int, str]:
        """The status and body of the orchestrator's answer."""
        return fetch(f"http://{self.address}{path}", token)

    def began(self) -> dict[str, str]:
        """The start times of the services that go on."""
        found = self.project.inspect()
        return {service: found[service]["State"]["StartedAt"] for service in LONG_RUNNING}


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


def scale(project: docker.Project, number: int) -> None:
    """Have so many containers train; those that are there stay as they are."""
    command = ("--profile", "elastic", "up", "--detach", "--no-build", "--no-recreate")
    project.compose(*command, "--scale", f"elastic={number}", "elastic", seconds=300.0)
    wait_until(
        lambda: training_sizes(project)[-1:] == [number],
        f"{number} ranks train",
        TRAINING_SECONDS,
        LOOK_SECONDS,
    )


def said_by_rank_0(project: docker.Project) -> list[str]:
    """The lines of the container that is rank 0 of the elastic training: the first in the group."""
    logs = [project.docker("logs", each) for each in project.containers("elastic")]
    return max(logs, key=len).splitlines()


def training_sizes(project: docker.Project) -> list[int]:
    """The numbers of ranks that the elastic training has had so far."""
    found = (re.fullmatch(r"epoch \d+ of \d+, ranks: (\d+)", s) for s in said_by_rank_0(project))
    return [int(size[1]) for size in found if size]


def moments(events: list[dict[str, Any]], action: str) -> dict[str, int]:
    """Return the time of each service's first event of the kind, in nanoseconds."""
    first: dict[str, int] = {}
    for event in list(events):
        if event["Action"] == action:
            first.setdefault(service_of(event), event["timeNano"])
    return first


def ends(events: list[dict[str, Any]], service: str) -> list[int]:
    """Return the exit statuses of a service's containers, in the order in which they ended."""
    return [
        int(event["Actor"]["Attributes"]["exitCode"])
        for event in list(events)
        if event["Action"] == "die" and service_of(event) == service
    ]


def service_of(event: dict[str, Any]) -> str:
    return str(event["Actor"]["Attributes"][docker.SERVICE_LABEL])


def allfold_in(stack: Stack, service: str, *arguments: str) -> str:
    """The output of the allfold command in a service's container; it must end with status 0."""
    command = ("exec", stack.project.container(service), "allfold", *arguments)
    return stack.project.docker(*command, seconds=120.0)


def uncompiled(project: docker.Project, image: str) -> list[str]:
    """The modules of an image that each of its containers would compile at every start."""
    run = ("run", "--rm", "--network", "none", "--entrypoint", "python", image)
    return project.docker(*run, "-IS", "-c", PRINT_UNCOMPILED).splitlines()


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


def fetch(url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> tuple[int, str]:
    """The status and body of an answer; OSError where no HTTP is spoken."""
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10, context=tls) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@dataclass(frozen=True)
class Prometheus:
    """The Prometheus of the stack, at the address at which it is published."""

    address: str

    def ask(self, path: str) -> Any:
        status, body = fetch(f"http://{self.address}/api/v1/{path}")
        assert status == 200, body
        return json.loads(body)["data"]

    def scraped(self) -> set[tuple[str, str, str]]:
        """The scheme, the node (or the job, where there is none) and the state of each target."""
        return {
            (
                target["scrapeUrl"].partition(":")[0],
                target["labels"].get("node", target["labels"]["job"]),
                target["health"],
            )
            for target in self.ask("targets?state=active")["activeTargets"]
        }

    def is_ready(self) -> bool:
        """Tell if it serves; while it starts, the engine takes connections and drops them."""
        try:
            return fetch(f"http://{self.address}/-/ready")[0] == 200
        except OSError:
            return False

    def wait_for(self, scheme: str) -> None:
        """Wait until it has scraped all services, by this scheme."""
        wait_until(self.is_ready, "Prometheus serves", pause=LOOK_SECONDS)
        wanted = {(scheme, each, "up") for each in ("allfold-orchestrator", "agent-a", "agent-b")}
        wait_until(lambda: self.scraped() == wanted, f"{wanted} are scraped", 90.0, LOOK_SECONDS)


def certificate(project: docker.Project, name: str, folder: Path) -> ssl.SSLContext:
    """The certificate that the stack made for a client, copied out of its volume to the folder."""
    source = f"{project.container('certs')}:/run/allfold-certs/{name}"
    project.docker("cp", source, str(folder))
    context = ssl.create_default_context(cafile=str(folder / name / "ca.crt"))
    context.load_cert_chain(folder / name / "tls.crt", folder / name / "tls.key")
    return context
