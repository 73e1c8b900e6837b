"""The settings and secrets of the services of deploy/kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from allfold.cli._parameters import orchestrators, token
from allfold_agent.settings import AgentSettings
from allfold_orchestrator.settings import Settings
from tests.deploy.manifests import (
    FOLDER,
    NAME,
    PAGE,
    ROOT,
    Container,
    Object,
    containers,
    of_kind,
    services,
    workloads,
)

READ = {
    "agent": {option.variable for option in AgentSettings.options().values()},
    "orchestrator": {option.variable for option in Settings.options().values()},
    "redis": set[str](),
}
PORTS = {"agent": {7411, 7412}, "orchestrator": {7400}, "redis": {6379}}
# What is set in the containers by those who make them: Kubernetes, for indexed jobs, and others.
OF_KUBERNETES = {
    "Job": {"JOB_COMPLETION_INDEX"},
    "JobSet": {"JOB_COMPLETION_INDEX"},
    "LeaderWorkerSet": {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX"},
}


def test_every_setting_is_one_that_is_read(objects: list[Object]) -> None:
    for name, container in services(objects).items():
        given = {each for each in container.environment if each.startswith("ALLFOLD_")}
        # Of the image's entrypoint; the settings see the token itself.
        assert given - {"ALLFOLD_TOKEN_FILE"} <= READ[name]
        assert ("ALLFOLD_TOKEN_FILE" in given) is (name != "redis")


def test_the_allfold_command_finds_token_and_orchestrator_by_itself(
    objects: list[Object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``kubectl exec`` starts it without the entrypoint, with the container's environment."""
    urls = {"agent": "http://orchestrator:7400", "orchestrator": "http://127.0.0.1:7400"}
    for name, url in urls.items():
        container = services(objects)[name]
        monkeypatch.delenv("ALLFOLD_ORCHESTRATOR_URL", raising=False)
        for variable in ("ALLFOLD_ORCHESTRATOR_URL", "ALLFOLD_ORCHESTRATOR_LISTEN"):
            if variable in container.environment:
                monkeypatch.setenv(variable, container.value(variable))
        assert orchestrators(None) == [url]
        mount, volume = container.mount("/run/allfold-token")
        (item,) = volume["secret"]["items"]
        assert container.value("ALLFOLD_TOKEN_FILE") == f"{mount['mountPath']}/{item['path']}"
        # Stands for the mounted file.
        (tmp_path / name).write_text("from-the-secret\n")
        monkeypatch.delenv("ALLFOLD_TOKEN", raising=False)
        monkeypatch.setenv("ALLFOLD_TOKEN_FILE", str(tmp_path / name))
        assert token() == "from-the-secret"


@pytest.mark.parametrize("image", ["orchestrator", "agent"])
def test_the_images_of_the_services_have_the_allfold_command(image: str) -> None:
    dockerfile = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text()
    assert "/wheels/allfold-*.whl" in dockerfile
    assert '"client_sdk/pyproject.toml[cli]"' in dockerfile


def test_an_agent_is_named_after_its_node_and_reached_at_its_pod(objects: list[Object]) -> None:
    agent = services(objects)["agent"]
    assert agent.field("ALLFOLD_AGENT_NAME") == "spec.nodeName"
    assert agent.field("ALLFOLD_AGENT_ADVERTISE") == "status.podIP"


def test_services_listen_at_the_ports_that_they_declare(objects: list[Object]) -> None:
    for name, container in services(objects).items():
        assert {port["containerPort"] for port in container.spec["ports"]} == PORTS[name]
        listen = [
            each["value"] for each in container.environment.values() if "LISTEN" in each["name"]
        ]
        assert set(listen) == {f"0.0.0.0:{port}" for port in PORTS[name] if name != "redis"}


def test_variables_in_values_and_arguments_are_there(objects: list[Object]) -> None:
    used = set()
    for container in containers(objects):
        known = OF_KUBERNETES.get(container.kind, set())
        for variable in container.environment.values():
            used |= referred(variable.get("value", ""), known)
            known = known | {variable["name"]}  # Kubernetes knows only those above
        used |= referred(" ".join(container.spec.get("args", ())), known)
    assert used == {"REDIS_PASSWORD", "REDISCLI_AUTH"}.union(*OF_KUBERNETES.values())


def referred(text: str, known: set[str]) -> set[str]:
    found = set(re.findall(r"\$\((\w+)\)", text))
    assert found <= known
    return found


