"""The promises of the Compose files and of the images' helpers, checked without Docker."""

import json
import os
import re
import shlex
import socket
import ssl
import stat
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from allfold_agent.settings import AgentSettings
from tests.support.processes import docker

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
PACKAGES = ("collective_core", "orchestrator", "node_agent", "client_sdk")
BASE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = BASE["services"]
OVERLAYS: dict[str, dict[str, Any]] = {
    path.name: yaml.safe_load(path.read_text())["services"]
    for path in sorted(ROOT.glob("docker-compose.*.yml"))
}
ADDED = {n: s for each in OVERLAYS.values() for n, s in each.items() if n not in SERVICES}
ALL = SERVICES | ADDED
TLS = OVERLAYS["docker-compose.tls.yml"]
# Four sites: a job each, and its agent.
WAN = [f"wan-{site}" for site in "abcd"]
WAN_AGENTS = [f"wan-agent-{site}" for site in "abcd"]
# What an overlay may change of a service of docker-compose.yml: nothing that holds it in.
OPEN_TO_OVERLAYS = {"command", "depends_on", "environment", "healthcheck", "volumes", "image"}
OPEN_TO_OVERLAYS |= {"build", "deploy", "mem_limit"}
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def project(package: str) -> dict[str, Any]:
    text = (ROOT / package / "pyproject.toml").read_text()
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def python(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DOCKER / script), *arguments],
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def mebibytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([mg])b?", docker.with_defaults(text)).groups()  # type: ignore[union-attr]
    return int(number) * {"m": 1, "g": 1024}[unit]


