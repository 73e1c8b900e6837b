"""``allfold doctor`` on this machine, and with services that run, are stopped or are not there."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from allfold.cli._doctor import asking, machine
from allfold_cluster import Cluster
from allfold_core.errors import ServiceError
from tests.client_sdk.http_service import service
from tests.support.processes.cli import Commands, called, commands

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


@pytest.fixture(scope="module")
def stack() -> Iterator[Cluster]:
    with Cluster(token="the-right-token") as running:
        running.start(2)
        yield running


def diagnose(allfold: Commands, *options: str, status: int, **env: str) -> dict[str, Any]:
    """The report, after checking that what people see ends with a next step for all that is bad."""
    shown = called("doctor", *options, status=status, env=env).stdout
    report = json.loads(called("doctor", "--json", *options, status=status, env=env).stdout)
    bad = [each for each in report["findings"] if each["level"] in ("warn", "fail")]
    assert shown.count("next: ") == len(bad)
    assert all(each["advice"] for each in bad)
    assert shown.splitlines()[-1].startswith("doctor: ")
    return dict(report)


def found(report: dict[str, Any], check: str, level: str) -> list[str]:
    """The places and texts of the findings of one check and level."""
    return [
        f"{each['where']}: {each['found']}"
        for each in report["findings"]
        if (each["check"], each["level"]) == (check, level)
    ]


# --- without a service


def test_a_machine_without_services_is_fine_as_a_job_starts_its_own(allfold: Commands) -> None:
    report = diagnose(allfold, status=0)
    assert "nodes were not checked" in found(report, "orchestrator", "skipped")[0]
    (socket,) = found(report, "agent socket", "ok")
    assert "no agent listens on" in socket
    assert socket.endswith("a job starts its own allfold-agent and allfold-orchestrator")
    assert found(report, "limits", "ok")
    assert found(report, "versions", "ok")


@pytest.mark.parametrize("named", ["", NOWHERE])
def test_where_a_job_cannot_start_its_own_services_the_packages_that_it_lacks_are_named(
    allfold: Commands, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    def version(name: str) -> str:
        if name in ("allfold-agent", "allfold-orchestrator"):
            raise PackageNotFoundError(name)
        return "0"

    monkeypatch.setattr(machine, "version", version)
    report = diagnose(allfold, "--local", status=0, ALLFOLD_ORCHESTRATOR_URL=named)
    (warning,) = (each for each in report["findings"] if each["check"] == "agent socket")
    missing = "allfold-agent" if named else "allfold-agent and allfold-orchestrator"
    assert warning["level"] == "warn"
    assert warning["found"].endswith(f"a job cannot start its own: {missing} not installed")
    assert 'pip install "allfold[local]"' in warning["advice"]


def test_where_jobs_may_start_nothing_an_agent_is_missing(allfold: Commands) -> None:
    report = diagnose(allfold, "--local", status=0, ALLFOLD_START="never")
    assert "no agent listens on" in found(report, "agent socket", "warn")[0]


def test_a_setting_with_which_no_job_starts_fails(allfold: Commands) -> None:
    report = diagnose(allfold, "--local", status=1, ALLFOLD_START="maybe")
    (told,) = found(report, "environment", "fail")
    assert told.endswith("ALLFOLD_START is one of auto, always, never, got 'maybe'")


def test_local_asks_nobody(allfold: Commands) -> None:
    report = diagnose(allfold, "--local", status=0, ALLFOLD_ORCHESTRATOR_URL=NOWHERE)
    assert {each["where"] for each in report["findings"]} == {"this machine"}


def test_a_variable_that_is_misspelt_is_a_warning_with_the_one_that_is_meant(
    allfold: Commands,
) -> None:
    report = diagnose(allfold, "--local", ALLFOLD_TIMEUOT="3", ALLFOLD_XYZZY="", status=0)
    (warning,) = (each for each in report["findings"] if each["check"] == "environment")
    assert warning["found"] == "nobody reads ALLFOLD_TIMEUOT"
    assert warning["advice"].startswith("did you mean ALLFOLD_TIMEOUT?")


def test_a_socket_that_was_named_and_is_not_there_fails(allfold: Commands) -> None:
    report = diagnose(allfold, "--local", status=1, ALLFOLD_SOCKET="/nowhere/agent.sock")
    assert "/nowhere/agent.sock (No such file or directory)" in str(report["findings"])


def test_something_else_than_a_socket_fails(allfold: Commands, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("")
    report = diagnose(allfold, "--local", status=1, ALLFOLD_SOCKET=str(path))
    assert "is not the socket of a node agent" in found(report, "agent socket", "fail")[0]


def test_an_agent_that_does_not_greet_fails(
    allfold: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_GREETING_SECONDS", 0.2)
    _, path = allfold.agent()
    report = diagnose(allfold, "--local", status=1, ALLFOLD_SOCKET=path)
    assert "does not answer within 0.2 s" in found(report, "agent socket", "fail")[0]


def test_an_orchestrator_that_was_named_and_is_not_there_fails(allfold: Commands) -> None:
    report = diagnose(allfold, status=1, ALLFOLD_ORCHESTRATOR_URL=NOWHERE)
    assert "Connection refused" in found(report, "orchestrator", "fail")[0]
    (finding,) = (each for each in report["findings"] if each["level"] == "fail")
    assert "start 'allfold orchestrator', or correct its address" in finding["advice"]


def test_a_service_that_accepts_and_says_nothing_is_told_from_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report = json.loads(called("doctor", "--json", "--agent-url", url, status=1).stdout)
    (finding,) = (each for each in report["findings"] if each["level"] == "fail")
    assert finding["check"] == "agent"
    assert "packets are dropped, or the process is stopped" in finding["advice"]


def test_what_is_no_url_is_wrong_usage() -> None:
    done = called("doctor", "--agent-url", "x", status=2)
    assert "--agent-url must be an address" in done.stderr


def test_an_orchestrator_in_the_place_of_an_agent_is_told_from_one_and_the_other_way_round(
    allfold: Commands,
) -> None:
    facts = {"service": "allfold-orchestrator", "version": "0", "now": time.time()}
    with service({"/v1/facts": facts}) as url:
        report = diagnose(allfold, "--agent-url", url, status=1)
    (told,) = found(report, "agent", "fail")
    assert "leads to allfold-orchestrator, not to allfold-agent" in told
    with service({"/v1/facts": facts | {"service": "allfold-agent"}}) as url:
        report = diagnose(allfold, status=1, ALLFOLD_ORCHESTRATOR_URL=url)
    (told,) = found(report, "orchestrator", "fail")
    assert "leads to allfold-agent, not to allfold-orchestrator" in told


def test_a_state_store_that_is_down_is_told_from_an_orchestrator_that_is(
    allfold: Commands,
) -> None:
    facts = {"service": "allfold-orchestrator", "version": "0", "now": time.time()}
    down = ServiceError("cannot reach its state store", component="store", cause="ConnectionError")
    answers = {
        "/v1/facts": facts | {"needs_token": True},
        "/v1/nodes": (503, {"error": down.to_dict()}),
    }
    with service(answers) as url:
        report = diagnose(allfold, status=1, ALLFOLD_ORCHESTRATOR_URL=url)
    assert found(report, "orchestrator", "ok")
    (told,) = found(report, "state store", "fail")
    assert "its state store is down (ConnectionError)" in told


@pytest.mark.parametrize(
    ("state", "level", "text"),
    [
        ({"state": "gone", "heartbeat_age": None}, "warn", "is gone"),
        ({"state": "late", "heartbeat_age": 7.0}, "fail", "has not been heard for 7.0 s"),
        ({"state": "alive", "draining": True}, "warn", "takes no more ranks"),
    ],
)
def test_nodes_that_are_not_well_are_named(state: dict[str, Any], level: str, text: str) -> None:
    facts = {"service": "allfold-orchestrator", "version": "0", "now": time.time()}
    node = {"node": "b", "control_url": NOWHERE, "data_address": "127.0.0.1:9"} | state
    answers = {"/v1/facts": facts | {"needs_token": True}, "/v1/nodes": {"nodes": [node]}}
    with service(answers) as url:
        status = 1 if state["state"] != "gone" else 0
        out = called("doctor", "--json", "--orchestrator", url, status=status).stdout
    (told,) = found(json.loads(out), "registration", level)
    assert told.startswith("node b: ")
    assert text in told


# --- with services


def test_a_stack_that_works_is_checked_in_every_direction(
    allfold: Commands, stack: Cluster
) -> None:
    report = diagnose(allfold, status=0, **stack.environment())
    assert report["counts"]["fail"] == report["counts"]["skipped"] == 0
    assert found(report, "control port", "ok") == ["all nodes: reached in all 2 directions"]
    assert found(report, "data port", "ok") == ["all nodes: reached in all 2 directions"]
    assert found(report, "token", "ok")
    assert [(each["source"], each["target"]) for each in report["links"]] == [
        ("node1", "node0"),
        ("node0", "node1"),
    ]
    assert all(each["bandwidth"] > 0 and each["path"] == "machine" for each in report["links"])
    assert found(report, "clock", "ok")
    assert list(report["nodes"]) == ["node0", "node1"]
    assert report["nodes"]["node0"]["addresses"]["control_url"] == stack.agents["node0"].control_url
    (socket_found,) = found(report, "agent socket", "ok")
    assert "leads to node node0" in socket_found


@pytest.mark.parametrize(
    ("token", "text"), [("", "neither ALLFOLD_TOKEN nor"), ("wrong", "refuses the token of")]
)
def test_a_token_that_is_missing_or_wrong_is_said_so(
    allfold: Commands, stack: Cluster, token: str, text: str
) -> None:
    env = stack.environment() | {"ALLFOLD_TOKEN": token}
    (where,) = found(diagnose(allfold, status=1, **env), "token", "fail")
    assert text in where
    given = ("--agent-url", stack.agents["node0"].control_url)
    (where,) = found(diagnose(allfold, *given, status=1, **env), "token", "fail")
    assert text in where


def test_the_token_may_be_in_a_file(allfold: Commands, stack: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("the-right-token\n")
    env = stack.environment() | {"ALLFOLD_TOKEN": "", "ALLFOLD_TOKEN_FILE": str(file)}
    diagnose(allfold, status=0, **env)
    env["ALLFOLD_TOKEN_FILE"] = "/nowhere/token"
    refused = called("doctor", status=2, env=env).stderr
    assert "ALLFOLD_TOKEN_FILE (/nowhere/token) cannot be read" in refused


def test_agents_alone_are_checked_without_the_orchestrator(
    allfold: Commands, stack: Cluster
) -> None:
    options = [word for node in stack.agents.values() for word in ("--agent-url", node.control_url)]
    env = {"ALLFOLD_TOKEN": stack.token, "ALLFOLD_ORCHESTRATOR_URL": NOWHERE}
    report = diagnose(allfold, *options, status=0, **env)
    assert report["orchestrators"] == {}
    assert len(report["links"]) == 2


def test_an_agent_that_is_stopped_fails_and_the_others_are_checked(
    stack: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "SECONDS", 1.0)
    agent = stack.services[2]
    agent.signal(signal.SIGSTOP)
    try:
        report = json.loads(called("doctor", "--json", status=1, env=stack.environment()).stdout)
    finally:
        agent.signal(signal.SIGCONT)
    assert "node node1: no answer from here" in found(report, "agent", "fail")[0]
    (where,) = found(report, "control port", "fail")
    assert "node node1: no other node (asked: node0) reaches" in where
    assert "node1 -> node0" in found(report, "ports", "skipped")[0]