# --- addresses


def test_urls_lead_to_the_services_that_are_meant(objects: list[Object]) -> None:
    found = {}
    for name, container in services(objects).items():
        for variable in container.environment.values():
            url = urlsplit(variable.get("value", ""))
            if url.scheme and url.netloc:
                found[name, variable["name"]] = (url.scheme, url.hostname, url.port)
    assert found == {
        ("agent", "ALLFOLD_ORCHESTRATOR_URL"): ("http", "orchestrator", 7400),
        ("orchestrator", "ALLFOLD_REDIS_URL"): ("redis", "redis", 6379),
    }


def test_a_service_leads_to_the_pods_of_its_name(objects: list[Object]) -> None:
    pods = {each["metadata"]["name"]: each for each in workloads(objects)}
    found = {}
    for name, service in of_kind(objects, "Service").items():
        if "ports" not in service["spec"]:  # it only names the pods of a job
            continue
        template = pods[name]["spec"]["template"]
        assert service["spec"]["selector"] == template["metadata"]["labels"]
        (port,) = service["spec"]["ports"]
        (container,) = template["spec"]["containers"]
        (target,) = (each for each in container["ports"] if each["name"] == port["targetPort"])
        assert port["port"] == target["containerPort"]
        found[name] = port["port"]
    assert found == {"orchestrator": 7400, "redis": 6379}


def test_the_pods_of_a_service_have_its_name_as_their_label(objects: list[Object]) -> None:
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in workloads(objects)
        if each["metadata"]["name"] in PORTS
    }
    assert labels == {name: {NAME: name} for name in PORTS}
    for each in workloads(objects):
        if each["metadata"]["name"] in PORTS:
            assert each["spec"]["selector"] == {"matchLabels": labels[each["metadata"]["name"]]}


# --- secrets


def created(text: str) -> set[str]:
    """The keys of the secret that a command makes."""
    assert "create secret generic allfold " in text
    return set(re.findall(r"--from-literal=([\w-]+)=", text))


def mounted_secrets(container: Container) -> Iterator[tuple[str, Object]]:
    """Iterate over the path and the volume of each secret of a container."""
    for mount in container.spec.get("volumeMounts", ()):
        for volume in container.pod.get("volumes", ()):
            if volume["name"] == mount["name"] and "secret" in volume:
                yield mount["mountPath"], volume["secret"]


def test_no_secret_is_in_the_files(objects: list[Object]) -> None:
    assert of_kind(objects, "Secret") == {}


def test_the_token_lies_where_it_is_read_and_may_be_read_there(objects: list[Object]) -> None:
    found = {each.name: list(mounted_secrets(each)) for each in containers(objects)}
    for name in ("agent", "orchestrator"):
        container = services(objects)[name]
        ((folder, secret),) = found.pop(container.name)
        assert secret["secretName"] == "allfold"
        (item,) = secret["items"]
        assert item["key"] == "token"
        assert f"{folder}/{item['path']}" == container.value("ALLFOLD_TOKEN_FILE")
        assert secret["defaultMode"] == 0o440
        context = container.pod["securityContext"]
        assert context["fsGroup"] == context["runAsGroup"]
    assert not any(found.values())


def test_redis_and_the_orchestrator_have_the_same_password_and_nobody_else_has_secrets(
    objects: list[Object],
) -> None:
    found = {
        (container.owner, variable["name"]): variable["valueFrom"]["secretKeyRef"]
        for container in containers(objects)
        for variable in container.environment.values()
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    password = {"name": "allfold", "key": "redis-password"}
    assert found == {
        ("orchestrator", "ALLFOLD_ADMIN_TOKEN"): {"name": "allfold", "key": "admin-token"},
        ("orchestrator", "REDIS_PASSWORD"): password,
        ("redis", "REDISCLI_AUTH"): password,
    }
    arguments = services(objects)["redis"].spec["args"]
    assert arguments[arguments.index("--requirepass") + 1] == "$(REDISCLI_AUTH)"
    url = urlsplit(services(objects)["orchestrator"].value("ALLFOLD_REDIS_URL"))
    assert url.password == "$(REDIS_PASSWORD)"


def test_the_commands_make_the_keys_that_are_read() -> None:
    keys = {"token", "admin-token", "redis-password"}
    assert created(PAGE) == keys
    assert created((FOLDER / "base" / "kustomization.yaml").read_text()) == keys
