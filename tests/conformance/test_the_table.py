"""The table of ``tests/README.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [*range(1, 29), 30, 31, 32]
DEFECTS = range(1, 14)


def test_every_test_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (TESTS / "README.md").read_text()))
    files = TESTS.rglob("test_*.py")
    existing = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 50
    assert named - existing == set()


def test_every_row_and_every_defect_has_an_owner() -> None:
    table = (TESTS / "README.md").read_text()
    for row in ROWS:
        assert re.search(rf"^\| {row} \|.*`test_", table, re.MULTILINE), row
    for defect in DEFECTS:
        assert re.search(rf"^\| {defect}: .*`test_", table, re.MULTILINE), defect
