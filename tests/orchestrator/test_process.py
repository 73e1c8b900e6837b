"""The program itself: how it starts, what it survives and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator.__main__ import main
from allfold_orchestrator.settings import Settings
from tests.orchestrator.fake_agent import FakeAgent, Served
from tests.orchestrator.process import OrchestratorProcess
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def linked_to(orchestrator: OrchestratorProcess, token: str = "") -> AsyncIterator[Served]:
    """The orchestrator, as agents in this process reach it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"http://{orchestrator.address}"
    async with httpx.AsyncClient(base_url=url, headers=headers) as http:
        yield SimpleNamespace(address=orchestrator.address, http=http)


def test_it_starts_without_any_configuration_and_says_where_it_listens() -> None:
    with OrchestratorProcess() as orchestrator:
        orchestrator.wait_ready()
        assert orchestrator.address.startswith("127.0.0.1:")
        (line,) = [line for line in orchestrator.log() if line["message"] == "listening"]
        assert line["address"] == orchestrator.address
        assert line["store"] == "embedded"
        assert not [line for line in orchestrator.log() if line["level"] != "info"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_and_soon_although_somebody_waits(number: signal.Signals) -> None:
    with OrchestratorProcess() as orchestrator:
        orchestrator.register("a")
        orchestrator.join(0, "a")
        waiter = HTTPConnection(orchestrator.address, timeout=40)
        waiter.request("GET", "/v1/groups/train/plan?epoch=1&session=s0&wait=30")
        # Whoever asks after it is answered after it was taken up.
        orchestrator.http.get("/v1/groups/train/plan?epoch=1&session=s0&wait=0.1")
        began = time.monotonic()
        assert orchestrator.end(number, seconds=10) == 0
        assert time.monotonic() - began < 5  # the promise is 2 s; test machines are busy
        assert json.load(waiter.getresponse())["ready"] is False
        waiter.close()
        assert orchestrator.log()[-1]["message"] == "stopped"


def test_it_ends_cleanly_and_soon_although_a_page_watches() -> None:
    with OrchestratorProcess() as orchestrator:
        with orchestrator.http.stream("GET", "/v1/overview/events") as response:
            lines = response.iter_lines()
            assert next(lines) == "event: overview"
            assert orchestrator.end(signal.SIGTERM, seconds=10) == 0
            assert "data: " in "".join(lines)
        assert orchestrator.log()[-1]["message"] == "stopped"


@pytest.mark.redis
def test_what_it_knows_survives_its_sudden_death(own_redis: RedisServer) -> None:
    with OrchestratorProcess(own_redis.url) as orchestrator:
        for node in ("a", "b"):
            orchestrator.register(node)
        joined = orchestrator.join(0, "a").json()
        orchestrator.kill()
        orchestrator.start()
        assert orchestrator.join(1, "b").json() == {**joined, "ready": True}
        assert orchestrator.http.get("/v1/groups/train").json()["phase"] == "ready"
        assert "gone" not in orchestrator.states().values()


@pytest.mark.redis
def test_it_survives_the_loss_of_its_store(own_redis: RedisServer) -> None:
    with OrchestratorProcess(own_redis.url) as orchestrator:
        orchestrator.wait_ready()
        orchestrator.register("a")
        own_redis.stop()

        def checks() -> dict[str, Any]:
            answer = orchestrator.http.get("/readyz").json()
            return {check["name"]: check for check in answer["checks"]}

        wait_until(lambda: not checks()["sweeper"]["ok"], "the sweeper notices")
        assert not orchestrator.is_ready
        assert checks()["store"]["ok"] is False
        assert "state store does not answer" in checks()["store"]["reason"]
        assert orchestrator.http.get("/healthz").status_code == 200
        for response in (orchestrator.join(0, "a"), orchestrator.http.get("/v1/groups")):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "AF400"
            assert response.json()["error"]["details"]["retry"] is True
        own_redis.start()
        orchestrator.wait_ready()
        assert orchestrator.join(0, "a").status_code == 404  # this Redis kept nothing
        orchestrator.register("a")
        assert orchestrator.join(0, "a").json()["ready"] is False
        lost = [line["message"] for line in orchestrator.log() if line["level"] == "error"]
        assert len(lost) == 1  # not a line per second


@pytest.mark.redis
def test_it_may_start_before_its_store(own_redis: RedisServer) -> None:
    own_redis.stop()
    with OrchestratorProcess(own_redis.url) as orchestrator:
        response = orchestrator.http.get("/readyz")
        assert response.status_code == 503
        assert response.json()["ready"] is False
        own_redis.start()
        orchestrator.wait_ready()


@pytest.mark.anyio
async def test_a_process_serves_control_links() -> None:
    with OrchestratorProcess(token="secret") as orchestrator:
        async with linked_to(orchestrator, "secret") as at, FakeAgent("a", at) as agent:
            await agent.register()
            await agent.link("secret")
            await agent.join(0, 1)
            await agent.holds("a")
        assert orchestrator.end(signal.SIGTERM, 5) == 0


@pytest.mark.anyio
@pytest.mark.redis
async def test_nodes_outlive_an_outage_of_the_orchestrator(own_redis: RedisServer) -> None:
    short = {"ALLFOLD_LEASE_SECONDS": "1", "ALLFOLD_HEARTBEAT_SECONDS": "0.2"}
    with OrchestratorProcess(own_redis.url, **short) as orchestrator:
        for node in ("fine", "dead"):
            orchestrator.register(node)
        orchestrator.kill()
        time.sleep(1.2)  # longer than the lease: this is the outage
        orchestrator.start()
        async with linked_to(orchestrator) as at, FakeAgent("fine", at) as fine:
            await fine.link()
            await until(lambda: orchestrator.states()["dead"] == "gone", "the dead one is dropped")
            assert orchestrator.states()["fine"] == "alive"


def test_it_warns_when_everybody_may_come_in() -> None:
    with OrchestratorProcess() as orchestrator:
        assert not orchestrator.warnings()
        orchestrator.kill()
        orchestrator.start(host="0.0.0.0")
        (warning,) = orchestrator.warnings()
        assert "ALLFOLD_TOKEN" in warning


def test_a_token_silences_the_warning_and_is_never_logged() -> None:
    with OrchestratorProcess(token="sesame") as orchestrator:
        orchestrator.kill()
        orchestrator.start(host="0.0.0.0")
        assert not orchestrator.warnings()
        assert "sesame" not in orchestrator.log_text()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allfold_orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--listen", "7400"],
            "--listen (ALLFOLD_ORCHESTRATOR_LISTEN): must be host:port, got '7400'",
        ),
        (
            ["--listen", "127.0.0.1:70000"],
            "--listen (ALLFOLD_ORCHESTRATOR_LISTEN): must be host:port, got '127.0.0.1:70000'",
        ),
        (
            ["--redis-url", "localhost:6379"],
            "--redis-url (ALLFOLD_REDIS_URL): must be 'embedded' or a redis://, rediss://, "
            "unix:// or redis+sentinel:// URL, got 'localhost:6379'",
        ),
        (
            ["--redis-url", "me:hush@localhost:6379"],
            "--redis-url (ALLFOLD_REDIS_URL): must be 'embedded' or a redis://, rediss://, "
            "unix:// or redis+sentinel:// URL, got one with a password, which is not shown",
        ),
        (
            ["--lease-seconds", "0"],
            "--lease-seconds (ALLFOLD_LEASE_SECONDS): must be greater than 0, got '0'",
        ),
        (
            ["--log-level", "chatty"],
            "--log-level (ALLFOLD_LOG_LEVEL): must be 'DEBUG', 'INFO', 'WARNING', 'ERROR' or "
            "'CRITICAL', got 'chatty'",
        ),
        (["--speed", "9"], "unrecognized arguments: --speed 9; --help lists the flags"),
    ],
)
def test_a_wrong_setting_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err == f"allfold-orchestrator: {line}\n"


def test_settings_that_contradict_each_other_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--lease-seconds", "0.9"])
    assert capsys.readouterr().err.startswith("allfold-orchestrator: a lease of 0.9 s is over")


def test_the_help_explains_every_flag_and_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for option in Settings.options().values():
        line = re.search(rf"^ +{option.flag} [A-Z]+ +(.*)$", out, re.MULTILINE)
        assert line, option
        assert option.description
        assert line[1].startswith(option.description)
        assert line[1].endswith(f"[{option.variable}]")
    assert "exit status" in out


def test_a_ready_file_that_cannot_be_written_is_named_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "no folder" / "ready"
    done = run("--listen", "127.0.0.1:0", "--ready-file", str(path))
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["message"].startswith(f"cannot write the ready file {path}: ")


def test_a_taken_port_is_named_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--listen", address)
    assert done.returncode == 1
    assert json.loads(done.stderr)["message"] == (
        f"cannot listen on {address}: Address already in use. Choose another address with "
        "--listen or ALLFOLD_ORCHESTRATOR_LISTEN, or end what listens there."
    )
