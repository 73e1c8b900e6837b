"""``allfold config``: values, their sources, secrets, values that cannot be used, unknown names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allfold.cli._config.services import strays
from allfold.cli._config.setting import masked, unknown
from tests.support.processes.cli import called

ROOT = Path(__file__).parents[2]


def shown(*arguments: str, status: int = 0, **env: str) -> dict[str, Any]:
    return dict(json.loads(called("config", "--json", *arguments, status=status, env=env).stdout))


def setting(report: dict[str, Any], reader: str, variable: str) -> dict[str, Any]:
    (found,) = (
        each
        for each in report["settings"]
        if (each["reader"], each["variable"]) == (reader, variable)
    )
    return dict(found)


def value_and_source(report: dict[str, Any], reader: str, variable: str) -> tuple[Any, Any]:
    found = setting(report, reader, variable)
    return found["value"], found["source"]


def test_values_come_from_the_environment_or_are_defaults() -> None:
    report = shown(ALLFOLD_TIMEOUT="7", ALLFOLD_LOG_LEVEL="debug")
    assert value_and_source(report, "sdk", "ALLFOLD_TIMEOUT") == ("7", "environment")
    assert value_and_source(report, "sdk", "ALLFOLD_INIT_TIMEOUT") == ("60", "default")
    assert value_and_source(report, "agent", "ALLFOLD_LOG_LEVEL") == ("DEBUG", "environment")
    assert value_and_source(report, "orchestrator", "ALLFOLD_LOG_LEVEL") == ("DEBUG", "environment")
    assert setting(report, "sdk", "ALLFOLD_TIMEOUT")["default"] == "300"
    assert report["unknown"] == report["not_installed"] == []


def test_a_flag_of_a_service_wins() -> None:
    flags = ("agent", "--data", "0.0.0.0:7412", "--log-level=error")
    report = shown(*flags, ALLFOLD_AGENT_DATA_LISTEN="10.0.0.1:1")
    assert {each["reader"] for each in report["settings"]} == {"agent"}
    found = value_and_source(report, "agent", "ALLFOLD_AGENT_DATA_LISTEN")
    assert found == ("0.0.0.0:7412", "flag")
    assert value_and_source(report, "agent", "ALLFOLD_LOG_LEVEL") == ("ERROR", "flag")
    report = shown("orchestrator", "--listen", "0.0.0.0:1")
    found = value_and_source(report, "orchestrator", "ALLFOLD_ORCHESTRATOR_LISTEN")
    assert found == ("0.0.0.0:1", "flag")


@pytest.mark.parametrize(("flag", "text"), [("--nope", "is no setting"), ("--data", "a value")])
def test_a_flag_that_the_service_would_refuse_is_wrong_usage(flag: str, text: str) -> None:
    assert text in called("config", "agent", flag, status=2).stderr


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush@redis:6379/0",
        "redis+sentinel://me:hush@one:26379,two:26379/mymaster?sentinel_password=hush",
    ],
)
def test_secrets_and_passwords_are_not_shown(url: str) -> None:
    env = {"ALLFOLD_TOKEN": "hush", "ALLFOLD_ADMIN_TOKEN": "hushhush", "ALLFOLD_REDIS_URL": url}
    for options in (("--sources",), ("--json",), ("--json", "agent", "--token", "hush")):
        out = called("config", *options, env=env).stdout
        assert "hush" not in out
        assert "****" in out


def test_no_password_is_shown_where_a_value_cannot_be_used() -> None:
    env = {
        "ALLFOLD_REDIS_URL": "http://me:hu@hush@redis?password=hush",
        "ALLFOLD_ORCHESTRATOR_URL": "ftp://me:hu@hush@host",
    }
    for options in ((), ("--json",)):
        out = called("config", *options, status=1, env=env).stdout
        assert "hush" not in out
        assert "must be 'embedded' or a redis://" in out


def test_a_token_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hush\n")
    report = shown(ALLFOLD_TOKEN_FILE=str(file))
    assert value_and_source(report, "cli", "ALLFOLD_TOKEN") == ("****", "file")
    report = shown(status=1, ALLFOLD_TOKEN_FILE="/nowhere")
    assert (
        "ALLFOLD_TOKEN_FILE (/nowhere) cannot be read"
        in setting(report, "cli", "ALLFOLD_TOKEN")["problem"]
    )


@pytest.mark.parametrize(
    ("reader", "variable", "value", "problem"),
    [
        ("sdk", "ALLFOLD_TIMEOUT", "-1", "-1"),
        ("sdk", "ALLFOLD_WIRE", "float8", "unknown wire format 'float8'"),
        ("sdk", "ALLFOLD_STRATEGY", "all_reduce=circle", "circle"),
        ("sdk", "ALLFOLD_GPU_PATH", "fast", "is auto, ipc"),
        ("sdk", "ALLFOLD_ON_LOSS", "cry", "one of raise, shrink"),
        ("sdk", "ALLFOLD_MIN_WORLD", "none", "is a number of ranks from 1 on; got none"),
        ("sdk", "ALLFOLD_GROUP", "a/b", "cannot be the name of a group"),
        ("cli", "ALLFOLD_ORCHESTRATOR_URL", "here", "an address such as"),
        ("agent", "ALLFOLD_AGENT_THREADS", "many", "got 'many'"),
        ("orchestrator", "ALLFOLD_LEASE_SECONDS", "0.1", "before a second heartbeat comes"),
    ],
)
def test_a_value_that_cannot_be_used_is_said_so(
    reader: str, variable: str, value: str, problem: str
) -> None:
    found = setting(shown(status=1, **{variable: value}), reader, variable)
    assert problem in found["problem"]
    assert found["value"] == value
    out = called("config", status=1, env={variable: value}).stdout
    assert f"cannot be used ({reader}): {variable}" in out


def test_a_variable_that_nobody_reads_is_named_with_the_one_that_is_meant() -> None:
    report = shown(ALLFOLD_TIMEUOT="3", ALLFOLD_XYZZY="")
    assert report["unknown"] == [
        {"variable": "ALLFOLD_TIMEUOT", "did_you_mean": "ALLFOLD_TIMEOUT"},
        {"variable": "ALLFOLD_XYZZY", "did_you_mean": None},
    ]
    out = called("config", env={"ALLFOLD_TIMEUOT": "3"}).stdout
    assert "nobody reads ALLFOLD_TIMEUOT; did you mean ALLFOLD_TIMEOUT?" in out


def test_sources_are_shown_where_they_are_asked_for() -> None:
    assert "environment" not in called("config", env={"ALLFOLD_TIMEOUT": "7"}).stdout
    assert "environment" in called("config", "--sources", env={"ALLFOLD_TIMEOUT": "7"}).stdout


def test_without_the_services_the_settings_of_ranks_are_shown() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import importlib.util as util, sys\n"
            "real = util.find_spec\n"
            "def find(name, *more):\n"
            "    return None if name.startswith('allfold_agent') else real(name, *more)\n"
            "util.find_spec = find\n"
            "from allfold.cli import main\n"
            "sys.argv = ['allfold', 'config']\n"
            "main()",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ALLFOLD_TIMEOUT" in done.stdout
    assert "ALLFOLD_AGENT_THREADS" not in done.stdout
    assert "allfold-agent is not installed here" in done.stdout


def test_urls_keep_all_but_their_password() -> None:
    assert masked("redis://user:pw@h:1/0", secret=False) == "redis://****@h:1/0"
    assert masked("redis://user:p@w@h:1/0", secret=False) == "redis://****@h:1/0"
    assert masked("redis://h?db=1&password=pw&x=y", secret=False) == (
        "redis://h?db=1&password=****&x=y"
    )
    assert masked("http://10.0.0.1:7400", secret=False) == "http://10.0.0.1:7400"
    assert masked(None, secret=True) is None


def test_only_our_prefix_is_looked_at_and_does_not_count_as_likeness() -> None:
    found = unknown(["PATH", "ALLFOLD_ZNOE", "ALLFOLD_CAT"], ["ALLFOLD_ZONE"])
    assert found == {"ALLFOLD_CAT": "", "ALLFOLD_ZNOE": "ALLFOLD_ZONE"}


def test_variables_that_only_compose_reads_are_known() -> None:
    files = sorted(ROOT.glob("docker-compose*.yml"))
    assert files
    for file in files:
        read = re.findall(r"\$\{?(ALLFOLD_\w+)", file.read_text())
        assert read
        assert strays(read) == {}, file.name
