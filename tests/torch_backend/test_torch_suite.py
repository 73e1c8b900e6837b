"""torch's own tests of a distributed backend, unedited: Allfold passes those that run on CPUs.

Gloo runs those that it is said to fail, so that no excuse outlives its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from allfold_cluster.processes import Child, stop_all, wait_for
from tests.support.processes.services import ROOT, Services
from tests.support.tiers import long, one_in
from tests.torch_backend.torch_suite_table import (
    FAILED_BY_GLOO,
    NOT_RUN,
    PASSED,
    PASSED_ON_CPU,
    QUICK,
)

RESULT_SECONDS = 110.0


class Suite:
    """The process that runs the methods on one backend, one after the other."""

    def __init__(self, services: Services, backend: str, methods: list[str]) -> None:
        self._log = services.folder / f"torch_suite_{backend}.log"
        sockets = ",".join(agent.socket for agent in services.agents.values())
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = services.env | {"ALLFOLD_SOCKETS": sockets, "PYTHONPATH": python_path}
        env |= {"TORCH_SUITE_BACKEND": backend, "OMP_NUM_THREADS": "1"}
        env["TMPDIR"] = str(services.folder)  # torch leaves files behind
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "tests.torch_backend.torch_suite", *methods]
            self._child = Child(
                "torch's suite", command, env=env, stdout=subprocess.PIPE, stderr=log
            )
        self._unread = b""
        self._results: dict[str, dict[str, Any]] = {}
        self.methods: list[str] = json.loads(self._line())

    def result(self, method: str) -> dict[str, Any]:
        """Return the answer of a test method."""
        while method not in self._results:
            answer = json.loads(self._line())
            self._results[answer["method"]] = answer
        return self._results[method]

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        stop_all([self._child])
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _line(self) -> bytes:
        stream = self._child.stdout
        assert stream is not None
        while b"\n" not in self._unread:
            assert wait_for([stream], RESULT_SECONDS), f"no result in time\n{self.tail()}"
            read = os.read(stream.fileno(), 1 << 16)
            assert read, f"the suite ended\n{self.tail()}"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _run_on(backend: str, request: pytest.FixtureRequest) -> Iterator[Suite]:
    """Run what was selected of this module for a fixture, in the order of its tests."""
    selected = [
        str(item.callspec.params["method"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and {request.fixturename, "method"} <= set(item.fixturenames)
    ]
    running = Suite(request.getfixturevalue("services"), backend, selected)
    yield running
    running.close()


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    yield from _run_on("allfold", request)


@pytest.fixture(scope="module")
def gloo(request: pytest.FixtureRequest) -> Iterator[Suite]:
    yield from _run_on("gloo", request)


ON_CPU = [method if method in QUICK else long(method) for method in PASSED_ON_CPU]
EXCUSES = [(method, excuse) for excuse, methods in FAILED_BY_GLOO.items() for method in methods]


@pytest.mark.parametrize("method", [*one_in(8, PASSED), *ON_CPU])
def test_a_method_of_torchs_own_tests_passes(suite: Suite, method: str) -> None:
    result = suite.result(method)
    assert result["outcome"] == "passed", f"{result['message']}\n{suite.tail()}"


@pytest.mark.long
@pytest.mark.parametrize(("method", "excuse"), EXCUSES)
def test_gloo_fails_as_the_table_says(gloo: Suite, method: str, excuse: str) -> None:
    result = gloo.result(method)
    assert result["outcome"] == "failed", "it passes on Gloo: let it run on Allfold"
    assert excuse in result["message"]


def test_every_method_that_torch_has_is_run_or_excused(suite: Suite) -> None:
    excuses = [*NOT_RUN.values(), *FAILED_BY_GLOO.values()]
    excused = {method for methods in excuses for method in methods}
    run = {method.partition("@")[0] for method in (*PASSED, *PASSED_ON_CPU)}
    assert run | excused == set(suite.methods)
    assert not run & excused
    assert set(QUICK) <= set(PASSED_ON_CPU)
