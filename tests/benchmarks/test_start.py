"""The benchmark of starts: a short run of real jobs, beside Gloo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.children import ROOT, environment, python
from benchmarks.start import main

SECONDS = 280.0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_jobs_of_both_backends_are_timed_from_nothing_to_nothing(tmp_path: Path) -> None:
    file = tmp_path / "start.json"
    done = subprocess.run(
        python("benchmarks.start", "--runs", "1", "--json", str(file)),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| whole job, launcher included, one machine |" in done.stdout
    for times in json.loads(file.read_text())["jobs"].values():
        for each in (times["allfold"], times["gloo"]):
            (whole,), (torch,), (first_op,) = each["whole"], each["torch"], each["first_op"]
            assert whole > torch + first_op


def test_no_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--runs", "0"])
    assert "--runs is at least 1" in capsys.readouterr().err
