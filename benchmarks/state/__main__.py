"""``python -m benchmarks.state``: pulls of a state, undisturbed and with a source killed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allfold_cluster import Cluster
from allfold_cluster.processes import Child, stop_all, wait_for
from allfold_core.errors import AllfoldError
from allfold_core.protocol.state_blocks import BLOCK_BYTES
from benchmarks import machine
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import Figures
from benchmarks.state.rank import Orders, Report
from benchmarks.usage import cpu_seconds

_SECONDS = 300.0
_LINE = "{:<28} {:>6} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>6}"
_HEADER = _LINE.format(
    "1 late rank, digests on", "pulls", "p50 ms", "p99 ms", "mean ms", "least ms", "GB/s",
    "CPU-s/GB", "wrong",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The options of a measurement.

    Attributes:
        nbytes: the size of the state.
        holders: the number of ranks that have the state, each on a node of its own.
        rounds: the number of undisturbed pulls; a source is killed in a third as many others.
    """

    nbytes: int
    holders: int
    rounds: int
    json: Path | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure pulls with and without a killed source, and print a line for each."""
    options = parse(arguments)
    about = machine.environment(sys.argv[1:])
    print(f"# {about['cpu']}, {about['cores']} cores; commit {about['commit']}")
    print(f"# {options.nbytes >> 20} MiB from {options.holders} holders on nodes of their own;")
    print(f"# from the call of sync to its return; load before the run: {os.getloadavg()[0]:.1f}")
    print(_HEADER, flush=True)
    found = {}
    try:
        with Cluster(env=environment()) as cluster:
            cluster.start(options.holders + 1)
            found["undisturbed"] = _undisturbed(cluster, options)
            _print("undisturbed", found["undisturbed"], options)
            found["killed"] = _with_a_source_killed(cluster, options)
            _print("a source killed halfway", found["killed"], options)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.state: {error}")
    if options.json:
        rows = {name: vars(figures) for name, figures in found.items()}
        options.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options; ends the process with a message if they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state",
        description="The time until a rank that comes late has the state of the others.",
    )
    add = parser.add_argument
    add("--mib", type=int, default=1024, help="of the state  [%(default)s]")
    add("--holders", type=int, default=2, help="ranks that have it  [%(default)s]")
    add("--rounds", type=int, default=21, help="pulls  [%(default)s]")
    add("--json", type=Path, help="write the figures to a file")
    found = parser.parse_args(arguments)
    if found.mib < 1 or found.holders < 2 or found.rounds < 1:
        parser.error("expected at least 1 MiB, 2 holders, 1 round")
    return Options(found.mib << 20, found.holders, found.rounds, found.json)


def _undisturbed(cluster: Cluster, options: Options) -> Figures:
    return _figures([_run(cluster, options, "undisturbed", options.rounds, 0)])


def _with_a_source_killed(cluster: Cluster, options: Options) -> Figures:
    """Measure one pull per start of the ranks; rank 1 dies after serving half of its share."""
    blocks = max(1, options.nbytes // BLOCK_BYTES // options.holders // 2)
    rounds = -(-options.rounds // 3)
    return _figures([_run(cluster, options, f"killed{n}", 1, blocks) for n in range(rounds)])


@dataclass(frozen=True)
class _Run:
    """The report of the late rank, and the CPU seconds of all processes that live."""

    report: Report
    cpu: float


def _run(cluster: Cluster, options: Options, name: str, rounds: int, dies_after: int) -> _Run:
    world = options.holders + 1
    files = [cluster.folder / f"{name}-{rank}.json" for rank in range(world)]
    dying = 1 if dies_after else None
    agents = [agent.pid for agent in cluster.agents.values()]
    before = cpu_seconds(agents)
    ranks = [
        Child(
            f"rank {rank}",
            python(
                "benchmarks.state.rank",
                Orders(
                    rank,
                    world,
                    name,
                    options.nbytes,
                    rounds,
                    dies_after if rank == dying else 0,
                    str(files[rank]),
                ).pack(),
            ),
            env=environment() | cluster.environment(f"node{rank}"),
        )
        for rank in range(world)
    ]
    try:
        waiting = list(ranks)
        while waiting:
            ended = wait_for(waiting, _SECONDS)
            if not ended:
                raise BenchmarkFailed(f"{waiting[0].name} has not ended within {_SECONDS:g} s")
            waiting = [rank for rank in waiting if rank not in ended]
    finally:
        stop_all(ranks)
    used = cpu_seconds(agents) - before
    reports = [_read(file) for rank, file in enumerate(files) if rank != dying]
    return _Run(reports[-1], used + sum(report.cpu for report in reports))


def _read(file: Path) -> Report:
    if not file.exists():
        raise BenchmarkFailed("a rank has failed; what it said is above")
    return Report(**json.loads(file.read_text()))


def _figures(runs: Sequence[_Run]) -> Figures:
    seconds = [each for run in runs for each in run.report.seconds]
    wrong = sum(run.report.wrong for run in runs)
    return Figures.of(seconds, wrong, sum(run.cpu for run in runs) / len(seconds))


def _print(what: str, figures: Figures, options: Options) -> None:
    times = (figures.median, figures.p99, figures.mean, figures.least)
    print(
        _LINE.format(
            what,
            figures.samples,
            *(f"{seconds * 1000:.0f}" for seconds in times),
            f"{options.nbytes / figures.median / 1e9:.2f}",
            f"{figures.cpu / (options.nbytes / 1e9):.2f}",
            figures.wrong,
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
