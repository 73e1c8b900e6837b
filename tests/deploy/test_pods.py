"""Privileges, resources and lives of the pods in deploy/kubernetes."""

from __future__ import annotations

import asyncio
import os
import stat
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from fastapi import FastAPI

from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.settings import AgentSettings
from allfold_orchestrator.http.app import create_app
from allfold_orchestrator.settings import Settings
from tests.deploy.manifests import (
    SERVICES,
    SOCKET_FOLDER,
    Container,
    Object,
    containers,
    jobs,
    of_kind,
    services,
)

# Root, without a capability: see base/agent.yaml.
ROOTS = {SOCKET_FOLDER}
GPU_TAINT = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]

# --- privileges


def test_no_pod_gets_anything_of_its_node_but_the_socket_folder(objects: list[Object]) -> None:
    taken = set()
    for container in containers(objects):
        assert not {"hostNetwork", "hostIPC", "hostPID"} & container.pod.keys()
        assert not any("hostPort" in port for port in container.spec.get("ports", ()))
        mounted = [volume.get("hostPath") for volume in container.pod.get("volumes", ())]
        taken |= {(container.owner, each["path"]) for each in mounted if each}
    folder = {(owner, "/run/allfold") for owner in ("agent", *jobs(objects))}
    assert taken - {("agent", "/dev/null")} == folder


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
        is_root = container.name in ROOTS
        assert context["runAsNonRoot"] is not is_root
        assert (context["runAsUser"] == 0) is is_root


def test_every_container_says_what_it_needs(objects: list[Object]) -> None:
    for container in containers(objects):
        resources = container.spec["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert "memory" in resources["limits"]
        assert "cpu" not in resources["limits"]


def test_agents_are_also_where_gpus_keep_other_pods_away(objects: list[Object]) -> None:
    """And so are the jobs that want these GPUs; nothing else is."""
    tolerated = {
        each.owner: each.pod["tolerations"]
        for each in containers(objects)
        if "tolerations" in each.pod
    }
    assert tolerated == {"agent": GPU_TAINT, "digits-gpu": GPU_TAINT}


def test_agents_have_the_time_to_drain_before_they_are_killed(objects: list[Object]) -> None:
    agent = services(objects)["agent"]
    assert agent.value("ALLFOLD_DRAIN_FOR") == "all"
    drain = int(agent.value("ALLFOLD_DRAIN_SECONDS"))
    assert drain >= 3600
    assert agent.pod["terminationGracePeriodSeconds"] == drain + 30


# --- the folder with the socket


def test_a_job_is_the_user_who_may_connect_to_the_agent(objects: list[Object]) -> None:
    for container in [services(objects)["agent"], *jobs(objects).values()]:
        context = {**container.pod["securityContext"], **container.spec["securityContext"]}
        assert (context["runAsUser"], context["runAsGroup"]) == (10001, 10001)


def test_jobs_and_agents_meet_at_one_socket(objects: list[Object]) -> None:
    agent = services(objects)["agent"]
    socket = Path(agent.value("ALLFOLD_SOCKET"))
    mount, volume = agent.mount(str(socket.parent))
    assert not mount.get("readOnly", False)
    folder = volume["hostPath"]["path"]
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"
    for job in jobs(objects).values():
        arguments = job.spec.get("args", ())
        given = arguments[2] if "--agent" in arguments else job.value("ALLFOLD_SOCKET")
        mount, volume = job.mount(str(Path(given).parent))
        assert mount["readOnly"] is True
        # Not "OrCreate": without an agent the pod waits.
        assert volume["hostPath"] == {"path": folder, "type": "Directory"}
        assert Path(given).name == socket.name


def test_the_init_container_gives_the_agent_its_folder(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = services(objects)["agent"]
    (init,) = (each for each in containers(objects) if each.name == SOCKET_FOLDER)
    folder = str(Path(agent.value("ALLFOLD_SOCKET")).parent)
    mount, volume = init.mount(folder)
    assert volume == agent.mount(folder)[1]
    assert not mount.get("readOnly", False)

    tmp_path.chmod(0o755)  # as the kubelet makes it
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda *arguments: given.append(arguments))  # takes root
    (code,) = init.spec["args"]
    assert init.spec["command"] == ["python", "-c"]
    exec(code.replace(folder, str(tmp_path)), {})
    assert given == [(str(tmp_path), -1, agent.pod["securityContext"]["runAsGroup"])]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o770


# --- lives


def test_every_service_is_probed_at_an_endpoint_that_needs_no_token(objects: list[Object]) -> None:
    for container in services(objects).values():
        assert {"readinessProbe", "livenessProbe"} <= container.spec.keys()
    for name in ("agent", "orchestrator"):
        container = services(objects)[name]
        assert probed(container, "readinessProbe") == "/readyz"
        assert probed(container, "livenessProbe") == "/healthz"
        assert {"/readyz", "/healthz"} <= open_endpoints(name)


def probed(container: Container, probe: str) -> str:
    """The path that a probe asks for, at a port that the container has."""
    asked = container.spec[probe]["httpGet"]
    assert asked["port"] in {port["name"] for port in container.spec["ports"]}
    return str(asked["path"])


def test_an_agent_has_time_to_load_torch(objects: list[Object]) -> None:
    agent = services(objects)["agent"]
    probe = agent.spec["startupProbe"]
    assert probed(agent, "startupProbe") == "/healthz"
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def test_agents_are_replaced_one_by_one(objects: list[Object]) -> None:
    spec = of_kind(objects, "DaemonSet")["agent"]["spec"]
    assert spec["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 1},
    }
    assert spec["minReadySeconds"] > 0


def test_no_job_can_displace_what_it_needs(objects: list[Object]) -> None:
    ((name, priority),) = of_kind(objects, "PriorityClass").items()
    assert priority["value"] > 0
    assert {each.pod["priorityClassName"] for each in services(objects).values()} == {name}
    assert not any("priorityClassName" in each.pod for each in jobs(objects).values())


def test_an_orchestrator_can_always_be_lost(objects: list[Object]) -> None:
    deployment = of_kind(objects, "Deployment")["orchestrator"]["spec"]
    budget = of_kind(objects, "PodDisruptionBudget")["orchestrator"]["spec"]
    assert deployment["replicas"] == 2
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment["selector"]


def test_every_service_has_its_own_kind_of_workload(objects: list[Object]) -> None:
    kinds = {each.owner: each.kind for each in services(objects).values()}
    assert kinds == {"agent": "DaemonSet", "orchestrator": "Deployment", "redis": "StatefulSet"}
    assert len(kinds) == len(SERVICES)


@cache
def open_endpoints(service: str) -> frozenset[str]:
    """Paths that answer without a token, asked of the service itself."""
    return asyncio.run(_open_endpoints(_application(service)))


def _application(service: str) -> FastAPI:
    if service == "orchestrator":
        return create_app(Settings(token="secret"))
    agent = SimpleNamespace(
        settings=AgentSettings.model_validate({"token": "secret"}),
        registration=SimpleNamespace(problem="starting"),
        draining=SimpleNamespace(problem=None),
    )
    return make_app(cast(NodeAgent, agent))


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
