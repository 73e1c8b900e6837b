"""A Docker engine and one Compose project for tests.

An engine of our own leaves nothing but its empty chains in the firewall's tables.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[3]
BASE_IMAGES = ("python:3.11-slim-bookworm", "redis:7-bookworm")
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
BASE_FILE = ROOT / "docker-compose.yml"
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
ENGINE_START_SECONDS = 60.0
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"

Environment = dict[str, str]


class DockerFailed(AssertionError):
    """A Docker command failed; the text has its output."""


def run(command: Sequence[str], env: Environment, seconds: float = 60.0) -> str:
    """The standard output of a command; DockerFailed with all it printed when it fails."""
    done = subprocess.run(
        command, env=env, cwd=ROOT, timeout=seconds, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = f"{done.stdout[-20_000:]}\n{done.stderr[-20_000:]}"
        raise DockerFailed(f"{' '.join(command)}: exit {done.returncode}\n{said}")
    return done.stdout


def succeeds(command: Sequence[str], env: Environment, seconds: float = 60.0) -> bool:
    try:
        run(command, env, seconds)
    except (DockerFailed, OSError, subprocess.TimeoutExpired):
        return False
    return True


def answers(env: Environment) -> bool:
    """Tell if a Docker engine answers."""
    return succeeds(["docker", "version", "--format", "{{.Server.Version}}"], env, 10.0)


def compose_command(env: Environment) -> list[str]:
    """`docker compose` (v2) or `docker-compose` (v1), whichever is there."""
    if succeeds(["docker", "compose", "version"], env):
        return ["docker", "compose"]
    return ["docker-compose"]


def missing() -> str | None:
    """Return why no Compose test can run here, or ``None``."""
    env = dict(os.environ)
    if shutil.which("docker") is None:
        return "the docker command is not installed"
    if compose_command(env) == ["docker-compose"] and shutil.which("docker-compose") is None:
        return "neither docker compose nor docker-compose is installed"
    if answers(env):
        return None
    if os.geteuid() != 0:
        return "no Docker engine answers, and only root can start one"
    if shutil.which("dockerd") is None:
        return "no Docker engine answers, and dockerd is not installed"
    return None


def with_defaults(text: str) -> str:
    """A value of a Compose file with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def profiles() -> dict[str, list[str]]:
    """The services of docker-compose.yml with their profiles."""
    services = yaml.safe_load(BASE_FILE.read_text())["services"]
    return {name: service.get("profiles", []) for name, service in services.items()}


def all_profiles() -> str:
    """The profiles of docker-compose.yml, as COMPOSE_PROFILES takes them; v1 knows no ``*``."""
    return ",".join(sorted({each for found in profiles().values() for each in found}))


def default_services() -> list[str]:
    """The services of docker-compose.yml that start when nobody asks for a profile."""
    return [name for name, found in profiles().items() if not found]


@contextmanager
def engine() -> Iterator[Environment]:
    """The environment to reach a Docker engine with: the one that answers, or one of our own.

    `ALLFOLD_DOCKER_ROOT` names a folder where our own keeps its images between runs; without it
    they go with the engine.
    """
    env = dict(os.environ)
    if answers(env):
        yield env
        return
    kept = os.environ.get("ALLFOLD_DOCKER_ROOT")
    # Unix socket paths are short, so the folder is not below pytest's.
    run_folder = Path(tempfile.mkdtemp(prefix="allfold-docker-"))
    data = Path(kept) if kept else run_folder / "data"
    try:
        with _forwarding(), _dockerd(run_folder, data) as env:
            yield env
    finally:
        _unmount_below(run_folder)
        shutil.rmtree(run_folder)


@contextmanager
def _forwarding() -> Iterator[None]:
    """IP forwarding, as before at the end.

    dockerd would switch it on itself, but then it also makes the firewall drop whatever anybody
    else forwards, and leaves both so.
    """
    before = FORWARDING.read_text()
    FORWARDING.write_text("1")
    try:
        yield
    finally:
        FORWARDING.write_text(before)


