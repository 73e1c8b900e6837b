"""The Helm chart: it has the objects of kustomize, and refuses values that mean nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]

from tests.deploy.manifests import (
    CHART,
    FOLDER,
    ROOT,
    Object,
    built,
    built_with,
    charted,
    containers,
    of_kind,
    services,
)
from tests.deploy.variants import EXTERNAL, SAME, VARIANTS
from tests.support.require import requires
from tools import kubernetes
from tools.kubernetes_manifests import MONITORING

# Lists that Kubernetes reads as maps, whose order means nothing; that of variables in values is
# test_settings' business.
_MAPS = {"env", "volumeMounts", "volumes"}


def normalised(found: Any, name: str = "") -> Any:
    """Return an object whose lists that are maps are maps."""
    if isinstance(found, dict):
        return {key: normalised(value, key) for key, value in found.items()}
    if isinstance(found, list):
        each = [normalised(value) for value in found]
        return {value["name"]: value for value in each} if name in _MAPS else each
    return found


def by_name(objects: list[Object]) -> dict[tuple[str, str, str], Object]:
    found = {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each
        for each in objects
    }
    assert len(found) == len(objects)
    return {key: normalised(each) for key, each in found.items()}


@pytest.mark.parametrize("name", SAME)
def test_helm_and_kustomize_make_the_same_objects(name: str, tmp_path: Path) -> None:
    folder, *components = SAME[name]
    found = built_with(tmp_path, *components) if components else built(FOLDER / folder)
    ours, theirs = by_name(charted(*VARIANTS[name])), by_name(found)
    assert ours.keys() == theirs.keys()
    for key, each in ours.items():
        assert each == theirs[key], key


def test_every_folder_of_kustomize_has_its_variant_of_the_chart() -> None:
    folders = {folder for names in SAME.values() for folder in names}
    assert folders == {
        str(path.parent.relative_to(FOLDER)) for path in FOLDER.rglob("kustomization.yaml")
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_helm_finds_nothing_wrong(name: str) -> None:
    requires("kubernetes-tools")
    given = [argument for each in VARIANTS[name] for argument in ("--set", each)]
    assert "0 chart(s) failed" in kubernetes.run("helm", "lint", "--strict", CHART, *given)


# --- wrong values


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("agent.drainSecond=5", r"'drainSecond'"),
        ("agent.drainSeconds=-1", r"/agent/drainSeconds.*(minimum|at least)"),
        ("agent.updateStrategy=Rolling", r"/agent/updateStrategy.*RollingUpdate"),
        ("orchestrator.replicas=0", r"/orchestrator/replicas"),
        ("redis.mode=cluster", r"/redis/mode.*sentinel"),
        ("redis.mode=external", r"/redis/external/url"),
        ("redis.maxMemory=1Gi", r"/redis/maxMemory"),
        ("monitoring.enabled=true", r"Name the pods of your Prometheus in monitoring\.from"),
        ("gpu.cuda=cuda11", r"/gpu/cuda.*cuda12"),
        # Helm 4.3 says a wrong place for a name that is refused, so the name alone counts.
        ("agent.env.ALLFOLD_DRAIN_SECONDS=5s", "propertyName 'ALLFOLD_DRAIN_SECONDS'"),
        ("orchestrator.env.ALLFOLD_ORCHESTRATOR_URL=a", "propertyName 'ALLFOLD_ORCHESTRATOR_URL'"),
        (
            "tls.enabled=true,tls.certManager.enabled=true,tls.certManager.duration=168h",
            r"renewBefore is 720h, which must be less than tls\.certManager\.duration, 168h",
        ),
        (
            "tls.enabled=true,tls.certManager.enabled=true,tls.certManager.renewBefore=2160h",
            r"renewBefore is 2160h, which must be less than tls\.certManager\.duration, 2160h",
        ),
        ("secretName=", r"/secretName"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(value: str, said: str) -> None:
    requires("kubernetes-tools")
    with pytest.raises(kubernetes.CommandFailed) as failed:
        kubernetes.run("helm", "template", "allfold", CHART, "--set", value)
    assert re.search(said, str(failed.value), re.DOTALL), failed.value


def test_every_value_has_a_default_and_a_description_and_no_other_is_taken() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    compare(schema, defaults, "values")


def compare(schema: Object, defaults: Object, path: str) -> None:
    assert schema["description"], path
    if "properties" not in schema:
        return
    assert schema["additionalProperties"] is False, path
    names = schema["properties"].keys() - {"global"}
    if not path.endswith(".resources"):
        assert names == defaults.keys(), path
    assert set(schema.get("required", ())) == names, path
    for name in names:
        compare(schema["properties"][name], defaults.get(name, {}), f"{path}.{name}")


@pytest.mark.parametrize(("name", "key"), [("agent", "agent"), ("orchestrator", "orchestrator")])
def test_what_the_chart_sets_cannot_be_set_beside_it(name: str, key: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = schema["properties"][key]["properties"]["env"]["propertyNames"]["not"]["enum"]
    given = {
        variable
        for each in ("base", "gpu", "tls")
        for variable in services(charted(*VARIANTS[each]))[name].environment
    }
    assert given <= set(refused)
    # The token comes from a file alone.
    assert set(refused) - given <= {"ALLFOLD_TOKEN"}


# --- texts that YAML would take for something else

# With these, every value that can be any text is in some object.
_ALL_SHOWN = (
    *MONITORING,
    "gpu.enabled=true",
    "networkPolicy.enabled=false",
    "tls.enabled=true",
    "tls.certManager.enabled=true",
)


def places_of_texts(schema: Object, text: str, path: str = "") -> Iterator[str]:
    """Yield the names, as for Helm's ``--set``, of the values that this text may be given to."""
    if "properties" in schema:
        for name, each in schema["properties"].items():
            yield from places_of_texts(each, text, f"{path}.{name}" if path else name)
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from places_of_texts(schema["additionalProperties"], text, f"{path}.A")
    elif "items" in schema:
        yield from places_of_texts(schema["items"], text, f"{path}[0]")
    elif "string" in schema.get("type", ()) and re.search(schema.get("pattern", ""), text):
        yield path


