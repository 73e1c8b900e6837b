"""The errors of calls that reach no agent: raised at once, and with advice."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import allfold as sdk
from allfold._session.agent_socket import await_agent
from allfold_core.errors import AgentUnreachable
from tests.support.processes.cli import Commands, commands
from tests.support.waiting import wait_until

SCRIPT = "print('started')"
NOBODY = 65534


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


# --- allfold run


def test_a_launcher_without_an_agent_says_at_once_that_it_waits_and_ends_with_status_3(
    allfold: Commands,
) -> None:
    path = allfold.folder / "nobody.sock"
    env = {"ALLFOLD_INIT_TIMEOUT": "0.2"}
    command = allfold.run("run", "--agent", path, allfold.script(SCRIPT), status=3, env=env)
    reason = "(No such file or directory"
    assert command.err.splitlines() == [
        f"allfold: no node agent listens on {path} {reason}); waiting up to 0.2 s for it "
        "(ALLFOLD_INIT_TIMEOUT)",
        f"allfold: no node agent listens on {path} {reason}; tried for 0.2 s). Start one with "
        f"'allfold agent --socket {path}', name another socket with --agent or ALLFOLD_SOCKET, or "
        "set neither: 'allfold run' then starts an agent itself.",
    ]
    assert command.out == ""


def test_a_launcher_waits_for_an_agent_that_is_still_starting(allfold: Commands) -> None:
    path = allfold.folder / "agent.sock"
    env = {"ALLFOLD_INIT_TIMEOUT": "60"}
    command = allfold.start("run", "--agent", path, allfold.script(SCRIPT), env=env)
    wait_until(lambda: "waiting up to 60 s" in command.err, "a note that it waits", 30.0)
    allfold.agent()
    assert command.wait() == 0
    assert command.out == "[0] started\n"


def test_a_launcher_that_waits_for_an_agent_can_be_interrupted(allfold: Commands) -> None:
    env = {"ALLFOLD_INIT_TIMEOUT": "600"}
    path = allfold.folder / "nobody.sock"
    command = allfold.start("run", "--agent", path, allfold.script(SCRIPT), env=env)
    wait_until(lambda: "waiting up to" in command.err, "a note that it waits", 30.0)
    command.send(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM


def test_a_file_that_is_no_socket_is_refused_without_waiting(allfold: Commands) -> None:
    path = allfold.script("")
    env = {"ALLFOLD_INIT_TIMEOUT": "600"}
    command = allfold.run("run", "--agent", path, allfold.script(SCRIPT), status=3, env=env)
    assert command.err == (
        f"allfold: {path} is not the socket of a node agent; set ALLFOLD_SOCKET, --agent or "
        "agent= to the path that 'allfold agent' was given with --socket, or that its log shows as "
        "ranks\n"
    )


def test_a_bad_time_limit_in_the_environment_is_wrong_usage(allfold: Commands) -> None:
    env = {"ALLFOLD_INIT_TIMEOUT": "soon"}
    command = allfold.run("run", *allfold.agent(), allfold.script(SCRIPT), status=2, env=env)
    assert command.err == (
        "allfold: ALLFOLD_INIT_TIMEOUT is a positive number of seconds, at most 2592000 "
        "(30 days), got 'soon'\n"
    )


# --- allfold.init


def test_init_warns_at_once_that_it_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "nobody.sock")
    with caplog.at_level(logging.WARNING, "allfold"), pytest.raises(AgentUnreachable):
        sdk.init(rank=0, world_size=1, agent=path, init_timeout=0.2)
    (said,) = caplog.messages
    assert said == (
        f"no node agent listens on {path} (No such file or directory); waiting up to 0.2 s for it"
    )


def test_the_wait_for_an_agent_that_comes_has_an_end_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "allfold")
    path = str(tmp_path / "late.sock")
    with ThreadPoolExecutor() as one, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        connected = one.submit(await_agent, path, 30.0)
        wait_until(lambda: "waiting up to 30 s" in caplog.text, "it waits")
        late.bind(path)
        late.listen(1)
        connected.result(30).close()
    assert re.fullmatch(
        rf"a node agent listens on {re.escape(path)}, after \d+\.\d s", caplog.messages[-1]
    )


def test_init_says_how_to_start_an_agent_where_it_has_looked_for_one(tmp_path: Path) -> None:
    path = str(tmp_path / "no body.sock")
    with pytest.raises(AgentUnreachable) as caught:
        sdk.init(rank=0, world_size=1, agent=path, init_timeout=0.1)
    assert str(caught.value).endswith(
        f"Start one with 'allfold agent --socket {shlex.quote(path)}', start the script with "
        "'allfold run', or name another socket with ALLFOLD_SOCKET or agent=."
    )


def test_the_warning_is_printed_where_nobody_has_configured_logging(tmp_path: Path) -> None:
    path = str(tmp_path / "nobody.sock")
    code = (
        "import allfold\n"
        f"try: allfold.init(rank=0, world_size=1, agent={path!r}, init_timeout=0.1)\n"
        "except allfold.AgentUnreachable: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "waiting up to 0.1 s" in done.stderr


def test_a_path_that_is_too_long_is_refused_without_waiting() -> None:
    with pytest.raises(AgentUnreachable, match="choose a shorter one"):
        sdk.init(rank=0, world_size=1, agent="/" + "x" * 200, init_timeout=600)


def test_an_agent_that_starts_meanwhile_is_found(tmp_path: Path) -> None:
    path = str(tmp_path / "late.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:

        def start() -> None:
            late.bind(path)
            late.listen(1)

        timer = threading.Timer(0.1, start)
        timer.start()
        # It is found, and does not answer.
        with pytest.raises(AgentUnreachable, match="does not answer"):
            sdk.init(rank=0, world_size=1, agent=path, init_timeout=1.0)
        timer.join()


# --- somebody else's


def refusal_as_nobody(path: Path) -> str:
    """Return the error that a process of another user gets."""
    code = (
        "import allfold, os\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"try: allfold.init(rank=0, world_size=1, agent={str(path)!r}, init_timeout=600)\n"
        "except allfold.AgentUnreachable as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("hidden", [False, True], ids=["socket", "folder"])
def test_a_socket_of_another_user_is_said_to_be_one(allfold: Commands, hidden: bool) -> None:
    path = Path(allfold.agent()[1])
    allfold.folder.chmod(0o700 if hidden else 0o755)
    path.chmod(0o700)
    obstacle = allfold.folder if hidden else path
    said = refusal_as_nobody(path)
    assert said.startswith(
        f"the node agent's socket {path} is another user's: {obstacle} belongs to root (uid 0), "
        "and this process runs as "
    )
    assert f"(uid {NOBODY})" in said
    assert "Run it as that user or as root, or start an agent of your own" in said
