"""The end of a benchmark that is told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.children import ROOT, environment

SECONDS = 60.0
# It asks its parent to end, as a user might in that moment, and goes on.
_IP = """\
#!/bin/sh
echo began >> {log}
kill -TERM $PPID
sleep 0.3
echo done >> {log}
"""
_RUN = """
from allfold_cluster.signals import end_in_order
from allfold_cluster.network.namespaces import ip
end_in_order()
try:
    ip("netns", "add", "any")
finally:
    print("ended in order", flush=True)
print("went on", flush=True)
"""


def test_a_command_that_runs_when_the_benchmark_is_told_to_end_is_completed_first(
    tmp_path: Path,
) -> None:
    log, command = tmp_path / "log", tmp_path / "ip"
    command.write_text(_IP.format(log=log))
    command.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        cwd=ROOT,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout == "ended in order\n"
    assert log.read_text() == "began\ndone\n"
