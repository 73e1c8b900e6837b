"""Real processes, looked at from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold_agent.observation.processes import look_at, stacks_of
from allfold_core.diagnosis.processes import explain, lock_holder
from allfold_core.incident import Cause
from tests.support.waiting import wait_until

SLEEPS = """
import time
def load_batch():
    print("ready", flush=True)
    time.sleep(60)
load_batch()
"""
KEEPS_THE_LOCK = """
import ctypes
def call_c():
    print("ready", flush=True)
    ctypes.PyDLL(None).usleep(60_000_000)
call_c()
"""
BURNS = """
print("ready", flush=True)
while True: pass
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for each in processes:
        each.send_signal(signal.SIGCONT)
        each.kill()
        each.communicate()


def start(started: list[subprocess.Popen[str]], tmp_path: Path, program: str) -> int:
    file = tmp_path / "rank.py"
    file.write_text(program)
    process = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process.pid


def test_a_process_that_sleeps_is_where_its_stack_says(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid = start(started, tmp_path, SLEEPS)
    wait_until(lambda: look_at(pid).state == "S", "the process sleeps")
    stacks = stacks_of(pid)
    found = explain(look_at(pid), look_at(pid), stacks)
    assert (found.cause, found.phrase) == (Cause.LATE_RANK, "is in load_batch (rank.py:5)")


def test_a_process_that_keeps_the_interpreter_lock_while_it_sleeps_is_caught(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid = start(started, tmp_path, KEEPS_THE_LOCK)
    wait_until(lambda: lock_holder(stacks_of(pid)) is not None, "the lock is kept")
    found = explain(look_at(pid), look_at(pid), stacks_of(pid), stacks_of(pid))
    assert found.cause is Cause.LOCKED_RANK
    assert "its main thread keeps the interpreter lock in call_c (rank.py:5)" in found.phrase


def test_a_stopped_process_is_stopped_and_its_stack_can_still_be_read(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid = start(started, tmp_path, BURNS)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: look_at(pid).state == "T", "the process is stopped")
    assert explain(look_at(pid), look_at(pid), ()).cause is Cause.STOPPED_RANK
    assert stacks_of(pid)


def test_the_time_on_a_cpu_grows_while_a_process_runs(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid = start(started, tmp_path, BURNS)
    first = look_at(pid)
    wait_until(lambda: look_at(pid).ran > first.ran + 0.02, "it runs")


def test_a_process_that_is_gone_has_ended(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid = start(started, tmp_path, SLEEPS)
    started[0].kill()
    started[0].wait()
    assert look_at(pid).state == "X"
    assert stacks_of(pid) == ()


def test_a_process_lives_also_where_the_kernel_does_not_count_its_cpu_time(tmp_path: Path) -> None:
    """As gVisor's does not: a rank that is late must not be reported as ended there."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (python (x)) S 1 7 7 0")
    found = look_at(7, tmp_path)
    assert (found.state, found.ran, found.queued) == ("S", 0.0, 0.0)
    assert explain(found, look_at(7, tmp_path), ()).cause is Cause.LATE_RANK


def test_nothing_is_said_of_a_process_that_must_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    found = look_at(7, tmp_path)
    assert found.state == ""
    assert explain(found, found, ()).cause is Cause.LATE_RANK