def _unmount_below(folder: Path) -> None:
    """dockerd leaves the mount of its network namespace behind."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in mounted:
        if Path(place).is_relative_to(folder):
            subprocess.run(["umount", place], check=True, timeout=30)


@contextmanager
def _dockerd(folder: Path, data: Path) -> Iterator[Environment]:
    address = f"unix://{folder}/docker.sock"
    env = os.environ | {"DOCKER_HOST": address}
    log = folder / "log"
    command = ["dockerd", "--host", address, "--data-root", str(data)]
    command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    # Builds use the host's network and Compose makes its own bridges; docker0 would stay behind.
    command += ["--bridge", "none"]
    # A signal when its parent dies: tests that are killed leave no engine running.
    command = ["setpriv", "--pdeathsig", "TERM", *command]
    with (
        log.open("wb") as output,
        # A session of its own: a Ctrl-C ends the tests, which then need the engine to clean up.
        subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            _wait_until_up(process, env, log)
            yield env
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_up(process: subprocess.Popen[bytes], env: Environment, log: Path) -> None:
    deadline = time.monotonic() + ENGINE_START_SECONDS
    while not answers(env):
        if process.poll() is not None or time.monotonic() > deadline:
            raise DockerFailed(f"dockerd did not come up; its log ends:\n{log.read_text()[-5000:]}")
        time.sleep(0.1)


def provide_images(env: Environment, *images: str) -> None:
    """Images of others: those that are there, else pulled, else local stand-ins."""
    for image in images:
        if not succeeds(["docker", "image", "inspect", image], env):
            succeeds(["docker", "pull", "--quiet", image], env, 120.0)
    run(["deploy/docker/stand-in-bases.sh", *images], env, 600.0)


def provide_wheels(env: Environment) -> None:
    """torch as this machine's pip finds it; if that is no CPU build the images take PyTorch's."""
    succeeds(["deploy/docker/prepare-wheels.sh"], env, 600.0)


@dataclass(frozen=True)
class Project:
    """One Compose project made of the repository's docker-compose.yml, and overlays of it.

    What needs no Compose is asked of the engine: docker-compose takes half a second to start.
    """

    name: str
    env: Environment
    command: tuple[str, ...]

    @classmethod
    def of(cls, name: str, env: Environment, **settings: str) -> "Project":
        command = (*compose_command(env), "--project-name", name)
        return cls(name, env, command).overlaid(**settings)

    def overlaid(self, *overlays: str, **settings: str) -> "Project":
        """The same project with these files, besides docker-compose.yml, and variables."""
        files = os.pathsep.join((BASE_FILE.name, *overlays))
        return replace(self, env=self.env | {"COMPOSE_FILE": files} | settings)

    def compose(self, *arguments: str, seconds: float = 120.0) -> str:
        return run([*self.command, *arguments], self.env, seconds)

    def docker(self, *arguments: str, seconds: float = 60.0) -> str:
        return run(["docker", *arguments], self.env, seconds)

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        (found,) = self.containers(service)
        return found

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers, running or not."""
        return self._mine("ps", "--all", "--filter", f"label={SERVICE_LABEL}={service}")

    def inspect(self) -> dict[str, dict[str, Any]]:
        """Return the engine's record of a container of each service, by the name of the service."""
        found = json.loads(self.docker("inspect", *self._mine("ps", "--all")))
        return {each["Config"]["Labels"][SERVICE_LABEL]: each for each in found}

    def exit_codes(self, *services: str) -> dict[str, int]:
        """Return the exit codes of services that have ended, by their names."""
        found = self.inspect()
        return {service: found[service]["State"]["ExitCode"] for service in services}

    def wait(self, *services: str, seconds: float) -> None:
        """Wait until services that end by themselves have ended."""
        containers = [self.container(service) for service in services]
        self.docker("wait", *containers, seconds=seconds)

    def logs(self) -> str:
        """Return the output of all services, with timestamps."""
        return self._whole().compose("logs", "--no-color", "--timestamps")

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of the project that are still there."""
        lists = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [each for command in lists for each in self._mine(*command)]

    def down(self) -> None:
        if self.leftovers():
            self._whole().compose("down", "--volumes", "--remove-orphans")

    def _mine(self, *command: str) -> list[str]:
        """Return the ids that a listing command of the engine prints for this project."""
        mine = ("--quiet", "--filter", f"label={PROJECT_LABEL}={self.name}")
        return self.docker(*command, *mine).split()

    def _whole(self) -> "Project":
        """With all that was ever added to it, which Compose v2 would leave alone otherwise."""
        overlays = sorted(path.name for path in ROOT.glob("docker-compose.*.yml"))
        return self.overlaid(*overlays, COMPOSE_PROFILES=all_profiles())

    @contextmanager
    def events(self) -> Iterator[list[dict[str, Any]]]:
        """Starts, ends and health changes of containers; the list grows while they happen."""
        command = ["docker", "events", "--format", "{{json .}}", "--filter", "type=container"]
        command += ["--filter", f"label={PROJECT_LABEL}={self.name}"]
        for kind in ("start", "die", "health_status"):
            command += ["--filter", f"event={kind}"]
        command += ["--since", str(time.time())]  # nothing is lost before the stream is open
        found: list[dict[str, Any]] = []
        with subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True) as stream:
            assert stream.stdout is not None
            reader = Thread(target=_read_events, args=(stream.stdout, found))
            reader.start()
            try:
                yield found
            finally:
                stream.terminate()
                reader.join(30)


def _read_events(lines: Iterable[str], into: list[dict[str, Any]]) -> None:
    for line in lines:
        into.append(json.loads(line))  # noqa: PERF401 - the list is looked at meanwhile
