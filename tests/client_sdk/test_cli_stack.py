"""A whole Allfold on this machine: it comes up, serves, is seen, and goes without a trace."""

import json
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.credentials import certificates
from tests.support.processes.cli import Command, Commands, called, commands
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

UP = ("up", "--listen", "127.0.0.1:0")

WAIT_FOR_RANK_3 = """
import os, pathlib, sys, time
import numpy as np
import allfold

allfold.init()
flag, rank = pathlib.Path(sys.argv[1]), allfold.rank()
while rank == 3 and not flag.exists():
    time.sleep(0.01)
x = np.full(1024, rank, dtype=np.float32)
allfold.all_reduce(x)
allfold.shutdown()
print("sum", x[0])
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def exported(command: Command) -> dict[str, str]:
    """Return the variables of a shell that evaluates the output of ``allfold up``."""
    lines = [shlex.split(line, comments=True) for line in command.out.splitlines()]
    return dict(line[1].split("=", 1) for line in lines if line)


# --- allfold up and allfold status


@pytest.mark.long
def test_what_up_prints_is_what_status_needs(allfold: Commands) -> None:
    command = allfold.start(*UP, "--nodes", "2")
    command.wait_for_output("ALLFOLD_SOCKET", count=2)
    env = exported(command)
    assert Path(env["ALLFOLD_SOCKET"]).is_socket()

    table = called("status", env=env).stdout
    assert "node0" in table
    assert "no op is in flight" in table
    report = json.loads(called("status", "--json", env=env).stdout)
    assert [(node["node"], node["state"]) for node in report["nodes"]] == [
        ("node0", "alive"),
        ("node1", "alive"),
    ]
    urls = list(report["agents"])
    alone = called("status", "--agent-url", urls[1], env=env).stdout
    assert "node1" in alone
    assert "node0" not in alone
    refused = called("status", env=env | {"ALLFOLD_TOKEN": "wrong"}, status=1)
    assert "ALLFOLD_TOKEN" in refused.stderr

    os.kill(command.find("allfold_agent", "node1"), signal.SIGKILL)
    assert command.wait() == 1
    assert "node1 was killed by SIGKILL; it last wrote:" in command.err


@pytest.mark.long
def test_what_up_prints_is_enough_with_tls_too(allfold: Commands, tmp_path: Path) -> None:
    certificates(tmp_path / "some certs", "node", name="team")
    tls = {"ALLFOLD_TLS_DIR": str(tmp_path / "some certs" / "node"), "ALLFOLD_TLS_NAME": "team"}
    command = allfold.start(*UP, env=tls)
    command.wait_for_output("ALLFOLD_SOCKET")
    env = exported(command)
    assert env["ALLFOLD_ORCHESTRATOR_URL"].startswith("https://")
    assert "node0" in called("status", env=env).stdout


def test_up_serves_until_ctrl_c_and_shows_its_token_in_no_process_list_and_no_log(
    allfold: Commands,
) -> None:
    env = {"ALLFOLD_TOKEN": "hidden-from-ps", "ALLFOLD_LOG_LEVEL": "DEBUG"}
    command = allfold.start(*UP, "--json", env=env)
    command.wait_for_output("\n")
    told = json.loads(command.out)
    assert told["token"] == "hidden-from-ps"
    assert told["pid"] == command.process.pid
    assert [node["name"] for node in told["nodes"]] == ["node0"]
    assert len(command.marked()) == 3, "the command, the orchestrator and the agent"
    for pid in command.marked():
        assert "hidden-from-ps" not in Path(f"/proc/{pid}/cmdline").read_text()
    logs = [each.read_text() for each in Path(told["nodes"][0]["socket"]).parent.glob("*.log")]
    assert any("DEBUG" in log for log in logs)
    assert not any("hidden-from-ps" in log for log in logs)
    command.send(signal.SIGINT)
    assert command.wait() == 130


def test_up_shows_why_a_service_does_not_start(allfold: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        err = allfold.run("up", "--listen", address, status=1).err
    assert "orchestrator ended with status 1; it last wrote:" in err
    assert "in use" in err


def test_a_signal_while_it_starts_leaves_nothing(allfold: Commands) -> None:
    command = allfold.start("run", "--nodes", "2", "script.py")
    wait_until(lambda: len(command.marked()) == 2, "the first service")
    command.send(signal.SIGTERM)
    assert command.wait() == 143
    assert command.out == ""


def test_services_die_with_a_launcher_that_is_killed(allfold: Commands) -> None:
    command = allfold.start(*UP)
    command.wait_for_output("ALLFOLD_SOCKET")
    command.send(signal.SIGKILL)
    command.process.wait()
    wait_until(lambda: not command.marked(), "the services' death")


# --- allfold run with a stack of its own


def test_a_run_starts_a_stack_and_takes_it_down(allfold: Commands) -> None:
    script = allfold.script(
        "import os, stat\n"
        "path = os.environ['ALLFOLD_SOCKET']\n"
        "print(path[-10:], stat.S_ISSOCK(os.stat(path).st_mode), bool(os.environ['ALLFOLD_TOKEN']))"
    )
    # --nodes asks for a stack, whatever a shell has exported.
    env = {"ALLFOLD_SOCKET": "/run/left-over.sock"}
    options = ("--nodes", "2", "--nproc-per-node", "2")
    out = allfold.run("run", *options, script, env=env).out
    assert sorted(out.splitlines()) == [
        f"[{rank}] node{rank // 2}.sock True True" for rank in range(4)
    ]


@pytest.mark.long
def test_a_run_tells_that_a_service_died_and_goes_on(allfold: Commands) -> None:
    script = allfold.script(
        "import pathlib, sys, time\n"
        "print('ready')\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    )
    flag = allfold.folder / "flag"
    command = allfold.start("run", script, flag)
    command.wait_for_output("ready")
    os.kill(command.find("allfold_agent"), signal.SIGKILL)
    wait_until(lambda: "node0 was killed by SIGKILL; it last wrote" in command.err, "the note")
    flag.touch()
    assert command.wait() == 0


@pytest.mark.long
def test_ctrl_c_in_a_run_takes_the_stack_down(allfold: Commands) -> None:
    script = allfold.script("import time\nprint('ready')\ntime.sleep(600)")
    command = allfold.start("run", script)
    command.wait_for_output("ready")
    command.send(signal.SIGINT)
    assert command.wait() == 130


def test_status_names_the_rank_that_an_op_waits_for(allfold: Commands) -> None:
    flag = allfold.folder / "flag"
    up = allfold.start(*UP, "--nodes", "2", "--json")
    up.wait_for_output("\n")
    told = json.loads(up.out)
    env = {"ALLFOLD_TOKEN": told["token"], "ALLFOLD_ORCHESTRATOR_URL": told["orchestrator_url"]}
    agents = [word for node in told["nodes"] for word in ("--agent", node["socket"])]
    script = allfold.script(WAIT_FOR_RANK_3)
    job = allfold.start("run", *agents, "--nproc-per-node", "2", script, flag, env=env)

    def waits_for_it() -> bool:
        return "waits for rank 3 on node node1, " in called("status", env=env).stdout

    wait_until(waits_for_it, "a status that names rank 3", 60)
    flag.touch()
    assert job.wait() == 0
    assert job.out.count("sum 6.0") == 4
    up.send(signal.SIGTERM)
    assert up.wait() == 143


LOSE_RANK_3 = """
import os, pathlib, sys, time
import numpy as np, allfold
group = allfold.init(group="lossy")
allfold.barrier()
if group.rank == 3:
    os._exit(9)