def charted_with_texts(places: Iterable[str], text: str, mode: str) -> list[Object]:
    """Return the objects of a chart with this text in all these places and as its namespace."""
    given = ["--set", ",".join((*_ALL_SHOWN, f"redis.mode={mode}"))]
    given += ["--set-string", ",".join(f"{place}={text}" for place in places)]
    rendered = kubernetes.run("helm", "template", "allfold", CHART, "--namespace", text, *given)
    return [each for each in yaml.safe_load_all(rendered) if each is not None]


@pytest.mark.parametrize("mode", ["single", "sentinel"])
@pytest.mark.parametrize("text", ["123", "true", "0x1", "null"])
def test_a_text_stays_a_text_whatever_it_looks_like(text: str, mode: str) -> None:
    requires("kubernetes-tools")
    schema = json.loads((CHART / "values.schema.json").read_text())
    places = sorted(places_of_texts(schema, text))
    assert {"secretName", "images.pullSecrets[0]", "monitoring.token.key"} <= set(places)
    plain = json.dumps(charted_with_texts(places, "a-plain-text", mode))
    assert charted_with_texts(places, text, mode) == json.loads(plain.replace("a-plain-text", text))


def test_the_places_of_texts_are_all_shown() -> None:
    """Each of them changes some object, or the test above would say nothing of it."""
    requires("kubernetes-tools")
    schema = json.loads((CHART / "values.schema.json").read_text())
    places = sorted(places_of_texts(schema, "123"))
    words = {place: f"w{index:03}w" for index, place in enumerate(places)}
    given = ",".join(f"{place}={word}" for place, word in words.items())
    options = ("--set", ",".join(_ALL_SHOWN), "--set-string", given)
    shown = kubernetes.run("helm", "template", "allfold", CHART, *options)
    assert [place for place, word in words.items() if word not in shown] == []


def test_a_variable_may_have_a_name_that_yaml_takes_for_a_truth_value() -> None:
    found = services(charted("agent.env.NO=a", "orchestrator.env.ON=b"))
    assert found["agent"].value("NO") == "a"
    assert found["orchestrator"].value("ON") == "b"


