"""``allfold run --max-restarts``: when a failed rank is started again, and when not."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold.cli._restarts import SOON_SECONDS, Restarts
from tests.support.processes.cli import Commands, commands
from tests.support.waiting import wait_until

# --- the decisions


def failed_after(restarts: Restarts, rank: int, lived: float) -> float | None:
    """The pause before a rank's next start, which failed so long after its last one."""
    restarts.started(rank, 100.0)
    pause = restarts.plan(rank, 1, 100.0 + lived)
    restarts.take_due(float("inf"))
    return pause


def test_restarts_are_counted_over_all_ranks() -> None:
    restarts = Restarts(most=3)
    assert [failed_after(restarts, rank, 60.0) for rank in (0, 1, 0, 2)] == [0.0, 0.0, 0.0, None]
    assert restarts.environment(0)["ALLFOLD_RESTARTS"] == "2"
    assert restarts.environment(1)["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert restarts.environment(2)["ALLFOLD_RESTARTS"] == "0"


def test_a_rank_that_fails_at_once_waits_longer_each_time() -> None:
    restarts = Restarts(most=20)
    pauses = [failed_after(restarts, 0, 0.1) for _ in range(9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert failed_after(restarts, 1, 0.1) == 0.5
    assert failed_after(restarts, 0, SOON_SECONDS) == 0.0
    assert failed_after(restarts, 0, 0.1) == 0.5


def test_a_restart_is_due_once_and_not_before_its_time() -> None:
    restarts = Restarts(most=5)
    restarts.started(3, 100.0)
    restarts.plan(3, 7, 101.0)
    assert restarts.waiting
    assert restarts.next_at() == 101.5
    assert restarts.take_due(101.4) == []
    assert restarts.take_due(101.5) == [(3, 7)]
    assert not restarts.waiting


# --- with processes

FAILS_ONCE = """
import os, pathlib, sys, time
rank, times = os.environ["RANK"], int(os.environ["ALLFOLD_RESTARTS"])
print("rank", rank, "started", times, flush=True)
flag = pathlib.Path(sys.argv[1])
if rank == "1":
    if times == 0: os.kill(os.getpid(), 9)
    flag.touch()
while not flag.exists(): time.sleep(0.01)
print("rank", rank, "well", flush=True)
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def test_a_killed_rank_is_started_again_while_the_others_go_on(allfold: Commands) -> None:
    script = allfold.script(FAILS_ONCE)
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--no-prefix")
    command = allfold.run("run", *allfold.agent(), *options, script, allfold.folder / "flag")
    assert command.out.count("rank 0 started") == 1
    assert command.out.count("well") == 2
    told = "rank 1 was killed by SIGKILL; it is started again in 0.5 s (restart 1 of at most 1)"
    assert told in command.err


def test_a_failure_ends_the_run_when_the_restarts_are_used_up(allfold: Commands) -> None:
    script = allfold.script(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "print('waits', flush=True)\n"
        "time.sleep(600)"
    )
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--grace", "0.2")
    command = allfold.run("run", *allfold.agent(), *options, script, status=7)
    assert command.out.count("waits") == 1
    assert "rank 1 ended with status 7; it is started again" in command.err
    assert "rank 1 ended with status 7; the others have 0.2 s" in command.err


def test_a_rank_that_fails_last_is_not_started_again(allfold: Commands, tmp_path: Path) -> None:
    done = tmp_path / "done"
    script = allfold.script(
        "import os, pathlib, sys, time\n"
        f"pid = pathlib.Path({str(done)!r})\n"
        "if os.environ['RANK'] == '0':\n"
        "    pid.write_text(str(os.getpid())); sys.exit(0)\n"
        "print('started', flush=True)\n"
        "while not (pid.exists() and pid.read_text()): time.sleep(0.01)\n"
        "while os.path.exists(f'/proc/{pid.read_text()}'): time.sleep(0.01)\n"
        "sys.exit(4)"
    )
    options = ("--nproc-per-node", "2", "--max-restarts", "5")
    command = allfold.run("run", *allfold.agent(), *options, script, status=4)
    assert command.out.count("started") == 1


def test_a_signal_to_the_launcher_starts_nobody_again(allfold: Commands) -> None:
    script = allfold.script(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    command = allfold.start("run", *allfold.agent(), "--max-restarts", "5", script)
    command.wait_for_output("ready")
    command.send(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert command.out.count("ready") == 1


def test_a_signal_ends_a_run_that_waits_to_start_a_rank(allfold: Commands) -> None:
    script = allfold.script("import sys; print('started', flush=True); sys.exit(1)")
    command = allfold.start("run", *allfold.agent(), "--max-restarts", "50", script)
    wait_until(lambda: "in 4 s" in command.err, "a pause of 4 s")
    command.send(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert command.out.count("started") == 4
    assert "is not started again" not in command.err
