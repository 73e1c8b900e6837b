"""The benchmark of states: its options, and a short run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.state.__main__ import parse
from tests.benchmarks.commands import run_benchmark

SECONDS = 240.0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_rows_are_measured_checked_and_written(tmp_path: Path) -> None:
    options = ["--mib", "24", "--rounds", "2"]
    file = tmp_path / "results.json"
    printed, rows = run_benchmark("benchmarks.state", *options, json_file=file, timeout=SECONDS)
    assert [(name, row["samples"], row["wrong"]) for name, row in rows.items()] == [
        ("undisturbed", 2, 0),
        ("killed", 1, 0),
    ]
    assert all(0 < row["least"] <= row["median"] <= row["p99"] for row in rows.values())
    assert "a source killed halfway" in printed


@pytest.mark.parametrize("arguments", [["--holders", "1"], ["--mib", "0"], ["--rounds", "0"]])
def test_options_that_cannot_work_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "expected at least" in capsys.readouterr().err
