"""The whole of docker-compose.yml for real, and its TLS: order of start, trainings, no traces."""

import json
import os
import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from allfold import __version__
from allfold_cluster.environment import free_address
from tests.support.processes import docker
from tests.support.processes.compose import (
    LONG_RUNNING,
    LOOK_SECONDS,
    TRAINING_SECONDS,
    Prometheus,
    Scaling,
    Stack,
    allfold_in,
    certificate,
    ended_with_logs_of_failures,
    ends,
    fetch,
    logs_of_failures,
    moments,
    said_by_rank_0,
    scale,
    training_sizes,
    uncompiled,
)
from tests.support.require import requires
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1500)]

# What must be healthy, or done, before what starts.
GATES = {
    "redis": ("secrets",),
    "orchestrator": ("redis", "secrets"),
    "agent-a": ("orchestrator",),
    "agent-b": ("orchestrator",),
    "train-a": ("agent-a",),
    "train-b": ("agent-b",),
}
KILLED = 137
SITES = ("wan-a", "wan-b", "wan-c", "wan-d")
SITE_AGENTS = tuple(each.replace("wan", "wan-agent") for each in SITES)
WAN_STEPS = 40
Inspected = dict[str, dict[str, Any]]
START_SECONDS = 120.0


@dataclass(frozen=True)
class Sites:
    """How a training between sites has ended, and what its rank 0 has said."""

    exit_codes: dict[str, int]
    said: str


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
    docker.provide_images(engine, *docker.BASE_IMAGES)
    docker.provide_wheels(engine)
    return engine


@pytest.fixture(scope="module")
def images(bases: docker.Environment) -> docker.Project:
    name = f"allfold-test-{os.getpid()}"
    addresses = {f"ALLFOLD_{name}PUBLISH": free_address() for name in ("", "PROMETHEUS_")}
    project = docker.Project.of(name, bases, ALLFOLD_TOKEN="", **addresses)
    # One service per image: Compose v1 would build the others, which share them, once more.
    project.compose("build", "orchestrator", "agent-a", "train-a", seconds=1200.0)
    return project


@pytest.fixture(scope="module")
def latest() -> list[docker.Project]:
    """The forms that the stack has had, the one that it has now last."""
    return []


@pytest.fixture(scope="module")
def up(
    request: pytest.FixtureRequest, images: docker.Project, latest: list[docker.Project]
) -> Iterator[Stack]:
    latest.append(images)
    with ended_with_logs_of_failures(request, images):
        with images.events() as events:
            images.compose("up", "--detach", "--no-build", seconds=300.0)
            # The engine may tell of them after Compose has ended.
            services = set(docker.default_services())
            wait_until(lambda: moments(events, "start").keys() == services, "all have started")
        yield Stack(images, events)


@pytest.fixture(scope="module")
def trained(up: Stack) -> Stack:
    """The stack after its training, however that ended."""
    up.project.wait("train-a", "train-b", seconds=TRAINING_SECONDS)
    return up


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
            wait_until(lambda: len(ends(events, "elastic")) >= 4, "the engine has told of all ends")
        return Scaling(said_by_rank_0(project), training_sizes(project), ends(events, "elastic"))


@pytest.fixture(scope="module")
def sites(request: pytest.FixtureRequest, trained: Stack) -> Sites:
    """A short training between four sites, which are gone afterwards, however that ended."""
    project = trained.project.overlaid(ALLFOLD_WAN_STEPS=str(WAN_STEPS))
    with logs_of_failures(request, project):
        project.compose("--profile", "wan", "up", "--detach", "--no-build", *SITES, seconds=300.0)
        project.wait(*SITES, seconds=TRAINING_SECONDS)
        found = Sites(
            project.exit_codes(*SITES), project.docker("logs", project.container(SITES[0]))
        )
        project.compose("--profile", "wan", "rm", "--stop", "--force", *SITES, *SITE_AGENTS)
    return found


@pytest.fixture(scope="module")
def prometheus(request: pytest.FixtureRequest, scaled: Scaling, up: Stack) -> Prometheus:
    """The services of profile `observability` but Grafana, of which Debian has no package."""
    docker.provide_images(up.project.env, docker.PROMETHEUS_IMAGE)
    with logs_of_failures(request, up.project):
        add = ("--profile", "observability", "up", "--detach", "--no-build")
        up.project.compose(*add, "prometheus")
        found = Prometheus(up.project.env["ALLFOLD_PROMETHEUS_PUBLISH"])
        found.wait_for("http")
    return found


