"""The scripts of the chart for Redis with Sentinel, on three addresses of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deploy.manifests import CHART
from tests.support.require import requires
from tests.support.waiting import wait_until

SCRIPTS = CHART / "files"
SECONDS = 60.0


class Pod:
    """A Redis and its Sentinel, as in one pod."""

    def __init__(self, host: str, hosts: list[str], folder: Path) -> None:
        self.host = host
        self.folder = folder
        self._environment = os.environ | {
            "HOST": host,
            "HOSTS": " ".join(hosts),
            "LISTEN": host,
            "DATA": str(folder),
            "MAX_MEMORY": "64mb",
            "REDISCLI_AUTH": "first",
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, password: str = "first") -> None:
        self._environment["REDISCLI_AUTH"] = password
        self.folder.mkdir(exist_ok=True)
        for name in ("sentinel", "redis"):
            with (self.folder / f"{name}.log").open("ab") as log:
                command = ["sh", str(SCRIPTS / f"{name}.sh")]
                process = subprocess.Popen(
                    command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
                )
            self._processes.append(process)

    def kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        self._processes.clear()

    def asks(self, *command: str, port: int = 6379) -> str:
        done = subprocess.run(
            ["redis-cli", "-h", self.host, "-p", str(port), *command],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return done.stdout.strip()

    @property
    def role(self) -> str:
        return self.asks("role").partition("\n")[0]

    @property
    def known_primary(self) -> str:
        """The primary as this pod's Sentinel has it."""
        asked = ("sentinel", "get-master-addr-by-name", "allfold")
        return self.asks(*asked, port=26379).partition("\n")[0]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    requires("redis")
    hosts = [f"127.26.{os.getpid() % 250}.{index}" for index in (1, 2, 3)]
    pods = [Pod(host, hosts, tmp_path / host) for host in hosts]
    with ExitStack() as ended:
        for pod in pods:
            ended.callback(pod.kill)
            pod.start()
        yield pods


def roles(pods: list[Pod]) -> list[str]:
    return [pod.role for pod in pods]


def know_each_other(pods: list[Pod]) -> bool:
    """Tell if every Sentinel knows the two others, which have to agree, and both replicas."""
    asked = ("sentinel", "master", "allfold")
    known = (pod.asks(*asked, port=26379) for pod in pods)
    return all("num-other-sentinels\n2" in each and "num-slaves\n2" in each for each in known)


def takes_writes(pod: Pod, value: str) -> bool:
    return pod.asks("set", "key", value) == "OK"


def have(pods: list[Pod], value: str) -> list[bool]:
    return [pod.asks("get", "key") == value for pod in pods]


def primaries(pods: list[Pod]) -> set[str]:
    """The primaries that the Sentinels know; one, when they agree."""
    return {pod.known_primary for pod in pods}


def test_another_redis_takes_over_and_all_of_them_agree(pods: list[Pod]) -> None:
    first, *others = pods
    wait_until(lambda: roles(pods) == ["master", "slave", "slave"], "the first leads", SECONDS)
    wait_until(lambda: takes_writes(first, "kept"), "a replica is there", SECONDS)
    wait_until(lambda: know_each_other(pods), "the Sentinels know each other", SECONDS)
    # Redis says OK before its replicas have it.
    wait_until(lambda: all(have(others, "kept")), "the replicas have what was written", SECONDS)

    first.kill()
    wait_until(lambda: sorted(roles(others)) == ["master", "slave"], "another leads", SECONDS)
    (primary,) = (pod for pod in others if pod.role == "master")
    assert primary.asks("get", "key") == "kept"
    wait_until(lambda: takes_writes(primary, "newer"), "it takes writes", SECONDS)

    # Started again, with its volume, the first is a replica and has what was written since.
    first.start()
    wait_until(lambda: first.asks("get", "key") == "newer", "the first is a replica", SECONDS)
    assert first.role == "slave"
    wait_until(lambda: primaries(pods) == {primary.host}, "all Sentinels agree", SECONDS)

    # Also when its volume is lost: it asks the others.
    first.kill()
    (first.folder / "sentinel.conf").unlink()
    first.start()
    wait_until(lambda: first.role == "slave", "the first is a replica again", SECONDS)
    wait_until(lambda: primaries(pods) == {primary.host}, "all Sentinels agree again", SECONDS)


@pytest.mark.long
def test_a_new_password_is_taken_when_the_pods_are_started_again(pods: list[Pod]) -> None:
    wait_until(lambda: roles(pods) == ["master", "slave", "slave"], "the first leads", SECONDS)
    for pod in pods:
        pod.kill()
    for pod in pods:
        pod.start(password="second")
    wait_until(lambda: roles(pods) == ["master", "slave", "slave"], "it leads again", SECONDS)
    wait_until(lambda: know_each_other(pods), "the Sentinels know each other", SECONDS)
    wait_until(lambda: takes_writes(pods[0], "kept"), "it takes writes", SECONDS)