@pytest.mark.parametrize("name", ALL)
def test_every_service_is_hardened(name: str) -> None:
    service = ALL[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", ALL)
def test_every_service_has_limits_of_memory_processes_and_logs(name: str) -> None:
    service = ALL[name]
    assert re.fullmatch(r"\$\{ALLFOLD_\w+:-\d+[mg]\}", service["mem_limit"])
    # docker-compose 1.29 fails with a variable here.
    assert isinstance(service["pids_limit"], int)
    assert service["logging"] == {
        "driver": "json-file",
        "options": {
            "max-size": "${ALLFOLD_LOG_MAX_SIZE:-10m}",
            "max-file": "${ALLFOLD_LOG_MAX_FILE:-3}",
        },
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_takes_nothing_of_that_back(overlay: str) -> None:
    for name in OVERLAYS[overlay].keys() & SERVICES.keys():
        assert OVERLAYS[overlay][name].keys() <= OPEN_TO_OVERLAYS, name


def test_redis_forgets_nothing_and_stays_below_the_limit_of_its_container() -> None:
    for service in (SERVICES["redis"], SERVICES["redis"] | TLS["redis"]):
        command = service["command"]
        assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
        limit = mebibytes(command[command.index("--maxmemory") + 1])
        # Its child that writes the append-only file anew has a copy of what changes meanwhile.
        assert limit <= mebibytes(service["mem_limit"]) // 2


def test_agents_have_the_time_to_drain_before_they_are_killed() -> None:
    graces = [each["stop_grace_period"] for name, each in SERVICES.items() if "agent-" in name]
    assert len(graces) == 6
    drain = AgentSettings.model_fields["drain_seconds"].default
    assert all(int(grace.removesuffix("s")) >= drain + 8 for grace in graces)


def test_no_secret_is_written_in_a_file_or_on_a_command_line() -> None:
    every = [*SERVICES.items(), *(pair for each in OVERLAYS.values() for pair in each.items())]
    secret = re.compile(r"token|password", re.IGNORECASE)
    for name, service in every:
        given = {k: v for k, v in service.get("environment", {}).items() if secret.search(k)}
        if given.pop("ALLFOLD_TOKEN", None):
            assert name == "secrets"
        assert all(key.endswith("_FILE") and value[0] == "/" for key, value in given.items()), name
        words = [word for word in service.get("command", ()) if secret.search(word)]
        assert words == [], name
    assert SERVICES["secrets"]["environment"] == {"ALLFOLD_TOKEN": "${ALLFOLD_TOKEN:-}"}


def test_only_services_for_people_publish_a_port_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in ALL.items() if "ports" in service}
    assert {name: docker.with_defaults(port) for name, (port,) in published.items()} == {
        "orchestrator": "127.0.0.1:7400:7400",
        "prometheus": "127.0.0.1:9090:9090",
        "grafana": "127.0.0.1:3000:3000",
    }


def test_each_secret_is_in_the_containers_that_read_it_and_in_no_other() -> None:
    readers: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            readers.setdefault(volume.partition(":")[0], set()).add(name)
    assert readers["token"] == {"secrets", "orchestrator", "agent-a", "agent-b", *WAN_AGENTS}
    assert readers["redis-password"] == {"secrets", "orchestrator", "redis"}
    assert readers["prometheus-token"] == {"secrets", "prometheus"}
    assert readers["grafana-password"] == {"secrets", "grafana"}


def test_each_private_key_is_in_the_container_of_its_holder_and_in_no_other() -> None:
    mounted = {name: volumes_of(service) for name, service in TLS.items()}
    made = mounted.pop("certs")
    assert made.pop("certs") == "/run/allfold-certs", "the authority's key is for nobody else"
    for holder, volumes in mounted.items():
        assert volumes == {f"tls-{holder}": f"/run/allfold-tls/{holder}"}
        read = set(re.findall(r"/run/allfold-tls/([\w-]+)", json.dumps(TLS[holder])))
        assert read == {holder}
    assert made == {name: path for each in mounted.values() for name, path in each.items()}
    others = [SERVICES, *(each for name, each in OVERLAYS.items() if "tls" not in name)]
    named = {name for each in others for s in each.values() for name in volumes_of(s)}
    assert not named & {"certs", *made}
    # A volume has the owner of the folder that it covers first.
    dockerfile = (DOCKER / "orchestrator.Dockerfile").read_text().split()
    assert set(made.values()) <= set(dockerfile)


def volumes_of(service: dict[str, Any]) -> dict[str, str]:
    """Return where the service mounts what, by the name of the volume or the path on the host."""
    return dict(each.split(":")[:2] for each in service.get("volumes", ()))


def test_prometheus_shows_the_certificate_that_it_mounts() -> None:
    read = (ROOT / "deploy" / "prometheus" / "prometheus-tls.yml").read_text()
    assert set(re.findall(r"/run/allfold-tls/([\w-]+)/", read)) == {"prometheus"}


def test_jobs_reach_nobody_but_their_agent_and_where_torch_needs_it_each_other() -> None:
    jobs = {n: s for n, s in SERVICES.items() if s["image"].startswith("allfold-job")}
    reached = {n: s.get("network_mode") or s["networks"] for n, s in jobs.items()}
    assert reached == {
        "train-a": "none",
        "train-b": "none",
        "elastic": "none",
        **dict.fromkeys(WAN, "none"),
        "ddp-a": ["jobs"],
        "ddp-b": ["jobs"],
    }
    assert BASE["networks"]["jobs"]["internal"] is True
    assert {n for n, s in ALL.items() if "jobs" in s.get("networks", ())} == {"ddp-a", "ddp-b"}


def test_the_ranks_of_the_ddp_job_meet_at_the_container_of_rank_0() -> None:
    for name in ("ddp-a", "ddp-b"):
        assert SERVICES[name]["environment"]["MASTER_ADDR"] == "ddp-a"
    command = SERVICES["ddp-a"]["command"]
    assert command[command.index("--node-rank") + 1] == "0"


def test_each_site_sends_at_most_50_mbit_and_has_a_rank_of_its_own() -> None:
    limits = {SERVICES[name]["environment"]["ALLFOLD_AGENT_LIMIT"] for name in WAN_AGENTS}
    assert limits == {"50Mbit"}
    for rank, (name, agent) in enumerate(zip(WAN, WAN_AGENTS, strict=True)):
        (folder,) = volumes_of(SERVICES[name]).items()
        assert folder in volumes_of(SERVICES[agent]).items(), "it reaches this agent"
        assert SERVICES[name]["environment"]["ALLFOLD_RANK"] == str(rank)
        assert SERVICES[name]["environment"]["ALLFOLD_WORLD_SIZE"] == str(len(WAN))


def test_grafana_is_given_the_data_source_and_the_dashboard_that_are_here() -> None:
    mounts = dict(each.split(":")[:2] for each in SERVICES["grafana"]["volumes"])
    places = {inside: ROOT / host for host, inside in mounts.items() if host.startswith("./")}
    provisioned = {
        kind: yaml.safe_load((places[f"/etc/grafana/provisioning/{kind}"] / file).read_text())
        for kind, file in (("datasources", "prometheus.yml"), ("dashboards", "allfold.yml"))
    }
    (source,) = provisioned["datasources"]["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["isDefault"] is True, "the dashboard's list begins with the default one"
    (provider,) = provisioned["dashboards"]["providers"]
    folder = provider["options"]["path"]
    (dashboard,) = (path for inside, path in places.items() if inside.startswith(f"{folder}/"))
    # Variables of an export (__inputs) are only filled in by hand.
    assert "__inputs" not in json.loads(dashboard.read_text())


def test_prometheus_scrapes_with_tls_what_it_scrapes_without() -> None:
    folder = ROOT / "deploy" / "prometheus"
    plain, tls = (
        yaml.safe_load((folder / f"{name}.yml").read_text())
        for name in ("prometheus", "prometheus-tls")
    )
    for job in tls["scrape_configs"]:
        assert job.pop("scheme") == "https"
        identity = job.pop("tls_config")
        for found in job.get("http_sd_configs", ()):
            assert found.pop("tls_config") == identity
            found["url"] = found["url"].replace("https://", "http://", 1)
        assert identity["server_name"] == "allfold"
    assert tls == plain


def test_redis_shares_a_network_with_the_orchestrator_alone() -> None:
    near = {name for name, service in SERVICES.items() if "state" in service.get("networks", [])}
    assert near == {"redis", "orchestrator"}


def test_healthchecks_leave_variables_to_the_shell_of_the_container() -> None:
    for service in [*ALL.values(), *TLS.values()]:
        test = service.get("healthcheck", {}).get("test", ["CMD"])
        if test[0] == "CMD-SHELL":
            assert not re.search(r"(?<!\$)\$(?!\$)", test[1])
            assert shlex.split(test[1])


def test_the_images_have_the_version_of_the_packages() -> None:
    versions = {project(package)["version"] for package in PACKAGES}
    tags = {
        service["image"].partition(":")[2]
        for service in ALL.values()
        if service["image"].startswith("allfold-")
    }
    assert tags == versions


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_build_everywhere_and_run_as_nobody_special(path: Path) -> None:
    text = path.read_text()
    assert "--mount" not in text, "BuildKit only"
    assert {line.split()[1] for line in text.splitlines() if line.startswith("FROM ")} == {
        "python:3.11-slim-bookworm"
    }
    final = text.rpartition("\nFROM ")[2]
    assert "\nUSER 10001:10001\n" in final
    assert '\nENTRYPOINT ["' in final
    assert "\nHEALTHCHECK " in final


def test_images_share_the_stages_of_torch_and_of_our_wheels_word_for_word() -> None:
    """So that the engine makes each of them once."""
    stage = re.compile(r"FROM \S+ AS .+?(?=\n\n)", re.DOTALL)
    stages = [found for path in DOCKERFILES for found in stage.findall(path.read_text())]
    assert Counter(each.split()[3] for each in set(stages)) == {"torch": 1, "wheels": 1}
    assert Counter(each.split()[3] for each in stages) == {"torch": 2, "wheels": 3}


def test_requirements_are_those_of_the_packages_without_our_own() -> None:
    done = python("requirements.py", "node_agent/pyproject.toml", "client_sdk/pyproject.toml[cli]")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    sdk = project("client_sdk")
    wanted = project("node_agent")["dependencies"] + sdk["dependencies"]
    wanted += sdk["optional-dependencies"]["cli"]
    assert printed == sorted({line for line in wanted if not line.startswith("allfold")})


SECRETS = ("allfold-token/token", "allfold-redis/password", "allfold-grafana/password")


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    for name in ("token", "redis", "prometheus", "grafana"):
        (tmp_path / f"allfold-{name}").mkdir()
    return tmp_path


def make_secrets(volumes: Path, token: str = "") -> str:
    done = python("make_secrets.py", str(volumes), ALLFOLD_TOKEN=token)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_secrets_are_made_once_and_are_for_one_group(volumes: Path) -> None:
    make_secrets(volumes)
    files = [path for path in volumes.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in files} == {0o750}
    first = {path: (path.read_text(), path.stat().st_ino) for path in files}
    secrets = {(volumes / name).read_text() for name in SECRETS}
    assert len(secrets) == len(SECRETS)
    assert all(len(each) >= 32 for each in secrets)
    printed = make_secrets(volumes)
    assert {path: (path.read_text(), path.stat().st_ino) for path in first} == first
    assert sorted(path for path in volumes.rglob("*") if path.is_file()) == sorted(files)
    assert [each for each in secrets if each in printed] == []


def test_redis_asks_for_the_password_that_the_orchestrator_reads(volumes: Path) -> None:
    make_secrets(volumes)
    password = (volumes / "allfold-redis/password").read_text()
    assert (volumes / "allfold-redis/redis.conf").read_text() == f"requirepass {password}\n"


def test_a_token_that_is_given_replaces_the_one_made_before(volumes: Path) -> None:
    make_secrets(volumes)
    printed = make_secrets(volumes, "mine")
    for reader in ("token", "prometheus"):
        assert (volumes / f"allfold-{reader}/token").read_text() == "mine"
    assert "mine" not in printed
    make_secrets(volumes)
    assert (volumes / "allfold-token/token").read_text() == "mine", "it is kept"


def test_services_get_tokens_with_their_names_and_prometheus_the_first_one_alone(
    volumes: Path,
) -> None:
    make_secrets(volumes, "ops=new,team-a=old")
    assert (volumes / "allfold-token/token").read_text() == "ops=new,team-a=old"
    assert (volumes / "allfold-prometheus/token").read_text() == "new"


def test_a_token_that_nobody_could_send_is_refused_and_not_shown(volumes: Path) -> None:
    make_secrets(volumes)
    kept = (volumes / "allfold-token/token").read_text()
    done = python("make_secrets.py", str(volumes), ALLFOLD_TOKEN="open sesame")
    assert done.returncode == 1
    assert done.stderr.startswith("secrets: ALLFOLD_TOKEN has blanks")
    assert "sesame" not in done.stderr
    assert (volumes / "allfold-token/token").read_text() == kept


def test_prometheus_sends_the_first_of_several_tokens(volumes: Path) -> None:
    make_secrets(volumes, "new, old")
    assert (volumes / "allfold-token/token").read_text() == "new, old"
    assert (volumes / "allfold-prometheus/token").read_text() == "new"


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_readyz_and_shows_its_answer(status: int, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answer = f"HTTP/1.1 {status} Whatever\r\nContent-Length: 7\r\n\r\nchecks\n".encode()
        server = Thread(target=answer_once, args=(listener, answer))
        server.start()
        done = python("ready.py", "LISTEN", LISTEN=f"0.0.0.0:{listener.getsockname()[1]}")
        server.join()
    assert done.returncode == code
    assert "checks" in done.stdout


HOLDERS = TLS.keys() - {"certs"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authority")


@pytest.fixture(scope="module")
def certificates(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for holder in HOLDERS:
        (folder / holder).mkdir()
    make_certs(authority, folder)
    return folder


def make_certs(authority: Path, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = python(
        "make_certs.py", str(authority), str(folder), PATH=path, ALLFOLD_TLS_HOSTS="localhost ::1"
    )
    assert done.returncode == 0, done.stderr


def test_services_get_certificates_for_one_group_and_no_key_of_the_authority(
    authority: Path, certificates: Path
) -> None:
    files = [path for path in certificates.rglob("*") if path.is_file()]
    assert {str(path.relative_to(certificates)) for path in files} == {
        f"{holder}/{name}" for holder in HOLDERS for name in ("tls.crt", "tls.key", "ca.crt")
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in files} == {0o750}
    authoritys = (authority / "ca.key").read_text()
    assert [p for p in files if p.name == "tls.key" and p.read_text() == authoritys] == []


def test_the_certificate_of_people_stays_with_the_authority(
    authority: Path, certificates: Path
) -> None:
    files = list((authority / "user").iterdir())
    assert {path.name for path in files} == {"tls.crt", "tls.key", "ca.crt", "browser.p12"}
    secret = [path for path in files if path.suffix in (".key", ".p12")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert not (certificates / "user").exists()


def test_a_second_time_renews_the_certificates_of_the_same_authority(
    authority: Path, certificates: Path
) -> None:
    crt, ca = (certificates / "agent-a" / name for name in ("tls.crt", "ca.crt"))
    first = crt.read_text(), ca.read_text()
    make_certs(authority, certificates)
    assert crt.read_text() != first[0]
    assert ca.read_text() == first[1]


@pytest.mark.long
def test_a_change_of_the_authority_reaches_the_folders_of_all_services(
    authority: Path, certificates: Path
) -> None:
    before = (authority / "ca.crt").read_text()
    for option, trusted in (("--new-authority", 2), ("--forget-old-authorities", 1)):
        allfold = Path(sys.executable).with_name("allfold")
        subprocess.run([allfold, "certs", authority, option], check=True, timeout=30)
        make_certs(authority, certificates)
        found = {(certificates / holder / "ca.crt").read_text() for holder in HOLDERS}
        assert found == {(authority / "ca.crt").read_text()}
        assert found.pop().count("BEGIN CERTIFICATE") == trusted
    assert before not in (authority / "ca.crt").read_text()


def test_the_health_check_shows_the_certificate_of_its_service(certificates: Path) -> None:
    folder = certificates / "agent-a"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    with (
        socket.create_server(("127.0.0.1", 0)) as plain,
        context.wrap_socket(plain, server_side=True) as listener,
    ):
        server = Thread(target=answer_once, args=(listener, b"HTTP/1.1 200 OK\r\n\r\nchecks\n"))
        server.start()
        port = listener.getsockname()[1]
        done = python("ready.py", "LISTEN", LISTEN=f"0.0.0.0:{port}", ALLFOLD_TLS_DIR=str(folder))
        server.join()
    assert (done.returncode, done.stdout.strip()) == (0, "checks"), done.stderr


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(4096).startswith(b"GET /readyz HTTP/1.0\r\n")
        connection.sendall(answer)


def test_the_health_check_fails_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    done = python("ready.py", "LISTEN", LISTEN=address)
    assert done.returncode == 1
    assert "refused" in done.stderr
