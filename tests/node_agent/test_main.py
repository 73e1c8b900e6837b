"""The agent's command line: its help, and what it says of settings that cannot work."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allfold_agent.__main__ import main
from allfold_agent.settings import AgentSettings
from tests.support.tiers import long

USAGE, FAILED = 2, 1


def wrong(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is said of wrong settings."""
    with pytest.raises(SystemExit, match=f"{USAGE}"):
        main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    return err.removesuffix("\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--gpu", "maybe"], "--gpu (ALLFOLD_AGENT_GPU): must be 'auto' or 'off', got 'maybe'"),
        (
            ["--threads", "0"],
            "--threads (ALLFOLD_AGENT_THREADS): must be greater than or equal to 1, got '0'",
        ),
        (
            ["--data", "here"],
            "--data (ALLFOLD_AGENT_DATA_LISTEN): must be host:port, got 'here'",
        ),
        (
            ["--control", "127.0.0.1:70000"],
            "--control (ALLFOLD_AGENT_CONTROL_LISTEN): must be host:port, got '127.0.0.1:70000'",
        ),
        (
            ["--orchestrator", "foo"],
            "--orchestrator (ALLFOLD_ORCHESTRATOR_URL): must be an address such as "
            "http://10.0.0.1:7400, got 'foo'",
        ),
        (
            ["--name", "a b/c"],
            "--name (ALLFOLD_AGENT_NAME): must be 1 to 128 letters, digits and . _ -, got 'a b/c'",
        ),
        (
            ["--advertise", "http://foo"],
            "--advertise (ALLFOLD_AGENT_ADVERTISE): must be a host name or an IP address, without "
            "scheme and port, got 'http://foo'",
        ),
        (
            ["--zone", "z" * 129],
            f"--zone (ALLFOLD_ZONE): must have at most 128 characters, got '{'z' * 129}'",
        ),
        (
            ["--token", "two words"],
            "--token (ALLFOLD_TOKEN): the token has blanks, line ends or other characters that no "
            "token can have; make one with `openssl rand -hex 24`, and write a comma between "
            "several",
        ),
        (["--speed", "9"], "unrecognized arguments: --speed 9; --help lists the flags"),
    ],
)
def test_a_wrong_flag_is_one_line(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wrong(argv, capsys) == f"allfold-agent: {line}"


def test_a_wrong_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLFOLD_LOG_LEVEL", "chatty")
    assert wrong([], capsys) == (
        "allfold-agent: --log-level (ALLFOLD_LOG_LEVEL): must be 'DEBUG', 'INFO', 'WARNING', "
        "'ERROR' or 'CRITICAL', got 'chatty'"
    )


def test_the_help_explains_every_flag_and_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for option in AgentSettings.options().values():
        assert option.description
        line = re.search(rf"^ +{option.flag} [A-Z]+ +(.*)$", out, re.MULTILINE)
        assert line, option
        assert line[1].startswith(option.description)
        assert line[1].endswith(f"[{option.variable}]")
    assert "Undefined" not in out
    assert "exit status" in out


def test_only_variables_of_allfold_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "somebody")
    monkeypatch.setenv("threads", "77")
    assert AgentSettings().name == socket.gethostname()
    assert AgentSettings().threads == len(os.sched_getaffinity(0))


def started(*options: str) -> subprocess.CompletedProcess[str]:
    """Run an agent that is expected to end by itself."""
    command = [sys.executable, "-m", "allfold_agent", "--control", "127.0.0.1:0"]
    command += ["--log-format", "text", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flag", "variable"),
    [("--control", "ALLFOLD_AGENT_CONTROL_LISTEN"), long("--data", "ALLFOLD_AGENT_DATA_LISTEN")],
)
def test_a_port_in_use_is_one_line_that_names_the_setting_and_the_status_of_a_failed_start(
    tmp_path: Path, flag: str, variable: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = started("--socket", str(tmp_path / "s"), flag, address)
    assert ended.returncode == FAILED
    (line,) = ended.stderr.splitlines()
    assert line.endswith(
        f"[AF400 ServiceError] cannot listen on {address}: Address already in use. Choose another "
        f"address with {flag} or {variable}, or end what listens there."
    )


def test_a_socket_of_another_agent_ends_the_start_with_a_line_that_names_the_setting(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(path)
        taken.listen(1)
        ended = started("--data", "127.0.0.1:0", "--socket", path)
    assert ended.returncode == FAILED
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(
        f"[AF400 ServiceError] another agent listens on {path}. End it, or choose another path "
        "with --socket or ALLFOLD_SOCKET."
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [long("--socket", "cannot listen on"), ("--ready-file", "cannot write the ready file")],
)
def test_a_path_that_cannot_be_used_is_no_traceback(
    option: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "agent")
    paths = {"--socket": str(tmp_path / "s"), option: path}
    ended = started("--data", "127.0.0.1:0", *(each for pair in paths.items() for each in pair))
    assert ended.returncode == FAILED
    assert "Traceback" not in ended.stderr
    assert f"{message} {path}" in ended.stderr
    assert f"{message} " in ended.stderr.splitlines()[-1]