@dataclass(frozen=True)
class Renewal:
    """The stack after its token was changed, and what there was before."""

    stack: Stack
    old_token: str
    began: dict[str, str]


@pytest.fixture(scope="module")
def renewed(
    request: pytest.FixtureRequest,
    up: Stack,
    prometheus: Prometheus,
    latest: list[docker.Project],
) -> Renewal:
    """Change the token as one does without any pause: with both for a while."""
    old, began = up.token(), up.began()
    with logs_of_failures(request, up.project):
        for tokens in (f"new-token,{old}", "new-token"):
            project = up.project.overlaid(ALLFOLD_TOKEN=tokens)
            project.compose("up", "--detach", "--no-build", "agent-a", "agent-b")
            wait_for_agents(up.ask)
    latest.append(project)
    return Renewal(replace(up, project=project), old, began)


def wait_for_agents(ask: Callable[[str, str], tuple[int, str]]) -> None:
    """Wait until containers that have just been made hold agents: both import torch at once."""
    wait_until(
        lambda: alive(ask, "new-token") == ["agent-a", "agent-b"],
        "all are there",
        START_SECONDS,
        LOOK_SECONDS,
    )


def alive(ask: Callable[[str, str], tuple[int, str]], token: str) -> list[str]:
    """The nodes that are alive; none where the token is refused."""
    status, body = ask("/v1/nodes", token)
    nodes = json.loads(body)["nodes"] if status == 200 else []
    return sorted(each["node"] for each in nodes if each["state"] == "alive")


@dataclass(frozen=True)
class Secured:
    """The stack after docker-compose.tls.yml was laid over it, and a client's certificate."""

    stack: Stack
    certificate: ssl.SSLContext

    def ask(self, path: str, token: str) -> tuple[int, str]:
        return fetch(f"https://{self.stack.address}{path}", token, self.certificate)


@pytest.fixture(scope="module")
def secured(
    request: pytest.FixtureRequest,
    renewed: Renewal,
    tmp_path_factory: pytest.TempPathFactory,
    latest: list[docker.Project],
) -> Secured:
    project = renewed.stack.project.overlaid("docker-compose.tls.yml")
    latest.append(project)
    with logs_of_failures(request, project):
        again = ("--profile", "observability", "up", "--detach", "--no-build")
        project.compose(*again, "agent-a", "agent-b", "prometheus", seconds=300.0)
        shown = certificate(project, "user", tmp_path_factory.mktemp("tls"))
        found = Secured(replace(renewed.stack, project=project), shown)
        wait_for_agents(found.ask)
    return found


@pytest.fixture(scope="module")
def ddp(request: pytest.FixtureRequest, secured: Secured) -> docker.Project:
    """The stack after its job of torch's DistributedDataParallel, however that ended."""
    project = secured.stack.project
    with logs_of_failures(request, project):
        project.compose("--profile", "ddp", "up", "--detach", "--no-build", "ddp-a", "ddp-b")
        project.wait("ddp-a", "ddp-b", seconds=TRAINING_SECONDS)
    return project


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, trained: Stack, latest: list[docker.Project]) -> Ending:
    """Stop the stack and take it down, after all other tests; return its exit codes and remains."""
    project = latest[-1]
    with ended_with_logs_of_failures(request, project):
        project.compose("stop", "--timeout", "10", *LONG_RUNNING)
        codes = project.exit_codes(*LONG_RUNNING)
        logs = project.logs() if KILLED in codes.values() else ""
        before = project.leftovers()
    return Ending(codes, before, project.leftovers(), logs)


def test_base_images_are_pulled_or_stood_in_for(bases: docker.Environment) -> None:
    for image in docker.BASE_IMAGES:
        docker.run(["docker", "image", "inspect", image], bases)


def test_all_images_build(images: docker.Project) -> None:
    for image in ("orchestrator", "agent", "job"):
        assert f"allfold-{image}" in images.docker("image", "ls")