def test_the_folder_of_the_socket_may_have_any_signs() -> None:
    found = services(charted(r"agent.socketFolder=/run/a\, b #1"))["agent"]
    (volume,) = (each for each in found.pod["volumes"] if each["name"] == "socket")
    assert volume["hostPath"] == {"path": "/run/a, b #1", "type": "DirectoryOrCreate"}


# --- what is said after the installation


@cache
def notes(*values: str) -> str:
    requires("kubernetes-tools")
    given = [argument for each in values for argument in ("--set", each)]
    options = ("--namespace", "allfold", "--dry-run=client")
    return kubernetes.run("helm", "install", "allfold", CHART, *options, *given).partition(
        "\nNOTES:\n"
    )[2]


def test_the_notes_say_the_next_steps() -> None:
    text = notes()
    assert set(re.findall(r"--from-literal=([\w-]+)=", text)) == {
        "token",
        "admin-token",
        "redis-password",
    }
    assert "exec deployment/orchestrator -- allfold status" in text
    assert "allfold certs" not in text
    assert (ROOT / "deploy/kubernetes/examples/job.yaml").exists()
    assert "deploy/kubernetes/examples/job.yaml" in text


def test_the_notes_say_how_a_certificate_is_made() -> None:
    assert "allfold certs" in notes("tls.enabled=true")
    assert "allfold certs" not in notes("tls.enabled=true", "tls.certManager.enabled=true")


# --- TLS


def test_with_tls_nothing_speaks_without_it() -> None:
    found = services(charted(*VARIANTS["tls"]))
    for name in ("agent", "orchestrator"):
        container = found[name]
        mount, volume = container.mount(container.value("ALLFOLD_TLS_DIR"))
        assert mount["readOnly"] is True
        assert volume["secret"] == {"secretName": "allfold-tls", "defaultMode": 0o440}
        assert "http://" not in str(container.spec)
        assert "httpGet" not in str(container.spec)


def test_with_tls_a_program_of_the_image_asks_whether_a_service_is_well() -> None:
    """The kubelet cannot show a certificate."""
    found = services(charted(*VARIANTS["tls"]))
    for name in ("agent", "orchestrator"):
        container = found[name]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe not in container.spec:
                continue
            command = container.spec[probe]["exec"]["command"]
            assert command[:3] == ["python", "-IS", "/opt/allfold/ready.py"]
            assert "LISTEN" in container.environment[command[3]]["name"]
            assert command[4] == ("/readyz" if probe == "readinessProbe" else "/healthz")
        dockerfile = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text()
        assert re.search(r"^COPY .*deploy/docker/ready.py .*/opt/allfold/$", dockerfile, re.M)


def test_cert_manager_fills_the_secret_that_is_mounted() -> None:
    certificates = of_kind(charted(*VARIANTS["cert-manager"]), "Certificate")
    spec = certificates["allfold"]["spec"]
    assert spec["secretName"] == "allfold-tls"
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert spec["dnsNames"] == ["allfold"]
    authority = certificates["allfold-ca"]["spec"]
    issuers = of_kind(charted(*VARIANTS["cert-manager"]), "Issuer")
    assert issuers[spec["issuerRef"]["name"]]["spec"] == {
        "ca": {"secretName": authority["secretName"]}
    }


def test_an_issuer_of_ones_own_needs_no_authority_of_ours() -> None:
    found = charted(*VARIANTS["cert-manager, own issuer"])
    assert of_kind(found, "Issuer") == {}
    (certificate,) = of_kind(found, "Certificate").values()
    assert certificate["spec"]["issuerRef"]["name"] == "ours"


# --- monitoring


