"""The objects of deploy/kubernetes, and what belongs together in them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from tests.support.require import requires

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
BASE_FILES = sorted((FOLDER / "base").glob("*.yaml"))
JOB_FILES = [FOLDER / "examples" / name for name in ("job.yaml", "job-gpu.yaml")]
OVERLAYS = ("overlays/gpu", "overlays/gpu-volume-mounts")
PAGE = (ROOT / "docs" / "gpu_deployment.md").read_text()
NAME = "app.kubernetes.io/name"

Object = dict[str, Any]


def read(*paths: Path) -> list[Object]:
    return [found for path in paths for found in yaml.safe_load_all(path.read_text())]


@cache
def built(folder: Path) -> list[Object]:
    """Return the objects that ``kubectl apply -k`` would send."""
    requires("kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: Sequence[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


class Container(NamedTuple):
    """One container with what it belongs to."""

    owner: str
    kind: str
    pod: Object
    spec: Object

    @property
    def name(self) -> tuple[str, str]:
        return self.owner, self.spec["name"]

    @property
    def environment(self) -> dict[str, Object]:
        return {each["name"]: each for each in self.spec.get("env", ())}

    def value(self, variable: str) -> str:
        return str(self.environment[variable]["value"])

    def field(self, variable: str) -> str:
        return str(self.environment[variable]["valueFrom"]["fieldRef"]["fieldPath"])

    def mount(self, path: str) -> tuple[Object, Object]:
        """Return the mount at a path, and its volume."""
        (mount,) = (each for each in self.spec["volumeMounts"] if each["mountPath"] == path)
        (volume,) = (each for each in self.pod["volumes"] if each["name"] == mount["name"])
        return mount, volume


def workloads(objects: Sequence[Object]) -> Iterator[Object]:
    """Iterate over the objects that make pods."""
    return (each for each in objects if "template" in each.get("spec", {}))


def containers(objects: Sequence[Object]) -> Iterator[Container]:
    for each in workloads(objects):
        pod = each["spec"]["template"]["spec"]
        for spec in [*pod.get("initContainers", ()), *pod["containers"]]:
            yield Container(each["metadata"]["name"], each["kind"], pod, spec)


def services(objects: Sequence[Object]) -> dict[str, Container]:
    """The containers that run for good, by the name of what they belong to."""
    return {each.owner: each for each in containers(objects) if each.name in SERVICES}


def jobs(objects: Sequence[Object]) -> dict[str, Container]:
    return {each.owner: each for each in containers(objects) if each.name in JOBS}


SOCKET_FOLDER = ("agent", "socket-folder")
SERVICES = {("agent", "agent"), ("orchestrator", "orchestrator"), ("redis", "redis")}
JOBS = {("digits", "train"), ("digits-gpu", "train")}
CONTAINERS = {SOCKET_FOLDER, *SERVICES, *JOBS}
