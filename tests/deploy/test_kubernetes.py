"""What deploy/kubernetes promises: the files as they are, and what kubectl makes of them."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from fastapi import FastAPI
from pydantic import SecretStr
from tests.support.require import requires

from allfold_agent import __version__
from allfold_agent.agent import Agent
from allfold_agent.control import make_app
from allfold_agent.settings import AgentSettings
from allfold_orchestrator.app import create_app
from allfold_orchestrator.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
BASE_FILES = sorted((FOLDER / "base").glob("*.yaml"))
JOB_FILES = sorted((FOLDER / "examples").glob("*.yaml"))
SETTINGS = {
    "agent": {str(field.validation_alias) for field in AgentSettings.model_fields.values()},
    "orchestrator": {f"ALLFOLD_{name.upper()}" for name in Settings.model_fields},
}
PORTS = {"agent": {7411, 7412}, "orchestrator": {7400}, "redis": {6379}}
# Root, without a capability: see base/agent.yaml.
ROOTS = {("agent", "socket-folder")}
SOCKET_FOLDER = "/run/allfold"

Object = dict[str, Any]


def read(*paths: Path) -> list[Object]:
    return [found for path in paths for found in yaml.safe_load_all(path.read_text())]


@cache
def built(folder: Path) -> list[Object]:
    """What ``kubectl apply -k`` would send."""
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


@pytest.fixture(params=["files", "base", "overlays/gpu"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """All objects of an installation, and the example jobs."""
    if request.param == "files":
        found = [each for each in read(*BASE_FILES) if each["kind"] != "Kustomization"]
    else:
        found = built(FOLDER / request.param)
    return [*found, *read(*JOB_FILES)]


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


class Container(NamedTuple):
    """One container with what it belongs to."""

    owner: str
    kind: str
    pod: Object
    spec: Object

    @property
    def environment(self) -> dict[str, Object]:
        return {each["name"]: each for each in self.spec.get("env", ())}


def containers(objects: list[Object]) -> Iterator[Container]:
    for each in objects:
        pod = each.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            for spec in [*pod.get("initContainers", ()), *pod["containers"]]:
                yield Container(each["metadata"]["name"], each["kind"], pod, spec)


def services(objects: list[Object]) -> Iterator[Container]:
    """The containers that run for good."""
    for each in containers(objects):
        if each.kind != "Job" and each.spec in each.pod["containers"]:
            yield each


# --- the folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_file_is_yaml_of_kubernetes(path: Path) -> None:
    for each in read(path):
        assert each["apiVersion"]
        assert each["kind"]


def test_the_base_has_every_file_of_its_folder() -> None:
    (kustomization,) = read(FOLDER / "base" / "kustomization.yaml")
    names = {path.name for path in BASE_FILES} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == names


def test_no_secret_is_in_the_files(objects: list[Object]) -> None:
    assert of_kind(objects, "Secret") == {}
    secret = {each["secretName"] for each in _secrets(objects)}
    assert secret == {"allfold"}


def _secrets(objects: list[Object]) -> Iterator[Object]:
    for container in containers(objects):
        for volume in container.pod.get("volumes", ()):
            if "secret" in volume:
                yield volume["secret"]


# --- privileges


def test_no_pod_gets_anything_of_its_node_but_the_socket_folder(objects: list[Object]) -> None:
    for container in containers(objects):
        assert not {"hostNetwork", "hostIPC", "hostPID"} & container.pod.keys()
        assert not any("hostPort" in port for port in container.spec.get("ports", ()))
        mounted = [volume.get("hostPath") for volume in container.pod.get("volumes", ())]
        assert {each["path"] for each in mounted if each} <= {SOCKET_FOLDER}


def test_no_pod_has_an_account_or_the_addresses_of_all_services(objects: list[Object]) -> None:
    for container in containers(objects):
        assert container.pod["automountServiceAccountToken"] is False
        assert container.pod["enableServiceLinks"] is False


def test_every_container_is_hardened(objects: list[Object]) -> None:
    for container in containers(objects):
        own = container.spec["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in own
        context = {**container.pod["securityContext"], **own}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        is_root = (container.owner, container.spec["name"]) in ROOTS
        assert context["runAsNonRoot"] is not is_root
        assert (context["runAsUser"] == 0) is is_root


def test_a_job_is_the_user_who_may_connect_to_the_agent(objects: list[Object]) -> None:
    users = {
        (context["runAsUser"], context["runAsGroup"])
        for container in containers(objects)
        if container.kind in ("Job", "DaemonSet")
        for context in [container.pod["securityContext"]]
    }
    assert users == {(10001, 10001)}


def test_every_container_says_what_it_needs(objects: list[Object]) -> None:
    for container in containers(objects):
        resources = container.spec["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert "memory" in resources["limits"]
        assert "cpu" not in resources["limits"]


# --- what is inside


def test_images_have_the_version_of_the_packages(objects: list[Object]) -> None:
    for container in containers(objects):
        image, _, tag = container.spec["image"].partition(":")
        if image.startswith("allfold-"):
            assert re.fullmatch(rf"{re.escape(__version__)}(-cuda1[23])?", tag)


def test_every_setting_is_one_that_is_read(objects: list[Object]) -> None:
    for container in services(objects):
        names = {name for name in container.environment if name.startswith("ALLFOLD_")}
        # Of the image's entrypoint; the settings see the token itself.
        assert names - {"ALLFOLD_TOKEN_FILE"} <= SETTINGS.get(container.owner, set())
        assert ("ALLFOLD_TOKEN_FILE" in names) is (container.owner != "redis")


def test_an_agent_is_named_after_its_node_and_reached_at_its_pod(objects: list[Object]) -> None:
    (agent,) = (each for each in services(objects) if each.owner == "agent")

    def field(name: str) -> str:
        return str(agent.environment[name]["valueFrom"]["fieldRef"]["fieldPath"])

    assert field("ALLFOLD_AGENT_NAME") == "spec.nodeName"
    assert field("ALLFOLD_AGENT_ADVERTISE") == "status.podIP"


def test_jobs_and_agents_meet_at_one_socket(objects: list[Object]) -> None:
    agent = next(each for each in services(objects) if each.owner == "agent")
    socket = agent.environment["ALLFOLD_SOCKET"]["value"]
    for container in containers(objects):
        if container.kind == "Job":
            assert container.spec["args"][:3] == ["run", "--agent", socket]
            assert f"{SOCKET_FOLDER}/" in socket
            mounts = {each["name"]: each for each in container.spec["volumeMounts"]}
            assert mounts["agent"] == {
                "name": "agent",
                "mountPath": SOCKET_FOLDER,
                "readOnly": True,
            }


def test_a_job_is_as_large_as_its_command_says(objects: list[Object]) -> None:
    for name, job in of_kind(objects, "Job").items():
        (container,) = job["spec"]["template"]["spec"]["containers"]
        arguments = container["args"]
        assert job["spec"]["completionMode"] == "Indexed"
        nnodes = int(arguments[arguments.index("--nnodes") + 1])
        assert (nnodes, nnodes) == (job["spec"]["completions"], job["spec"]["parallelism"])
        per_node = int(arguments[arguments.index("--nproc-per-node") + 1])
        assert container["resources"]["limits"].get("nvidia.com/gpu", str(per_node)) == str(
            per_node
        )
        (apart,) = job["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"].values()
        labels = apart[0]["labelSelector"]["matchLabels"]
        assert labels == {"batch.kubernetes.io/job-name": name}


# --- probes


def test_every_service_is_probed_at_an_endpoint_that_needs_no_token(objects: list[Object]) -> None:
    for container in services(objects):
        assert {"readinessProbe", "livenessProbe"} <= container.spec.keys()
        ports = {port["name"] for port in container.spec["ports"]}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.spec.get(name, {})
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
                assert probe["httpGet"]["path"] in open_endpoints(container.owner)
    (agent, orchestrator) = (
        next(each for each in services(objects) if each.owner == name)
        for name in ("agent", "orchestrator")
    )
    for container in (agent, orchestrator):
        assert container.spec["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert container.spec["livenessProbe"]["httpGet"]["path"] == "/healthz"


@cache
def open_endpoints(service: str) -> frozenset[str]:
    """Paths that answer without a token, asked of the service itself."""
    return asyncio.run(_open_endpoints(_application(service)))


def _application(service: str) -> FastAPI:
    if service == "orchestrator":
        return create_app(Settings(token=SecretStr("secret")))
    agent = SimpleNamespace(
        settings=AgentSettings(token="secret"), enrolment=SimpleNamespace(problem="starting")
    )
    return make_app(cast(Agent, agent))


async def _open_endpoints(application: FastAPI) -> frozenset[str]:
    transport = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        paths = ("/healthz", "/readyz", "/v1/status", "/v1/nodes", "/nothing")
        answers = {path: (await client.get(path)).status_code for path in paths}
    assert answers["/nothing"] in (401, 404)
    return frozenset(path for path, status in answers.items() if status in (200, 503))


# --- network


def test_everything_is_refused_unless_a_policy_allows_it(objects: list[Object]) -> None:
    policy = of_kind(objects, "NetworkPolicy")["default-deny"]["spec"]
    assert policy == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_policies_open_the_ports_of_the_containers_and_no_other(objects: list[Object]) -> None:
    policies = of_kind(objects, "NetworkPolicy")
    for container in services(objects):
        assert {port["containerPort"] for port in container.spec["ports"]} == PORTS[container.owner]
        ingress = policies[container.owner]["spec"]["ingress"]
        assert {port["port"] for rule in ingress for port in rule["ports"]} == PORTS[
            container.owner
        ]


def test_who_may_send_may_also_be_heard(objects: list[Object]) -> None:
    """Every way out to a pod of ours has its way in, and the other way round."""
    assert set(_ways(objects, "egress")) == set(_ways(objects, "ingress"))
    assert set(_ways(objects, "egress")) == {
        ("agent", "agent", 7411),
        ("agent", "agent", 7412),
        ("agent", "orchestrator", 7400),
        ("orchestrator", "redis", 6379),
    }


def _ways(objects: list[Object], direction: str) -> Iterator[tuple[str, str, int]]:
    label = "app.kubernetes.io/name"
    for policy in of_kind(objects, "NetworkPolicy").values():
        here = policy["spec"]["podSelector"].get("matchLabels", {}).get(label)
        for rule in policy["spec"].get(direction, ()):
            for peer in rule.get("from" if direction == "ingress" else "to", ()):
                there = peer["podSelector"]["matchLabels"][label]
                for port in rule["ports"]:
                    yield (
                        (here, there, port["port"])
                        if direction == "egress"
                        else (there, here, port["port"])
                    )


def test_urls_name_services_that_are_there(objects: list[Object]) -> None:
    known = {
        (name, port["port"])
        for name, service in of_kind(objects, "Service").items()
        for port in service["spec"]["ports"]
    }
    for container in services(objects):
        for variable in container.environment.values():
            found = re.search(r"://(?:.*@)?([a-z]+):(\d+)", variable.get("value", ""))
            if found:
                assert (found[1], int(found[2])) in known


def test_an_orchestrator_can_always_be_lost(objects: list[Object]) -> None:
    deployment = of_kind(objects, "Deployment")["orchestrator"]["spec"]
    budget = of_kind(objects, "PodDisruptionBudget")["orchestrator"]["spec"]
    assert deployment["replicas"] == 2
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment["selector"]


# --- GPUs


def gpu_agent(objects: list[Object]) -> tuple[Object, Object]:
    pod = of_kind(objects, "DaemonSet")["agent"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def test_agents_for_gpus_are_where_gpus_are_and_take_none_from_jobs() -> None:
    pod, container = gpu_agent(built(FOLDER / "overlays" / "gpu"))
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in str(container["resources"])
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert re.search(r"-cuda1[23]$", container["image"])


def test_agents_for_gpus_are_otherwise_those_of_the_base() -> None:
    base, ours = (gpu_agent(built(FOLDER / name)) for name in ("base", "overlays/gpu"))
    added = {"nodeSelector", "tolerations", "runtimeClassName"}
    assert ours[0].keys() - base[0].keys() == added
    assert all(each in ours[1]["env"] for each in base[1]["env"])
    changed = {"env", "image"}
    assert {key for key in base[1] if base[1][key] != ours[1][key]} == changed


def test_jobs_on_gpus_claim_them() -> None:
    (job,) = read(FOLDER / "examples" / "job-gpu.yaml")
    pod = job["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["containers"][0]["args"][-2:] == ["--device", "cuda"]


@pytest.mark.parametrize("name", ["base", "overlays/gpu"])
def test_every_folder_builds_with_all_objects_in_one_namespace(name: str) -> None:
    objects = built(FOLDER / name)
    kinds = ["DaemonSet", "Deployment", "Namespace", *["NetworkPolicy"] * 4, "PodDisruptionBudget"]
    kinds += ["Service", "Service", "StatefulSet"]
    assert sorted(each["kind"] for each in objects) == kinds
    namespaces = {
        each["metadata"].get("namespace") for each in objects if each["kind"] != "Namespace"
    }
    assert namespaces == {"allfold"}