@pytest.mark.parametrize("image", ["orchestrator", "agent", "job"])
def test_all_modules_of_an_image_are_compiled(images: docker.Project, image: str) -> None:
    """For every library but the tests in it, and torch's files for later Pythons."""
    assert uncompiled(images, f"allfold-{image}:{__version__}")[:20] == []


def test_all_services_come_up(up: Stack) -> None:
    assert moments(up.events, "start").keys() == set(docker.default_services())


def test_the_training_ends_well_on_both_nodes(trained: Stack) -> None:
    assert trained.project.exit_codes("train-a", "train-b") == {"train-a": 0, "train-b": 0}


def test_rank_0_reports_its_accuracy_and_identical_ranks_last(trained: Stack) -> None:
    printed = trained.project.docker("logs", trained.project.container("train-a")).splitlines()
    last = [line for line in printed if line.startswith("[0] ")][-1]
    assert re.fullmatch(r"\[0\] demo: ok accuracy=\d+\.\d+ ranks_identical=yes", last), last


def test_nothing_starts_before_what_it_depends_on_is_ready(up: Stack) -> None:
    started = moments(up.events, "start")
    ready = moments(up.events, "die") | moments(up.events, "health_status: healthy")
    late = [(a, b) for a, gates in GATES.items() for b in gates if not ready[b] < started[a]]
    assert late == []


@pytest.fixture(scope="module")
def inspected(up: Stack) -> Inspected:
    """The settings of each service's container, as the engine has them."""
    found = up.project.inspect()
    return {service: found[service] for service in docker.default_services()}


def test_no_service_runs_as_root(up: Stack, inspected: Inspected) -> None:
    users = {service: each["Config"]["User"] for service, each in inspected.items()}
    assert [service for service, user in users.items() if user in ("", "0", "root")] == []
    for service in LONG_RUNNING:
        shown = up.project.docker("top", up.project.container(service), "-eo", "pid,uid")
        owners = [line.split()[1] for line in shown.splitlines()[1:]]
        assert owners
        assert "0" not in owners, f"{service} has a process of root"


