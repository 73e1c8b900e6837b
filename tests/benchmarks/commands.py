"""Run a benchmark as its user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, environment


def run_benchmark(module: str, *options: str, json_file: Path, timeout: float) -> tuple[str, Any]:
    """Return what the benchmark has printed, and the rows that it has written to the file."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options, "--json", str(json_file)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(json_file.read_text())["rows"]
