"""Processes that the fork server of the tests makes are like those that Python starts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allfold_cluster.processes import Child, stop_all, wait_for
from tests.support.processes.forked import Forked, ForkServer, start_module
from tests.support.waiting import wait_until

WAIT_SECONDS = 30.0
PLAIN = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}

# A module: it writes what it finds, and ends as it is told.
PROGRAM = """
import json, os, sys, time
print(json.dumps({
    "words": sys.argv[1:], "name": __name__, "session": os.getsid(0), "pid": os.getpid(),
    "variables": dict(os.environ), "folder": os.getcwd(),
}), flush=True)
if sys.argv[1:] == ["stay"]:
    time.sleep(60)
raise SystemExit(7)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One of these tests' own: that of others may not be for their environment."""
    server = ForkServer(PLAIN)
    yield server
    server.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    """What a test has started; whatever is left of it is ended."""
    children: list[Child] = []
    yield children
    stop_all(children)


@pytest.fixture
def forked(server: ForkServer, module: Path, children: list[Child]) -> Callable[..., Child]:
    """Fork the program."""

    def start(*words: str, **variables: str) -> Child:
        environment = {**server.environment, **variables}
        with (module / "log").open("wb") as log, Path(os.devnull).open() as nothing:
            command = ["forked_program", *words]
            streams = {"stdin": nothing.fileno(), "output": log.fileno()}
            children.append(Forked(server, "program", command, environment, **streams))
        return children[-1]

    return start


def said(folder: Path) -> dict[str, Any]:
    """What the program wrote; it may be writing still."""
    log = folder / "log"
    wait_until(lambda: "\n" in log.read_text(), "the program has said what it found")
    return dict(json.loads(log.read_text().splitlines()[0]))


def test_a_forked_program_finds_what_it_was_given_and_ends_as_it_wants(
    forked: Callable[..., Child], module: Path
) -> None:
    child = forked("one", "two", ALLFOLD_TOKEN="secret")
    assert wait_for([child], WAIT_SECONDS)
    assert (child.ended, child.reap(), child.status) == (True, 7, 7)
    found = said(module)
    assert (found["words"], found["name"]) == (["one", "two"], "__main__")
    assert found["folder"] == str(module)
    assert found["pid"] == found["session"] == child.pid
    assert found["variables"]["ALLFOLD_TOKEN"] == "secret"
    assert "PYTHONPATH" not in found["variables"]


def test_a_forked_program_dies_by_a_signal(forked: Callable[..., Child], module: Path) -> None:
    child = forked("stay")
    assert not child.ended
    said(module)
    child.signal(signal.SIGKILL)
    assert wait_for([child], WAIT_SECONDS)
    assert child.reap() == 128 + signal.SIGKILL
    assert child.killed_by == signal.SIGKILL


def test_no_fork_has_the_variables_of_another_that_libraries_read(
    module: Path, children: list[Child]
) -> None:
    for number in ("1", "2", "3"):
        environment = {**PLAIN, "READ_BY_A_LIBRARY": number}
        with (module / "log").open("wb") as log:
            child = start_module("program", ["forked_program"], environment, output=log.fileno())
        children.append(child)
        assert wait_for([child], WAIT_SECONDS)
        assert child.reap() == 7
        assert said(module)["variables"]["READ_BY_A_LIBRARY"] == number
    assert not isinstance(child, Forked)  # there are as many servers as there may be


def test_where_torch_would_have_threads_already_no_program_is_forked(
    module: Path, children: list[Child]
) -> None:
    with (module / "log").open("wb") as log:
        environment = {**PLAIN, "OMP_NUM_THREADS": "2"}
        child = start_module("program", ["forked_program"], environment, output=log.fileno())
    children.append(child)
    assert not isinstance(child, Forked)
    assert wait_for([child], WAIT_SECONDS)
    assert said(module)["variables"]["OMP_NUM_THREADS"] == "2"
