"""The words in which the other ranks, and the agent's log, hear how a torch script has ended."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes.services import ROOT, Services
from tests.support.tiers import long
from tests.support.waiting import wait_until

SECONDS = 90.0

SCRIPT = """
import sys, torch, torch.distributed as dist
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("allfold", init_method=f"file://{store}", rank=rank, world_size=2)
dist.barrier()
"""
# What rank 0 hears of rank 1, and dies of.
LISTEN = "dist.all_reduce(torch.ones(1))"


def run(services: Services, folder: Path, *endings: str) -> list[subprocess.CompletedProcess[str]]:
    """Run one script per rank, to their ends."""
    env = services.env | {"ALLFOLD_SOCKET": services.socket_of("node0")}
    with ExitStack() as stack:
        started = []
        for rank, ending in enumerate(endings):
            command = [sys.executable, "-c", SCRIPT + ending, str(folder / "store"), str(rank)]
            process = subprocess.Popen(
                command, env=env, cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=sys.stderr
            )
            stack.callback(process.kill)
            started.append(process)
        errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, stderr=error)
        for process, error in zip(started, errors, strict=True)
    ]


@pytest.mark.parametrize(
    ("ending", "status", "told"),
    [
        (
            "raise RuntimeError('no such file')",
            1,
            "ended with an exception (RuntimeError: no such file)",
        ),
        long("sys.exit(3)", 3, "exited"),
    ],
)
def test_the_others_are_told_how_a_rank_that_is_gone_has_ended(
    services: Services, tmp_path: Path, ending: str, status: int, told: str
) -> None:
    before = len((services.folder / "node0.log").read_text())
    listener, gone = run(services, tmp_path, LISTEN, ending)
    assert (listener.returncode, gone.returncode) == (1, status), listener.stderr + gone.stderr
    assert f"rank 1 on node node0, which {told}" in listener.stderr

    def lines_of(rank: int) -> list[str]:
        log = (services.folder / "node0.log").read_text()[before:].splitlines(keepends=True)
        whole = [line.rstrip("\n") for line in log if line.endswith("\n")]
        return [line for line in whole if f"rank {rank} of 'torch-" in line]

    # The agent hears of an end when the process is over.
    wait_until(lambda: lines_of(0) and lines_of(1), "the agent tells of both ends", SECONDS)
    (first,) = lines_of(1)
    assert first.endswith(told)
    (second,) = lines_of(0)
    assert "WARNING" in second
    assert "ended with an exception (PeerLost: " in second