def test_the_rules_are_those_of_prometheus() -> None:
    (rule,) = of_kind(charted(*VARIANTS["monitoring"]), "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())


def test_the_dashboard_is_that_of_grafana() -> None:
    found = of_kind(charted(*VARIANTS["monitoring"]), "ConfigMap")["allfold-dashboard"]
    shown = json.loads(found["data"]["allfold.json"])
    assert shown == json.loads((ROOT / "deploy/grafana/allfold.json").read_text())


def test_targets_have_the_labels_that_alerts_and_dashboard_know() -> None:
    objects = charted(*VARIANTS["monitoring"])
    (orchestrator,) = of_kind(objects, "ServiceMonitor").values()
    (agent,) = of_kind(objects, "PodMonitor").values()
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {each["job_name"] for each in scraped["scrape_configs"]}
    ends = [*orchestrator["spec"]["endpoints"], *agent["spec"]["podMetricsEndpoints"]]
    relabelled = [rule for end in ends for rule in end["relabelings"]]
    assert {rule["replacement"] for rule in relabelled if rule["targetLabel"] == "job"} == jobs
    assert [rule["sourceLabels"] for rule in relabelled if rule["targetLabel"] == "node"] == [
        ["__meta_kubernetes_pod_node_name"]
    ]


def test_prometheus_brings_the_token_and_is_let_in() -> None:
    objects = charted(*VARIANTS["monitoring, tls"])
    (orchestrator,) = of_kind(objects, "ServiceMonitor").values()
    (agent,) = of_kind(objects, "PodMonitor").values()
    for end in (*orchestrator["spec"]["endpoints"], *agent["spec"]["podMetricsEndpoints"]):
        assert end["authorization"]["credentials"] == {"name": "allfold", "key": "token"}
        assert end["scheme"] == "https"
        assert end["tlsConfig"]["serverName"] == "allfold"
    policy = of_kind(objects, "NetworkPolicy")["monitoring"]["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == {7400, 7411}


# --- Redis


def test_an_agent_has_the_zone_of_its_node_unless_one_is_given() -> None:
    label = "metadata.labels['topology.kubernetes.io/zone']"
    assert services(charted())["agent"].field("ALLFOLD_ZONE") == label
    assert services(charted(*VARIANTS["by hand"]))["agent"].value("ALLFOLD_ZONE") == "a"


def test_with_sentinel_the_orchestrator_asks_every_one_of_them() -> None:
    objects = charted(*VARIANTS["sentinel"])
    redis = of_kind(objects, "StatefulSet")["redis"]["spec"]
    url = services(objects)["orchestrator"].value("ALLFOLD_REDIS_URL")
    hosts = [f"redis-{index}.{redis['serviceName']}" for index in range(redis["replicas"])]
    assert url == (
        "redis+sentinel://:$(REDIS_PASSWORD)@"
        + ",".join(f"{host}:26379" for host in hosts)
        + "/allfold/0?sentinel_password=$(REDIS_PASSWORD)"
    )
    (sentinel,) = (each for each in containers(objects) if each.name == ("redis", "sentinel"))
    assert sentinel.value("HOSTS").split() == hosts
    assert of_kind(objects, "PodDisruptionBudget")["redis"]["spec"]["maxUnavailable"] == 1
    policies = of_kind(objects, "NetworkPolicy")
    for policy, direction in (
        ("redis", "ingress"),
        ("redis", "egress"),
        ("orchestrator", "egress"),
    ):
        ports = {
            port["port"]
            for rule in policies[policy]["spec"][direction]
            for port in rule.get("ports", ())
        }
        assert {6379, 26379} <= ports, policy


def test_a_redis_of_ones_own_is_the_only_one() -> None:
    objects = charted(*EXTERNAL)
    assert of_kind(objects, "StatefulSet") == {}
    assert "redis" not in {each["metadata"]["name"] for each in objects}
    url = urlsplit(services(objects)["orchestrator"].value("ALLFOLD_REDIS_URL"))
    assert (url.scheme, url.port) == ("rediss", 6380)
    egress = of_kind(objects, "NetworkPolicy")["orchestrator"]["spec"]["egress"]
    assert {"ports": [{"port": 6380, "protocol": "TCP"}]} in egress


def test_redis_refuses_writes_before_it_is_killed_for_its_memory() -> None:
    (redis,) = (each for each in containers(charted()) if each.name == ("redis", "redis"))
    arguments = redis.spec["args"]
    most = arguments[arguments.index("--maxmemory") + 1]
    limit = redis.spec["resources"]["limits"]["memory"]
    assert int(most.removesuffix("mb")) * 2 <= int(limit.removesuffix("Mi"))
    assert arguments[arguments.index("--maxmemory-policy") + 1] == "noeviction"