def test_every_service_has_a_read_only_root_and_no_capabilities(
    inspected: Inspected,
) -> None:
    for service, each in inspected.items():
        host = each["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service


def test_every_service_has_limits_of_memory_processes_and_logs(
    inspected: Inspected,
) -> None:
    for service, each in inspected.items():
        host = each["HostConfig"]
        assert host["Memory"] >= 1 << 30, service
        assert host["PidsLimit"] == 4096, service
        assert host["LogConfig"] == {
            "Type": "json-file",
            "Config": {"max-size": "10m", "max-file": "3"},
        }, service


def test_only_the_orchestrator_is_published_and_only_to_this_machine(
    inspected: Inspected,
) -> None:
    bindings = {
        service: each["HostConfig"]["PortBindings"] or {} for service, each in inspected.items()
    }
    published = {service: ports for service, ports in bindings.items() if ports}
    assert list(published) == ["orchestrator"]
    assert [
        [place["HostIp"] for place in places] for places in published["orchestrator"].values()
    ] == [["127.0.0.1"]]


def test_jobs_have_no_network_at_all(inspected: Inspected) -> None:
    for service in ("train-a", "train-b"):
        assert list(inspected[service]["NetworkSettings"]["Networks"]) == ["none"]


def test_the_orchestrator_is_ready_on_its_published_port(up: Stack) -> None:
    status, body = up.ask("/readyz")
    assert status == 200, body


def test_the_api_wants_the_token_that_was_made_for_this_project(up: Stack) -> None:
    assert up.ask("/v1/nodes")[0] == 401
    status, body = up.ask("/v1/nodes", up.token())
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
    warned = {each["check"] for each in report["findings"] if each["level"] == "warn"}
    assert warned <= {"agent socket"}, "the limits of the containers are wide enough"
    assert {(each["source"], each["target"]) for each in report["links"]} == {
        ("agent-a", "agent-b"),
        ("agent-b", "agent-a"),
    }


def test_no_secret_shows_in_an_inspect_or_in_the_logs(up: Stack, inspected: Inspected) -> None:
    inside = ("exec", up.project.container("orchestrator"), "cat")
    secrets = [up.token(), up.project.docker(*inside, "/run/allfold-redis/password")]
    assert all(len(secret) >= 32 for secret in secrets)
    shown = json.dumps(inspected) + up.project.logs()
    assert [secret for secret in secrets if secret in shown] == []


def test_redis_wants_a_password(up: Stack) -> None:
    answer = up.project.docker("exec", up.project.container("redis"), "redis-cli", "ping")
    assert answer.startswith("NOAUTH ")


@pytest.mark.long
def test_a_training_goes_on_while_it_is_scaled_up_and_down(scaled: Scaling) -> None:
    """Every container ends well: those that leave, and those that stay to the end."""
    assert re.fullmatch(
        r"elastic: ok accuracy=\d+\.\d+ each_image_once_per_epoch=yes", scaled.said[-1]
    )
    assert {2, 4} <= set(scaled.sizes)
    assert scaled.statuses == [0] * 4


@pytest.mark.long
@pytest.mark.long
def test_four_sites_train_with_few_bytes(sites: Sites) -> None:
    assert sites.exit_codes == dict.fromkeys(SITES, 0), sites.said
    first, *_, last = sites.said.splitlines()
    assert first == "rank 0 of 4 begins at step 0"
    end = json.loads(last)
    assert (end["step"], end["ranks"]) == (WAN_STEPS, 4)
    assert end["bytes"] > 0


def test_prometheus_has_all_services_and_our_alerts(prometheus: Prometheus) -> None:
    with (docker.ROOT / "deploy/prometheus/alerts.yml").open() as file:
        wanted = {
            rule["alert"] for group in yaml.safe_load(file)["groups"] for rule in group["rules"]
        }
    groups = prometheus.ask("rules")["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} == wanted
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}


@pytest.mark.long
def test_a_changed_token_is_in_force_and_nothing_was_restarted(renewed: Renewal) -> None:
    stack = renewed.stack
    wait_until(
        lambda: stack.ask("/v1/nodes", renewed.old_token)[0] == 401,
        "the old one is refused",
        pause=LOOK_SECONDS,
    )
    assert alive(stack.ask, "new-token") == ["agent-a", "agent-b"]
    assert stack.began() == renewed.began


@pytest.mark.long
def test_with_tls_the_orchestrator_answers_those_who_show_a_certificate(secured: Secured) -> None:
    assert alive(secured.ask, "new-token") == ["agent-a", "agent-b"]
    assert secured.ask("/v1/nodes", "another")[0] == 401
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):
        replace(secured, certificate=stranger).ask("/v1/nodes", "new-token")
    with pytest.raises(OSError):
        secured.stack.ask("/v1/nodes", "new-token")  # without TLS


@pytest.mark.long
def test_with_tls_each_service_finds_its_own_key_and_no_other(
    secured: Secured, prometheus: Prometheus
) -> None:
    project = secured.stack.project
    for service in (*LONG_RUNNING, "prometheus"):
        look = ("exec", project.container(service), "find", "/run", "-name", "*.key")
        assert project.docker(*look).split() == [f"/run/allfold-tls/{service}/tls.key"], service


@pytest.mark.long
def test_with_tls_status_and_doctor_need_no_arguments_either(secured: Secured) -> None:
    shown = json.loads(allfold_in(secured.stack, "agent-a", "status", "--json"))
    assert sorted(each["node"] for each in shown["agents"].values()) == ["agent-a", "agent-b"]
    report = json.loads(allfold_in(secured.stack, "orchestrator", "doctor", "--json"))
    assert report["counts"]["fail"] == 0


@pytest.mark.long
def test_prometheus_scrapes_with_tls(secured: Secured, prometheus: Prometheus) -> None:
    prometheus.wait_for("https")


@pytest.mark.long
def test_a_job_of_torch_ddp_runs_through_tls(ddp: docker.Project) -> None:
    assert ddp.exit_codes("ddp-a", "ddp-b") == {"ddp-a": 0, "ddp-b": 0}
    last = ddp.docker("logs", ddp.container("ddp-a")).splitlines()[-1]
    assert re.fullmatch(r"\[0\] ddp on allfold: ok accuracy=\d+\.\d+ loss=\d+\.\d+", last)


def test_services_end_by_themselves_when_told_to(ended: Ending) -> None:
    killed = [service for service, code in ended.exit_codes.items() if code == KILLED]
    assert killed == [], ended.logs


def test_down_leaves_nothing_behind(ended: Ending) -> None:
    assert ended.before != []
    assert ended.left == []
