"""``python -m benchmarks.goodput``: a training in which somebody is killed every few seconds."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from allfold_core.errors import AllfoldError
from benchmarks import machine
from benchmarks.children import python
from benchmarks.errors import BenchmarkFailed
from benchmarks.goodput.accounts import Phase, Stalls, goodput
from benchmarks.goodput.rank import Orders
from benchmarks.goodput.training import Training

TO_REACH = 0.97
_GROUP = "goodput"
_HELP = """\
An elastic training in which somebody is killed every few seconds, and replaced at once.

Goodput is the number of steps that the group has committed, times the ideal time of a step,
divided by the time that has passed. The ideal time is the mean from one commit of the group to the
next in the first part of the same run, in which the same processes train undisturbed. A step is
committed when its slowest rank has done so; one that has to be done again counts once.

A step computes by waiting for a fixed time, so that replacements that start up take the processors
from nobody who computes; then it all-reduces. Each result is checked.
"""
_LINE = "{:<28} {:>8} {:>7} {:>7} {:>6} {:>9} {:>9} {:>9}"
_HEADER = _LINE.format(
    "", "seconds", "steps", "redone", "wrong", "p50 ms", "p99 ms", "mean ms"
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The options of a measurement.

    Attributes:
        seconds: the length of the part with faults.
        every: seconds from one fault to the next.
        undisturbed: the length in seconds of the part without faults, which comes first.
        nodes: the number of nodes, each with an agent and a rank.
        kill: ``rank``, or ``agent`` for an agent with its rank.
        step_ms: the computation in a step, in milliseconds.
        kib: the size of a step's all-reduce in KiB.
    """

    seconds: float
    every: float
    undisturbed: float
    nodes: int
    kill: str
    step_ms: float
    kib: int
    json: Path | None

    @property
    def faults(self) -> int:
        return int(self.seconds / self.every)


@dataclass(frozen=True)
class Outcome:
    """The two parts of a run, and what the faults have cost.

    Attributes:
        stalls: of survivors, in ideal steps.
        absent: seconds from each kill to the first step of the replacement.
    """

    undisturbed: Phase
    disturbed: Phase
    stalls: Stalls
    absent: list[float]

    @property
    def goodput(self) -> float:
        return goodput(self.undisturbed, self.disturbed)

    @property
    def wrong(self) -> int:
        return self.undisturbed.wrong + self.disturbed.wrong


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print both parts of the run; status 1 where a result was wrong."""
    options = parse(arguments)
    about = machine.environment(sys.argv[1:])
    print(f"# {about['cpu']}, {about['cores']} cores; commit {about['commit']}")
    print(f"# {options.nodes} nodes with a rank each; a step waits {options.step_ms:g} ms and")
    print(f"# all-reduces {options.kib} KiB; load before the run: {os.getloadavg()[0]:.1f}")
    print("# ms from one commit of the group to the next; of each step the slowest rank counts")
    print(_HEADER, flush=True)
    try:
        outcome = measure(options)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.goodput: {error}")
    _print(outcome, options)
    if options.json:
        told = {
            "environment": about,
            "load": os.getloadavg()[0],
            "goodput": outcome.goodput,
            **asdict(outcome),
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if outcome.wrong:
        sys.exit(1)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the process with a message where they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=120.0, help="of the part with faults  [%(default)s]")
    add("--every", type=float, default=15.0, help="seconds from fault to fault  [%(default)s]")
    add("--undisturbed", type=float, default=30.0, help="seconds without faults  [%(default)s]")
    add("--nodes", type=int, default=4, help="with a rank each  [%(default)s]")
    add("--kill", choices=("rank", "agent"), default="rank", help="an agent with its rank, or a "
        "rank alone  [%(default)s]")  # fmt: skip
    add("--step-ms", type=float, default=50.0, help="that a step computes  [%(default)s]")
    add("--kib", type=int, default=256, help="that it all-reduces  [%(default)s]")
    add("--json", type=Path, help="write the figures to a file")
    found = Options(**vars(parser.parse_args(arguments)))
    if found.nodes < 3 or found.kib < 1 or found.step_ms < 0:
        parser.error("expected at least 3 nodes, 1 KiB, and a step of 0 ms")
    if found.undisturbed <= 0 or found.every <= 0 or found.faults < 1:
        parser.error("expected some undisturbed seconds, and time for a fault")
    return found


def measure(options: Options) -> Outcome:
    """Run the training, first undisturbed, then with faults."""
    with Training(options.nodes, partial(_command, options)) as training:
        training.await_all()
        began = time.monotonic()
        training.watch(options.undisturbed)
        disturbed = time.monotonic()
        kills = []
        for number in range(options.faults):
            # In the middle of its period: so the last one, too, counts with all that it costs.
            _watch_until(training, disturbed + (number + 0.5) * options.every)
            training.await_all()
            kills.append(time.monotonic())
            # One node after the other: also the one that leads the decisions on losses.
            node = training.nodes[number % options.nodes]
            training.kill(node, with_agent=options.kill == "agent")
        _watch_until(training, disturbed + options.faults * options.every)
        training.await_all()
        ended = time.monotonic()
        logs = training.logs()
    undisturbed = Phase.of(logs, began, disturbed)
    replacements = logs[options.nodes :]
    return Outcome(
        undisturbed,
        Phase.of(logs, disturbed, ended),
        Stalls.of(logs, disturbed, undisturbed.mean),
        [log[0].began - kill for log, kill in zip(replacements, kills, strict=True)],
    )


def _command(options: Options, agent: str, seat: int, log: Path) -> list[str]:
    seconds, nbytes = options.step_ms / 1e3, options.kib << 10
    orders = Orders(_GROUP, agent, seat, options.nodes, seconds, nbytes, str(log))
    return python("benchmarks.goodput.rank", orders.pack())


def _watch_until(training: Training, due: float) -> None:
    training.watch(max(0.0, due - time.monotonic()))


def _print(outcome: Outcome, options: Options) -> None:
    killed = "a rank" if options.kill == "rank" else "an agent and its rank"
    _print_phase("undisturbed", outcome.undisturbed)
    _print_phase("with faults", outcome.disturbed)
    print(f"# {options.faults} faults, one every {options.every:g} s: SIGKILL of {killed}")
    for what, steps in (("kill", outcome.stalls.kills), ("join", outcome.stalls.joins)):
        if steps:
            print(
                f"# longest stall of a survivor per {what}, in steps: "
                f"median {statistics.median(steps):.2f}, max {max(steps):.2f}"
            )
    absent = statistics.median(outcome.absent)
    print(f"# from a kill to the first step of the replacement: median {absent:.2f} s")
    print(f"goodput {outcome.goodput:.2%}, to reach: {TO_REACH:.0%}", flush=True)


def _print_phase(what: str, phase: Phase) -> None:
    times = (f"{seconds * 1e3:.1f}" for seconds in (phase.p50, phase.p99, phase.mean))
    counts = (phase.steps, phase.redone, phase.wrong)
    print(_LINE.format(what, f"{phase.seconds:.1f}", *counts, *times))


if __name__ == "__main__":
    main()
