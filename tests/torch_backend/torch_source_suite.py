"""Runs torch's own tests out of a copy of its source repository, on Gloo and on Allfold.

    python -m tests.torch_backend.torch_source_suite --source /path/to/pytorch [FILE ...]

The copy is of the version that is installed. FILE is a path below its ``test/distributed``; without
any, all of :data:`FILES` that are there run. A line for each file says how many of its cases make a
group, how many of those Gloo passes, and how many Allfold; then come those that Gloo passes and
Allfold does not. A copy of torch_npu's repository, which has many of these tests, is taken as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allfold_cluster.processes import wait_for
from tests.support.processes.services import ROOT, Services

FILES = (
    "algorithms/test_join.py",
    "algorithms/ddp_comm_hooks/test_ddp_hooks.py",
    "optim/test_zero_redundancy_optimizer.py",
    "test_functional_api.py",
    "test_c10d_functional_native.py",
    "test_c10d_object_collectives.py",
    "test_device_mesh.py",
    "tensor/test_redistribute.py",
    "tensor/test_dtensor.py",
    "tensor/test_math_ops.py",
    "tensor/test_matrix_ops.py",
    "checkpoint/test_state_dict.py",
    "checkpoint/test_fsdp_model_state.py",
    "checkpoint/test_fsdp_optim_state.py",
    "_composable/fsdp/test_fully_shard_training.py",
)
BACKENDS = ("gloo", "allfold")
CASE_SECONDS = 90.0  # torch's own runner gives up before
LOAD_SECONDS = 60.0
FILE_SECONDS = 240.0  # then its other cases are not run

Answer = dict[str, Any]


class SourceFile:
    """One file of tests, whose cases run in processes of their own group of processes."""

    def __init__(self, path: Path, backend: str, environment: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", "tests.torch_backend.torch_source_file", str(path)]
        self._env = environment | {"TORCH_SUITE_BACKEND": backend}
        self._end = time.monotonic() + FILE_SECONDS
        self.cases: list[str] | None = None

    def run(self) -> dict[str, Answer]:
        """Run all cases; after one that hangs, the others in a new process."""
        answers: dict[str, Answer] = {}
        left: list[str] = []
        while True:
            before = len(answers)
            answers |= {answer["case"]: answer for answer in self._some(left)}
            left = [case for case in self.cases or [] if case not in answers]
            if not left or len(answers) == before or time.monotonic() > self._end:
                return answers

    def _some(self, selected: list[str]) -> Iterator[Answer]:
        """Run cases until one hangs or ends the process; that one's answer is the last."""
        with subprocess.Popen(
            [*self._command, *selected],
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                yield from self._answers(process)
            finally:
                os.killpg(process.pid, signal.SIGKILL)

    def _answers(self, process: subprocess.Popen[bytes]) -> Iterator[Answer]:
        begun: str | None = None
        seconds = LOAD_SECONDS
        assert process.stdout is not None
        unread = b""
        while wait_for([process.stdout], seconds):
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            for said in map(json.loads, lines):
                seconds = CASE_SECONDS
                if isinstance(said, list):
                    self.cases = said
                elif "begins" in said:
                    begun = said["begins"]
                else:
                    begun = None
                    yield said
                    if time.monotonic() > self._end:
                        return
        if begun is not None:
            yield {"case": begun, "outcome": "hung", "used": True, "message": "", "seconds": 0}


def compare(path: Path, environment: dict[str, str]) -> dict[str, dict[str, Answer]]:
    """Run a file on both backends."""
    return {backend: SourceFile(path, backend, environment).run() for backend in BACKENDS}


def why(answer: Answer) -> str:
    """Return the last error of what a case said."""
    errors = re.findall(r"^(?:[\w.]*(?:Error|Exception)\b.*)", answer["message"], re.MULTILINE)
    return f"{answer['outcome']}: {errors[-1][:160]}" if errors else str(answer["outcome"])


def row(name: str, answers: dict[str, dict[str, Answer]]) -> tuple[str, list[str]]:
    """Return a line of the table, and the cases that Gloo passes and Allfold does not."""
    gloo, allfold = (answers[backend] for backend in BACKENDS)
    if not gloo:
        return f"| {name} | it has no tests, or cannot be imported | | |", []
    used = [case for case, answer in gloo.items() if answer["used"]]
    passed = [case for case in used if gloo[case]["outcome"] == "passed"]
    differing = [
        f"{name}: {case.partition('.')[2]}: {why(allfold[case]) if case in allfold else 'not run'}"
        for case in passed
        if case not in allfold or allfold[case]["outcome"] != "passed"
    ]
    of_allfold = sum(allfold[case]["outcome"] == "passed" for case in used if case in allfold)
    return f"| {name} | {len(used)} | {len(passed)} | {of_allfold} |", differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("files", nargs="*", default=FILES)
    given = parser.parse_args()
    folder = given.source.resolve() / "test" / "distributed"
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes
    with tempfile.TemporaryDirectory(prefix="af") as temporary, Services() as services:
        services.start_orchestrator()
        services.start_agents("node0", "node1")
        environment = services.env | {
            "ALLFOLD_SOCKETS": ",".join(agent.socket for agent in services.agents.values()),
            "TMPDIR": temporary,
        }
        print("| file | cases | Gloo | Allfold |\n|---|---|---|---|", flush=True)
        for name in given.files:
            if (folder / name).exists():
                line, differing = row(name, compare(folder / name, environment))
                failed += len(differing)
                print("\n".join([line, *differing]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
