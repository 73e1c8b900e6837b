"""The options with which ``make test`` runs the tests."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
SECONDS = 100.0


def test_files_run_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    """Fast ones first; pytest-xdist by itself begins with the file that has the most tests."""
    (tmp_path / "test_few.py").write_text("def test_one(): pass\n")
    (tmp_path / "test_many.py").write_text("".join(f"def test_{n}(): pass\n" for n in range(5)))
    made = subprocess.run(
        [
            "make",
            "-n",
            "--no-print-directory",
            "test",
            "WORKERS=1",
            "TESTS=test_few.py test_many.py",
            "PYTEST_ARGS=-v",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    last = shlex.split(made.stdout.splitlines()[-1])
    options = last[last.index("pytest") + 1 :]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split()[-1] for line in done.stdout.splitlines() if "PASSED" in line]
    assert [each.partition("::")[0] for each in ran] == ["test_few.py"] + ["test_many.py"] * 5


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
