"""The tiers of the tests: what `make check`, `make test` and `make test-all` run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Literal

import pytest
import yaml  # type: ignore[import-untyped]
from _pytest.mark.expression import Expression

from tests.support.budget import Times, known_cases
from tests.support.tiers import CLIENTS, NEVER_IN_THE_GATE, PURE, One

When = Literal["setup", "call", "teardown"]
ROOT = Path(__file__).parents[1]
SECONDS = 100.0
SETS = ("pure", "long", "clients")


@cache
def commands(target: str, *arguments: str) -> list[list[str]]:
    """The runs of pytest of a target of the Makefile, as words behind `pytest`."""
    made = subprocess.run(
        ["make", "-n", "--no-print-directory", target, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    ).stdout.replace("\\\n", " ")
    runs = [line for line in made.splitlines() if " -m pytest " in line]
    # To collect is not to run.
    lines = [shlex.split(line) for line in runs if "--collect-only" not in line]
    return [line[line.index("pytest") + 1 :] for line in lines]


def selects(command: list[str], marks: tuple[str, ...]) -> bool:
    """True if a run takes a case with these marks, that lies where its marks say."""
    folders = [word for word in command if word.startswith("tests/")]
    if folders and not ({"pure", "clients"} & {*marks}):
        return False  # such a run has the folders of one set alone
    if folders and "clients" in marks and CLIENTS.rstrip("/") not in folders:
        return False
    if folders and "pure" in marks and not {each.rstrip("/") for each in PURE} <= {*folders}:
        return False
    if "-m" not in command:
        return True
    return Expression.compile(command[command.index("-m") + 1]).evaluate(
        lambda name, /, **_: name in marks
    )


EVERY_SET = [
    marks
    for marks in chain.from_iterable(combinations(SETS, n) for n in range(3))
    if {"pure", "clients"} - {*marks}
]
each_set = pytest.mark.parametrize(
    "marks", EVERY_SET, ids=lambda marks: "+".join(marks) or "neither"
)


@each_set
def test_the_tiers_together_run_each_case_once(marks: tuple[str, ...]) -> None:
    runs = [run for run in commands("test-all") if not run[0].startswith("-q") or "--cov" in run]
    assert [selects(run, marks) for run in runs].count(True) == 1, runs


@each_set
def test_the_gate_runs_all_but_long_cases_and_those_of_clients(marks: tuple[str, ...]) -> None:
    chosen = [selects(run, marks) for run in commands("test")].count(True)
    assert chosen == (0 if {"long", "clients"} & {*marks} else 1)


def test_what_is_named_is_run_whole() -> None:
    (run,) = commands("test", "TESTS=tests/fuzz/test_rest.py", "PYTEST_ARGS=-x")
    assert run[-2:] == ["-x", "tests/fuzz/test_rest.py"] and "-m" not in run


def test_the_gate_keeps_one_value_of_a_parameter() -> None:
    rule = One("tests/conformance/", ("shape",), ("1+2+3", "2x2"))
    assert rule.kept(["1x3", "2x2"]) == "2x2"
    assert rule.kept(["2x2", "1+2+3"]) == "1+2+3"
    assert rule.kept(["4x1", "8x1"]) == "4x1"


def test_each_promise_of_the_contract_is_in_the_gate(request: pytest.FixtureRequest) -> None:
    """The tests that the table of tests/README.md names, of all that were collected with this."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "tests" / "README.md").read_text()))
    left_out = request.config.stash[NEVER_IN_THE_GATE]
    assert not sorted(named & left_out)


# Times


def report(name: str, seconds: float, when: When = "call", *marks: str) -> pytest.TestReport:
    return pytest.TestReport(
        name, (name, 0, name), dict.fromkeys(marks, 1), "passed", None, when, (), seconds
    )


def test_a_case_over_the_budget_of_its_kind_is_listed() -> None:
    times = Times()
    times.add(report("tests/core/test_a.py::test_slow", 1.5))
    times.add(report("tests/core/test_a.py::test_fast", 0.5))
    times.add(report("tests/core/test_a.py::test_process", 1.5, "call", "slow"))
    times.add(report("tests/e2e/test_b.py::test_process", 6.0))
    listed = [name for _, _, name in times.over_budget({})]
    assert listed == ["tests/e2e/test_b.py::test_process", "tests/core/test_a.py::test_slow"]


def test_fixtures_count_for_their_file_and_not_for_the_case_that_comes_first() -> None:
    times = Times()
    times.add(report("tests/core/test_a.py::test_one", 30.0, "setup"))
    times.add(report("tests/core/test_a.py::test_one", 0.25))
    assert times.over_budget({}) == []
    assert times.table().splitlines()[1] == "30.2\t1\ttests/core/test_a.py"


def test_a_slow_case_that_is_known_is_listed_once_it_takes_twice_as_long() -> None:
    times = Times()
    times.add(report("tests/core/test_a.py::test_slow", 3.0))
    known = known_cases(times.table())
    assert known == {"tests/core/test_a.py::test_slow": 3.0}
    assert times.over_budget(known) == []
    times.add(report("tests/core/test_a.py::test_slow", 7.0))
    assert [budget for _, budget, _ in times.over_budget(known)] == [6.0]


def test_what_was_not_run_keeps_its_times() -> None:
    before, after = Times(), Times()
    for file in ("a", "b"):
        before.add(report(f"tests/core/test_{file}.py::test_slow", 3.0))
    after.add(report("tests/core/test_a.py::test_slow", 0.5))
    names = [line.split("\t")[2] for line in after.table(before.table()).splitlines()[1:]]
    assert names == [
        "tests/core/test_b.py",
        "tests/core/test_a.py",
        "tests/core/test_b.py::test_slow",
    ]


# CI


def test_the_environment_is_made_of_the_python_that_ci_has_set_up() -> None:
    gate = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["gate"]
    named = gate["env"]["PYTHON"].replace("${{ matrix.python }}", "3.13")
    made = subprocess.run(
        ["make", "-n", "-B", "--no-print-directory", ".venv/.made"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": named},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert "\npython3.13 -m venv .venv\n" in made.stdout
