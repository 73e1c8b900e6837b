"""Runs torch's own tests of a distributed backend on Allfold, as they come with torch.

    ALLFOLD_SOCKETS=a,b python -m tests.torch_backend.torch_suite METHOD METHOD@RANKS ...
    TORCH_SUITE_BACKEND=gloo python -m tests.torch_backend.torch_suite METHOD ...

The first line of the answer has the names of all methods. Then comes one line of JSON per method,
as soon as it is over. Ranks are forked from this process, which has imported torch already, where
torch's runner starts new interpreters; nothing else differs. The first half of them is on the first
node, the others are on the second. What torch skips without GPUs runs on the CPU: see gpu_words.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import unittest
from multiprocessing import get_context
from types import FunctionType
from typing import Any

import torch._dynamo  # noqa: F401 - DDP would import it, once per process
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import DistTestCases

import allfold.torch  # noqa: F401
from tests.torch_backend import gpu_words

# Allfold, or Gloo to compare with.
BACKEND = os.environ.get("TORCH_SUITE_BACKEND", "allfold")

# For a method that makes the default group anew.
_MEETING = f"file://{tempfile.mkdtemp()}/meeting"

# Many methods are gated by the names of torch's own backends, when the module is imported: what
# Gloo is tested with, Allfold is tested with.
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "4", "TEMP_DIR": "", "INIT_METHOD": _MEETING}
for feature in ("ddp", "subgroup"):
    DistTestCases.backend_feature[feature].add(BACKEND)
gpu_words.open_gates()

from torch.testing._internal.distributed import distributed_test  # noqa: E402

distributed_test.BACKEND = os.environ["BACKEND"] = BACKEND

TIMEOUT_SECONDS = 60


class TestAllfold(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The methods are torch's."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        self._start_processes(get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, *more: Any, **named: Any) -> None:
        if BACKEND == "allfold":
            sockets = os.environ["ALLFOLD_SOCKETS"].split(",")
            first = (int(os.environ["WORLD_SIZE"]) + 1) // 2
            os.environ["ALLFOLD_SOCKET"] = sockets[rank // first]
        if gpu_words.is_marked(getattr(cls, test_name)):
            gpu_words.mean_the_cpu()
        super()._run(rank, test_name, file_name, *more, **named)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        if test_name.startswith("test_accumulate_gradients_"):
            # They make a model on the CPU if the name is Gloo's, and none at all for any other.
            distributed_test.BACKEND = "gloo"
        super().run_test(test_name, parent_pipe)


def _open_gate(name: str) -> None:
    """Let a method run that torch runs on MPI alone: the same code without the mark to skip it."""
    gated = getattr(TestAllfold, name)
    copied = gated.__code__, gated.__globals__, name, gated.__defaults__, gated.__closure__
    method = FunctionType(*copied)
    setattr(TestAllfold, name, method)


for name in dir(TestAllfold):
    why = getattr(getattr(TestAllfold, name), "__unittest_skip_why__", "")
    if re.fullmatch("Only MPI supports (CPU )?all_to_all(_single)?", why):
        _open_gate(name)


def methods() -> list[str]:
    """The names of all of torch's methods."""
    return list(unittest.TestLoader().getTestCaseNames(TestAllfold))


def run(argument: str) -> dict[str, Any]:
    """Run one method; what comes after an @ is the number of ranks."""
    method, _, world_size = argument.partition("@")
    os.environ["WORLD_SIZE"] = world_size or "3"
    began = time.monotonic()
    result = unittest.TestResult()
    unittest.TestSuite([TestAllfold(method)]).run(result)
    outcome, message = "passed", ""
    if result.skipped:
        outcome, message = "skipped", result.skipped[0][1]
    elif problems := result.errors + result.failures:
        outcome, message = "failed", problems[0][1]
    seconds = round(time.monotonic() - began, 2)
    return {"method": argument, "outcome": outcome, "seconds": seconds, "message": message}


def main() -> None:
    common_distributed.TIMEOUT_DEFAULT = TIMEOUT_SECONDS
    common_distributed.TIMEOUT_OVERRIDE.clear()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no answer
    answers.write(json.dumps(methods()) + "\n")
    for argument in sys.argv[1:]:
        answers.flush()
        answers.write(json.dumps(run(argument)) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
