"""The ends of ``allfold run``: failures, signals and deadlines, and never a trace left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.cli import Commands, commands
from tests.support.waiting import wait_until

STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def test_the_status_is_that_of_the_first_rank_that_fails(allfold: Commands) -> None:
    script = allfold.script(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "try: time.sleep(600)\n"
        "finally: os._exit(9)"
    )
    options = ("--nproc-per-node", "3", "--grace", "0.2")
    command = allfold.run("run", *allfold.agent(), *options, script, status=7)
    assert "rank 1 ended with status 7; the others have 0.2 s" in command.err


def test_the_others_may_end_by_themselves_within_the_grace(allfold: Commands) -> None:
    script = allfold.script(
        "import os, pathlib, sys, time\n"
        "flag = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '0':\n"
        "    flag.touch(); sys.exit(3)\n"
        "while not flag.exists(): time.sleep(0.01)\n"
        "time.sleep(0.1)\n"
        "print('cleaned up')"
    )
    options = ("--nproc-per-node", "2", "--grace", "60")
    command = allfold.run(
        "run", *allfold.agent(), *options, script, allfold.folder / "flag", status=3
    )
    assert "[1] cleaned up" in command.out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_a_signal_gives_128_and_its_number(
    allfold: Commands, number: signal.Signals
) -> None:
    script = allfold.script(f"import os; os.kill(os.getpid(), {number.value})")
    command = allfold.run("run", *allfold.agent(), script, status=128 + number)
    assert f"rank 0 was killed by {number.name}" in command.err


def test_a_script_that_is_not_there_fails_as_under_python(allfold: Commands) -> None:
    assert "No such file" in allfold.run("run", *allfold.agent(), "/no/such.py", status=2).err


def test_ranks_that_ignore_sigterm_are_killed_after_a_failure(
    allfold: Commands, tmp_path: Path
) -> None:
    ready = tmp_path / "stubborn"
    fails = (
        "import os, pathlib, time\n"
        "if os.environ['RANK'] == '0':\n"
        f"    while not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.01)\n"
        "    os._exit(5)\n"
    )
    stubborn = STUBBORN.replace("print(", f"open({str(ready)!r}, 'w').close(); print(")
    options = ("--nproc-per-node", "2", "--grace", "0.2")
    allfold.run("run", *allfold.agent(), *options, allfold.script(fails + stubborn), status=5)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_stubborn_ranks_and_their_children(
    allfold: Commands, number: signal.Signals, status: int
) -> None:
    options = ("--nproc-per-node", "2", "--grace", "0.2")
    command = allfold.start("run", *allfold.agent(), *options, allfold.script(STUBBORN))
    command.wait_for_output("ready", count=2)
    wait_until(lambda: len(command.marked()) == 5, "the launcher, two ranks and their children")
    command.send(number)
    assert command.wait() == status


def test_ctrl_c_lets_ranks_clean_up(allfold: Commands) -> None:
    script = allfold.script(
        "import time\n"
        "try:\n    print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt: print('saved')"
    )
    command = allfold.start("run", *allfold.agent(), script)
    command.wait_for_output("ready")
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert "[0] saved" in command.out


def test_a_second_signal_kills_at_once(allfold: Commands) -> None:
    command = allfold.start("run", *allfold.agent(), "--grace", "600", allfold.script(STUBBORN))
    command.wait_for_output("ready")
    command.send(signal.SIGINT)
    wait_until(lambda: "got SIGINT" in command.err, "the note about the first signal")
    command.send(signal.SIGINT)
    assert command.wait() == 130


def test_ranks_die_with_a_launcher_that_is_killed(allfold: Commands) -> None:
    script = allfold.script(STUBBORN.replace("child = ", "# "))
    command = allfold.start("run", *allfold.agent(), "--nproc-per-node", "2", script)
    command.wait_for_output("ready", count=2)
    command.send(signal.SIGKILL)
    command.process.wait()
    wait_until(lambda: not command.marked(), "the ranks' death")


def test_a_run_that_takes_too_long_ends_with_status_124(allfold: Commands) -> None:
    options = ("--timeout", "0.5", "--grace", "0.2")
    command = allfold.run("run", *allfold.agent(), *options, allfold.script(STUBBORN), status=124)
    assert "not over after 0.5 s" in command.err


@pytest.mark.parametrize(("survivor", "status"), [("pass", 0), ("sys.exit(4)", 9)])
def test_with_keep_going_the_others_outlive_a_failed_rank(
    allfold: Commands, survivor: str, status: int
) -> None:
    script = allfold.script(
        "import os, pathlib, sys, time\n"
        "flag = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '0':\n    sys.exit(9)\n"
        "while not flag.exists(): time.sleep(0.01)\n"
        f"{survivor}"
    )
    flag = allfold.folder / "flag"
    options = ("--nproc-per-node", "2", "--grace", "0", "--keep-going")
    command = allfold.start("run", *allfold.agent(), *options, script, flag)
    wait_until(lambda: "status 9; the others go on" in command.err, "the note")
    flag.touch()
    assert command.wait() == status


def test_what_a_rank_leaves_running_ends_with_it(allfold: Commands) -> None:
    script = allfold.script(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('done')"
    )
    assert allfold.run("run", *allfold.agent(), script).out == "[0] done\n"


def test_output_that_nobody_reads_any_more_ends_the_run(allfold: Commands) -> None:
    reader, writer = os.pipe()
    script = allfold.script("while True: print('y')")
    command = allfold.start("run", *allfold.agent(), script, stdout=writer)
    os.close(writer)
    assert os.read(reader, 6) == b"[0] y\n"
    os.close(reader)
    assert command.wait() == 128 + signal.SIGPIPE


def test_a_reader_that_stands_still_does_not_keep_a_run_from_ending(allfold: Commands) -> None:
    reader, writer = os.pipe()
    script = allfold.script("while True: print('y' * 1000)")
    options = ("--timeout", "0.5", "--grace", "0.2")
    command = allfold.start("run", *allfold.agent(), *options, script, stdout=writer)
    os.close(writer)
    assert command.wait() == 124
    os.close(reader)


@pytest.mark.parametrize("status", [0, 3])
def test_a_slow_reader_gets_everything(allfold: Commands, status: int) -> None:
    reader, writer = os.pipe()
    started = allfold.folder / "started"
    script = allfold.script(
        "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()\n"
        f"print('y' * 150_000, end='!'); raise SystemExit({status})"
    )
    options = (*allfold.agent(), "--no-prefix")
    command = allfold.start("run", *options, script, started, stdout=writer)
    os.close(writer)
    wait_until(started.exists, "the rank has started")
    wait_until(lambda: len(command.marked()) == 1, "the rank's end, with output left")
    with os.fdopen(reader, "rb") as source:
        assert source.read().count(b"y") == 150_000
    assert command.wait() == status


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("<&-", "[0] hello ''\n", "[0] bye\n"),
        (">&-", "", "[0] bye\n"),
        ("2>&-", "[0] hello ''\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_a_run_works_where_standard_streams_are_closed(
    allfold: Commands, closed: str, out: str, err: str
) -> None:
    script = allfold.script(
        "import sys; print('hello', repr(sys.stdin.read())); print('bye', file=sys.stderr)"
    )
    allfold_run: list[str | Path] = [
        sys.executable,
        "-m",
        "allfold.cli",
        "run",
        *allfold.agent(),
        script,
    ]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "-", *allfold_run],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


def test_a_rank_that_cannot_be_started_ends_the_run(allfold: Commands) -> None:
    allfold_run = [
        sys.executable,
        "-m",
        "allfold.cli",
        "run",
        *allfold.agent(),
        "--nproc-per-node",
        "20",
    ]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 40; exec "$@"', "-", *allfold_run, allfold.script(STUBBORN)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "cannot start rank" in done.stderr
    assert "Too many open files" in done.stderr
    assert "Traceback" not in done.stderr