try:
    allfold.barrier()
except allfold.PeerLost:
    print("left", group.world_size, "epoch", group.epoch)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


@pytest.mark.long
def test_status_tells_the_epoch_of_a_group_and_why_it_has_lost_a_rank(allfold: Commands) -> None:
    flag = allfold.folder / "flag"
    up = allfold.start(*UP, "--nodes", "2", "--json")
    up.wait_for_output("\n")
    told = json.loads(up.out)
    env = {"ALLFOLD_TOKEN": told["token"], "ALLFOLD_ORCHESTRATOR_URL": told["orchestrator_url"]}
    agents = [word for node in told["nodes"] for word in ("--agent", node["socket"])]
    script = allfold.script(LOSE_RANK_3)
    launch = ("run", "--keep-going", *agents, "--nproc-per-node", "2", script, flag)
    job = allfold.start(*launch, env=env)
    job.wait_for_output("left 3 epoch 1", count=3)
    why = "group 'lossy' has lost rank 3 on node node1, which ended without leaving the group"
    seen: list[str] = []

    def tells_of_the_loss() -> bool:
        seen.append(called("status", env=env).stdout)
        return f"{why}; 3 of 4 ranks are left" in seen[-1]

    # The nodes agree upon it by themselves, and the orchestrator hears of it a moment later.
    wait_until(tells_of_the_loss, "a status that tells of the loss", 60)
    shown = seen[-1]
    report = json.loads(called("status", "--json", env=env).stdout)
    (group,) = report["memberships"]
    assert (group["group"], group["epoch"]) == ("lossy", 1)
    (row,) = [line for line in shown.splitlines() if line.startswith("\u2502") and "lossy" in line]
    cells = [cell.strip() for cell in row.split("\u2502")]
    assert cells[1:5] == ["lossy", "reduced", str(group["term"]), "1"]
    alone = [word for url in report["agents"] for word in ("--agent-url", url)]
    assert f"lossy: 2 (term {group['term']}, epoch 1)" in called("status", *alone, env=env).stdout
    flag.touch()
    assert job.wait() == 0
    up.send(signal.SIGTERM)
    assert up.wait() == 143
