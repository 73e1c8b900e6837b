"""The objects of deploy/kubernetes and of the chart, and what belongs together in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from tests.support.require import requires
from tools import kubernetes, kubernetes_manifests

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CHART = kubernetes_manifests.CHART
FILES = sorted(FOLDER.rglob("*.yaml"))
BASE_FILES = sorted((FOLDER / "base").glob("*.yaml"))
EXAMPLES = sorted((FOLDER / "examples").glob("*.yaml"))
OVERLAYS = ("overlays/gpu", "overlays/gpu-volume-mounts")
COMPONENTS = ("components/cert-manager", "components/monitoring", "components/tls")
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
GPU_PAGE = (ROOT / "docs" / "gpu_deployment.md").read_text()
NAME = "app.kubernetes.io/name"

Object = dict[str, Any]


def read(*paths: Path) -> list[Object]:
    return [found for path in paths for found in yaml.safe_load_all(path.read_text())]


@cache
def built(folder: Path) -> list[Object]:
    """Return the objects that ``kubectl apply -k`` would send."""
    requires("kubernetes-tools")
    return list(yaml.safe_load_all(kubernetes.run("kubectl", "kustomize", folder)))


def built_with(folder: Path, *components: str) -> list[Object]:
    """Return the objects of the base with components, in an overlay that is made in a folder."""
    paths = {name: os.path.relpath(FOLDER / name, folder) for name in ("base", *components)}
    kustomization = {
        "resources": [paths["base"]],
        "components": [paths[name] for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return built(folder)


def charted(*values: str) -> list[Object]:
    """Return the objects that ``helm install --set ...`` would send."""
    requires("kubernetes-tools")
    rendered = kubernetes_manifests.rendered(values)
    found = [each for text in rendered.values() for each in yaml.safe_load_all(text)]
    return [each for each in found if each is not None]


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


def pod_templates(found: Any) -> Iterator[Object]:
    """Iterate over the templates of pods, however deep they lie in an object."""
    if isinstance(found, dict):
        if "containers" in (found.get("spec") or ()):
            yield found
        for each in found.values():
            yield from pod_templates(each)
    elif isinstance(found, list):
        for each in found:
            yield from pod_templates(each)


def workloads(objects: Sequence[Object]) -> Iterator[Object]:
    """Iterate over the objects that make pods."""
    return (each for each in objects if any(pod_templates(each)))


def containers(objects: Sequence[Object]) -> Iterator[Container]:
    for each in objects:
        for template in pod_templates(each):
            pod = template["spec"]
            for spec in [*pod.get("initContainers", ()), *pod["containers"]]:
                yield Container(each["metadata"]["name"], each["kind"], pod, spec)


def services(objects: Sequence[Object]) -> dict[str, Container]:
    """The containers that run for good, by the name of what they belong to."""
    return {each.owner: each for each in containers(objects) if each.name in SERVICES}


def jobs(objects: Sequence[Object]) -> dict[str, Container]:
    return {each.owner: each for each in containers(objects) if each.name in JOBS}


SOCKET_FOLDER = ("agent", "socket-folder")
SDK = ("allfold-torch", "allfold-sdk")
SERVICES = {("agent", "agent"), ("orchestrator", "orchestrator"), ("redis", "redis")}
JOBS = {
    ("allfold-torch", "node"),
    ("ddp", "train"),
    ("ddp-set", "train"),
    ("decode", "decode"),
    ("digits", "train"),
    ("digits-gpu", "train"),
    ("digits-queued", "train"),
    ("elastic", "train"),
}
CONTAINERS = {SOCKET_FOLDER, SDK, *SERVICES, *JOBS}
