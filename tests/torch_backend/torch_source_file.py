"""Runs one file of torch's own tests, from its source repository, on Gloo or on Allfold.

    TORCH_SUITE_BACKEND=gloo python -m tests.torch_backend.torch_source_file FILE [CASE ...]

The answer is lines of JSON: the names of all cases, and then two for each case, when it begins and
when it is over. What names NCCL or Gloo gets the backend of the variable, and GPU words mean the
CPU. Ranks are forked, and those of one case are on two nodes, in turn.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import unittest
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal import common_distributed

from tests.torch_backend import gpu_words, npu_words

BACKEND = os.environ.get("TORCH_SUITE_BACKEND", "gloo")
TIMEOUT_SECONDS = 40
RANKS = 4  # of a case that asks for as many as there are GPUs
# A rank that makes a default group leaves this file: the case is one about a backend.
_USED = Path(os.environ.get("TMPDIR", "/tmp")) / f"used-{os.getpid()}"


class Rank(ForkProcess):
    """The process of a rank, in the class's place whose processes are new interpreters."""

    def run(self) -> None:
        rank = self.name.removeprefix("process ")
        sockets = os.environ.get("ALLFOLD_SOCKETS", "").split(",")
        if rank.isdigit():
            os.environ["ALLFOLD_SOCKET"] = sockets[int(rank) % len(sockets)]
        gpu_words.mean_the_cpu(RANKS)
        super().run()


class _Context:
    """What torch's runners ask for a process and for queues."""

    Process = Rank

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing.get_context("fork"), name)


def prepare() -> None:
    """Replace how torch's runners start ranks and make groups."""
    gpu_words.open_gates()
    vars(torch.cuda)["device_count"] = lambda: RANKS
    common_distributed.TIMEOUT_DEFAULT = TIMEOUT_SECONDS
    common_distributed.TIMEOUT_OVERRIDE.clear()
    processes = vars(torch.multiprocessing)
    processes["get_context"] = lambda method=None: _Context()
    processes["set_start_method"] = lambda method, force=False: None
    processes["Process"] = Rank
    processes["Queue"] = multiprocessing.get_context("fork").Queue
    original = dist.init_process_group

    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> None:
        compared = backend not in ("fake", "threaded")
        original(BACKEND if compared else backend, *arguments, **named)
        if compared:
            _USED.touch()

    for module in (dist, distributed_c10d, device_mesh):
        vars(module)["init_process_group"] = init_process_group


def load(path: Path) -> ModuleType:
    """Import a file of tests, which may import others beside it."""
    text = path.read_text()
    for folder in path.parents:
        if (folder / "torch_npu").is_dir():
            npu_words.install(folder, RANKS)
            text = npu_words.in_words_of_gpus(text)
    sys.path[:0] = [str(folder) for folder in path.parents[:3]]
    module = ModuleType(path.stem)
    sys.modules[path.stem] = module  # pickle looks there
    vars(module)["__file__"] = str(path)
    exec(compile(text, path, "exec"), vars(module))
    return module


def cases_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases_of(test)
        else:
            yield test


def run(case: unittest.TestCase) -> dict[str, Any]:
    """Run one case."""
    _USED.unlink(missing_ok=True)
    began = time.monotonic()
    result = unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    outcome, message = "passed", ""
    if result.skipped:
        outcome, message = "skipped", result.skipped[0][1]
    elif problems := result.errors + result.failures:
        outcome, message = "failed", problems[0][1]
    elif result.expectedFailures:
        outcome = "skipped"
    seconds = round(time.monotonic() - began, 2)
    used = _USED.exists()
    return {
        "case": case.id(),
        "outcome": outcome,
        "used": used,
        "seconds": seconds,
        "message": message,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print is no answer
    path, *selected = sys.argv[1:]
    prepare()
    module = load(Path(path))
    cases = list(cases_of(unittest.defaultTestLoader.loadTestsFromModule(module)))
    answers.write(json.dumps([case.id() for case in cases]) + "\n")
    for case in cases:
        if not selected or case.id() in selected:
            answers.write(json.dumps({"begins": case.id()}) + "\n")
            answers.write(json.dumps(run(case)) + "\n")
    _USED.unlink(missing_ok=True)
    answers.flush()
    os._exit(0)  # a thread or a group that a case left behind does not matter


if __name__ == "__main__":
    main()
