"""``python -m benchmarks.gpu``: Allfold on an NVIDIA GPU, checked and measured, as a table."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from allfold_core.errors import AllfoldError
from benchmarks import machine
from benchmarks.__main__ import _end
from benchmarks.children import ROOT
from benchmarks.errors import BenchmarkFailed
from benchmarks.gpu import options, report
from benchmarks.gpu.options import Options
from benchmarks.gpu.plan import COMMIT
from benchmarks.gpu.report import Report
from benchmarks.gpu.runs import Runs
from benchmarks.gpu.sanitizer import SanitizedStage
from benchmarks.gpu.stage import Stage

_NO_GPU = 2


def main() -> None:
    """Do what the options say; status 1 if anything was wrong, 2 if there is no GPU."""
    chosen = options.parse()
    # With it, every `with` on the way out ends what it started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    found = Report(environment=_environment())
    say = _clock()
    try:
        with _stage(chosen) as stage:
            runs = Runs(chosen, stage, found, say)
            why = runs.look()
            if why is not None and not chosen.without_gpu:
                stage.leave()
                _end_without_gpu(chosen, why)
            _do(runs, stage, found)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.gpu: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if chosen.output:
        found.write(chosen.output)
    print("\n".join(report.lines(found)), flush=True)
    sys.exit(0 if found.is_good else 1)


def _stage(chosen: Options) -> Stage:
    most = max(chosen.agents), max(chosen.ranks)
    if chosen.tool:
        return SanitizedStage(*most, chosen.ordinal, chosen.tool)
    return Stage(*most, chosen.ordinal)


def _do(runs: Runs, stage: Stage, found: Report) -> None:
    if not isinstance(stage, SanitizedStage):
        runs.measure()
        return
    runs.sanitized()
    # After a failure the agents are gone, and what they had to say was told.
    if not found.failures and stage.sanitized is not None:
        found.sanitizer = stage.sanitized.findings()


def _end_without_gpu(chosen: Options, why: str) -> None:
    agents, ranks = max(chosen.agents), max(chosen.ranks)
    print(
        f"benchmarks.gpu: no NVIDIA GPU on this machine: {why} "
        f"(the orchestrator, {agents} agents and {ranks} ranks did start; --without-gpu checks "
        "them on CPU tensors)",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(_NO_GPU)


def _environment() -> dict[str, Any]:
    packed = ROOT / COMMIT
    try:
        found = machine.environment(sys.argv[1:])
    except OSError as error:  # some sandboxes lack files of /proc
        found = {"arguments": sys.argv[1:], "unknown": str(error)}
    return found | {"commit": packed.read_text().strip()} if packed.exists() else found


def _clock() -> Callable[[str], None]:
    """Tells what is under way, with the seconds since the start."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    return say


if __name__ == "__main__":
    main()
