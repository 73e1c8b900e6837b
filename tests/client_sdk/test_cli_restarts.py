"""``allfold run --max-restarts``: when a failed rank is started again, and when not."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold.cli._run import questions
from allfold.cli._run.ending import SOON_SECONDS, Restarts
from allfold.cli._run.questions import Latecomers
from allfold_cluster.http import NoAnswer
from allfold_core.errors import LocalError
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


@pytest.mark.parametrize(
    ("phase", "present", "missing", "awaited"),
    [
        ("forming", (1, 2), (0, 3), [0]),
        ("forming", (1,), (0, 2, 3), []),  # rank 2 is not there yet, or does something else
        ("forming", (0, 1, 2), (3,), []),  # the others may come, and be complete
        ("reduced", (1, 2), (), []),  # they are in the group, and go on
        ("gone", (), (), []),
    ],
)
def test_ranks_wait_in_vain_if_all_wait_for_one_that_has_ended_well(
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    present: tuple[int, ...],
    missing: tuple[int, ...],
    awaited: list[int],
) -> None:
    view = {
        "phase": phase,
        "present": [{"rank": rank, "node": "a"} for rank in present],
        "missing": list(missing),
    }
    monkeypatch.setattr(questions, "get_json", lambda *_, **__: view)
    assert Latecomers("train", {}).awaited({1, 2}, {0}) == awaited


def test_ranks_are_left_alone_where_no_orchestrator_tells_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(*_: object, **__: object) -> dict[str, object]:
        raise errors.pop()

    errors = [NoAnswer("nothing listens there"), LocalError("there is no group train")]
    monkeypatch.setattr(questions, "get_json", answer)
    latecomers = Latecomers("train", {})
    assert latecomers.awaited({1}, {0}) == []
    assert latecomers.awaited({1}, {0}) == []
    assert not errors


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
        "import os, pathlib, sys, time\n"
        "flag = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not flag.exists(): time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        "print('waits', flush=True)\n"
        "flag.touch()\n"
        "time.sleep(600)"
    )
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--grace", "0.2")
    flag = allfold.folder / "flag"
    command = allfold.run("run", *allfold.agent(), *options, script, flag, status=7)
    assert command.out.count("waits") == 1
    assert "rank 1 ended with status 7; it is started again" in command.err
    assert (
        "rank 1 ended with status 7; no restart is left of 1; the others have 0.2 s" in command.err
    )


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


COMES_TOO_LATE = """
import os, pathlib, sys, time, allfold
folder = pathlib.Path(sys.argv[1])
again, pid = folder / "again", folder / "pid"
if os.environ["ALLFOLD_RESTARTS"] == "1":
    again.touch()
    while not (pid.exists() and pid.read_text()): time.sleep(0.01)
    while os.path.exists("/proc/" + pid.read_text()): time.sleep(0.01)
allfold.init(min_world=1, max_world=2, on_loss="shrink")
if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
while not again.exists(): time.sleep(0.01)
allfold.shutdown()
pid.write_text(str(os.getpid()))
"""


@pytest.mark.long
def test_a_rank_that_comes_back_when_its_group_has_ended_does_not_wait_for_it(
    allfold: Commands, tmp_path: Path
) -> None:
    script = allfold.script(COMES_TOO_LATE)
    options = ("--nodes", "2", "--max-restarts", "5")
    far = {"ALLFOLD_INIT_TIMEOUT": "600"}
    command = allfold.run("run", *options, script, tmp_path, status=137, env=far)
    told = (
        "rank 1, started again, came too late: the group has ended and cannot open anew, as rank 0 "
        "ended well"
    )
    assert told in command.err


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
