"""The end of ``allfold run`` after a failure: one summary, and one traceback."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.processes.cli import Commands, commands

# Rank 1 fails in the way that is named. The others then lose it, and end before it does.
PROGRAM = """
import ctypes, os, signal, sys, time
from pathlib import Path
from allfold_core.errors import PeerLost

failed = Path(sys.argv[2])
def step():
    how = sys.argv[1]
    failed.touch()
    if how == "raise":
        raise ValueError("bad batch 7")
    if how == "exit":
        sys.exit(3)
    if how == "crash":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1":
    step()
while not failed.exists():
    time.sleep(0.01)
raise PeerLost("rank 1 is gone")
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def summary_of(allfold: Commands, how: str, status: int, *options: str) -> tuple[str, list[str]]:
    """Return all that was written to standard error, and the summary."""
    script = allfold.script(PROGRAM)
    ranks = (*allfold.agent(), "--nproc-per-node", "3", *options)
    command = allfold.run("run", *ranks, script, how, allfold.folder / "failed", status=status)
    own = [line for line in command.err.splitlines() if line.startswith("allfold: ")]
    (first,) = (index for index, line in enumerate(own) if "first failure" in line)
    return command.err, [line.removeprefix("allfold: ") for line in own[first:]]


def test_an_exception_is_shown_whole_and_its_consequences_are_not(allfold: Commands) -> None:
    err, summary = summary_of(allfold, "raise", 1)
    assert err.count("Traceback (most recent call last)") == 1
    assert "[1]     raise ValueError" in err
    assert summary[0].startswith("first failure: rank 1 on node 0 (pid ")
    assert summary[0].endswith(") ended with status 1")
    assert summary[1] == "  ValueError: bad batch 7"
    assert ".py:11 in step, called at " in summary[2]
    assert summary[3] == "  2 other ranks ended because of it: ranks 0, 2"
    assert "  next: --all-tracebacks shows what was folded" in summary


def test_every_traceback_is_whole_where_that_is_asked_for(allfold: Commands) -> None:
    err, summary = summary_of(allfold, "raise", 1, "--all-tracebacks")
    assert err.count("Traceback (most recent call last)") == 3
    assert "folded" not in err
    assert summary[3] == "  2 other ranks ended because of it: ranks 0, 2"


def test_a_status_is_that_of_the_rank_that_gave_it_and_not_of_those_that_lost_it(
    allfold: Commands,
) -> None:
    _, summary = summary_of(allfold, "exit", 3)
    assert summary[0].endswith(") ended with status 3")
    assert summary[1] == "  2 other ranks ended because of it: ranks 0, 2"


def test_a_crash_is_named_with_its_signal_and_the_line_of_the_script(allfold: Commands) -> None:
    _, summary = summary_of(allfold, "crash", 128 + signal.SIGSEGV)
    assert summary[0].endswith(") was killed by SIGSEGV")
    assert summary[1] == "  Fatal Python error: Segmentation fault"
    assert ".py:15 in step, called at " in summary[2]


def test_a_rank_that_the_kernel_kills_is_named_with_where_to_look(allfold: Commands) -> None:
    _, summary = summary_of(allfold, "kill", 128 + signal.SIGKILL)
    assert summary[0].endswith(") was killed by SIGKILL")
    assert any("look at dmesg" in line for line in summary)


def test_the_output_of_a_quiet_rank_is_shown_if_it_is_the_cause(allfold: Commands) -> None:
    err, _ = summary_of(allfold, "raise", 1, "--quiet-others")
    assert "[1] ValueError: bad batch 7" in err


def test_a_rank_that_was_restarted_before_is_named_with_how_often(allfold: Commands) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--grace", "0.2")
    script = allfold.script(
        "import os, time\nif os.environ['RANK'] == '1': raise OSError('disk')\ntime.sleep(600)"
    )
    command = allfold.run("run", *allfold.agent(), *options, script, status=1)
    assert "allfold: first failure: rank 1 on node 0" in command.err
    assert "ended with status 1, after 1 restart\n" in command.err
    assert "allfold:   1 other rank ended because of it: rank 0" in command.err
    assert command.err.count("[1] OSError: disk") == 2, "each attempt is shown"


def test_a_run_that_somebody_ends_has_no_first_failure(allfold: Commands) -> None:
    script = allfold.script("import time\nprint('ready')\ntime.sleep(600)")
    command = allfold.start("run", *allfold.agent(), "--nproc-per-node", "2", script)
    command.wait_for_output("ready", count=2)
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert "first failure" not in command.err


def test_where_every_rank_lost_another_machine_one_traceback_is_shown_whole(
    allfold: Commands,
) -> None:
    script = allfold.script(
        "from allfold_core.errors import PeerLost\nraise PeerLost('node b is gone')"
    )
    options = ("--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "0", "--group", "job")
    command = allfold.run("run", *allfold.agent(), *options, script, status=1)
    assert command.err.count("Traceback (most recent call last)") == 1
    assert "ended alike: rank " in command.err
    assert "on node 0, machine " in command.err
