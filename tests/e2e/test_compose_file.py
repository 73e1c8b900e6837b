"""The promises of docker-compose.yml and the images' helpers, checked without Docker."""

import os
import socket
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from allfold_agent.settings import AgentSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
PACKAGES = ("collective_core", "orchestrator", "node_agent", "client_sdk")
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
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


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_agents_have_the_time_to_drain_before_they_are_killed() -> None:
    graces = [each["stop_grace_period"] for name, each in SERVICES.items() if "agent-" in name]
    assert len(graces) == 2
    drain = AgentSettings.model_fields["drain_seconds"].default
    assert all(int(grace.removesuffix("s")) >= drain + 8 for grace in graces)


def test_no_token_is_written_in_the_file() -> None:
    values = {
        value
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if name == "ALLFOLD_TOKEN"
    }
    assert values == {"${ALLFOLD_TOKEN:-}"}


def test_only_the_orchestrator_publishes_a_port_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"orchestrator": ["${ALLFOLD_PUBLISH:-127.0.0.1:7400}:7400"]}


def test_redis_shares_a_network_with_the_orchestrator_alone() -> None:
    near = {name for name, service in SERVICES.items() if "state" in service.get("networks", [])}
    assert near == {"redis", "orchestrator"}


def test_the_images_have_the_version_of_the_packages() -> None:
    versions = {project(package)["version"] for package in PACKAGES}
    tags = {
        service["image"].partition(":")[2]
        for service in SERVICES.values()
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


def test_agent_and_job_share_the_torch_stage_word_for_word() -> None:
    agent, job = ((DOCKER / f"{name}.Dockerfile").read_text() for name in ("agent", "job"))
    stage = agent[agent.index("FROM ") : agent.index("\nFROM ", agent.index("FROM ") + 1)]
    assert " AS torch\n" in stage
    assert stage in job


def test_requirements_are_those_of_the_packages_without_our_own() -> None:
    done = python("requirements.py", "node_agent/pyproject.toml", "client_sdk/pyproject.toml[cli]")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    sdk = project("client_sdk")
    wanted = project("node_agent")["dependencies"] + sdk["dependencies"]
    wanted += sdk["optional-dependencies"]["cli"]
    assert printed == sorted({line for line in wanted if not line.startswith("allfold")})


def shown_token(**env: str) -> subprocess.CompletedProcess[str]:
    show = "import os; print(os.environ.get('ALLFOLD_TOKEN'), 'ALLFOLD_TOKEN_FILE' in os.environ)"
    return python("entrypoint.py", sys.executable, "-c", show, **env)


def test_the_entrypoint_takes_the_token_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    done = shown_token(ALLFOLD_TOKEN="", ALLFOLD_TOKEN_FILE=str(file))
    assert done.stdout == "from-file False\n"
    assert (
        shown_token(ALLFOLD_TOKEN="given", ALLFOLD_TOKEN_FILE=str(file)).stdout == "given False\n"
    )


@pytest.mark.parametrize(("content", "said"), [(None, "cannot read"), ("\n", "is empty")])
def test_the_entrypoint_refuses_a_token_file_without_a_token(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    done = shown_token(ALLFOLD_TOKEN="", ALLFOLD_TOKEN_FILE=str(file))
    assert done.returncode == 1
    assert said in done.stderr
    assert str(file) in done.stderr


def test_a_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert python("make_token.py", str(file), ALLFOLD_TOKEN="").returncode == 0
    first = file.read_text()
    assert len(first) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    python("make_token.py", str(file), ALLFOLD_TOKEN="")
    assert file.read_text() == first
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_a_token_that_is_given_replaces_the_one_made_before(tmp_path: Path) -> None:
    file = tmp_path / "token"
    python("make_token.py", str(file), ALLFOLD_TOKEN="")
    done = python("make_token.py", str(file), ALLFOLD_TOKEN="mine")
    assert file.read_text() == "mine"
    assert "mine" not in done.stdout


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
