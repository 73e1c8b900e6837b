"""``python -m benchmarks.diagnosis``: inject faults, and score what is said of them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from allfold_cluster.network import Network, why_not
from allfold_cluster.signals import end_in_order
from allfold_core.errors import AllfoldError
from benchmarks import machine
from benchmarks.diagnosis.cost import measure_cost
from benchmarks.diagnosis.faults import FAULTS
from benchmarks.diagnosis.healthy import watch_healthy
from benchmarks.diagnosis.scoring import Score, Trial
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.trials import run_trials
from benchmarks.errors import BenchmarkFailed

IN_TIME_SECONDS = 2.0
_HELP = """\
Is the culprit named? A training runs on nodes in network namespaces of their own; faults are
injected into it, and what the orchestrator's list of incidents says is scored: the class
(communication or not; hang, slow or failed) and the culprit (rank, node or link), within 2 s of the
fault. Then the same training runs undisturbed on a crowded machine: whatever is reported then is a
false alarm. At last the cost: all-reduces with and without the observer, in turn.
"""


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    faults: int
    kinds: str
    nodes: int
    per_node: int
    network: str
    step_ms: float
    healthy: float
    burners: int
    cost: float
    seed: int
    json: Path | None

    @property
    def chosen(self) -> list[str]:
        return [kind for kind in FAULTS if not self.kinds or kind in self.kinds.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Inject, watch and measure; print the scores."""
    options = parse(arguments)
    end_in_order()
    about = machine.environment(sys.argv[1:])
    print(f"# {about['cpu']}, {about['cores']} cores; commit {about['commit']}")
    print(f"# load before the run: {os.getloadavg()[0]:.1f}; seed {options.seed}", flush=True)
    told: dict[str, object] = {"environment": about}
    try:
        if options.faults:
            told["trials"] = [asdict(each) for each in _inject(options)]
        if options.healthy:
            told["healthy"] = _watch(options)
        if options.cost:
            told["cost"] = _measure(options)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.diagnosis: {error}")
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the process with a message where they cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnosis",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--faults", type=int, default=208, help="how many, the kinds in turn  [%(default)s]")
    add("--kinds", default="", help=f"some of: {', '.join(FAULTS)}  [all]")
    add("--nodes", type=int, default=3, help="[%(default)s]")
    add("--per-node", type=int, default=1, help="ranks of each node  [%(default)s]")
    add("--network", default="2gbit", help="of each node's cable  [%(default)s]")
    add("--step-ms", type=float, default=5.0, help="that a step computes  [%(default)s]")
    add("--healthy", type=float, default=0.0, help="seconds without faults  [%(default)s]")
    add("--burners", type=int, default=4 * len(os.sched_getaffinity(0)) - 3, help="busy processes "
        "beside the healthy training  [%(default)s]")  # fmt: skip
    add("--cost", type=float, default=0.0, help="seconds of all-reduces with and without the "
        "observer  [%(default)s]")  # fmt: skip
    add("--seed", type=int, default=1, help="[%(default)s]")
    add("--json", type=Path, help="write everything to a file")
    found = Options(**vars(parser.parse_args(arguments)))
    if not found.chosen or found.nodes < 2 or found.nodes * found.per_node < 3:
        parser.error("expected kinds of faults, at least 2 nodes and 3 ranks")
    reason = why_not([Network.parse(found.network)])
    if reason is None and "lossy link" in found.chosen and shutil.which("nft") is None:
        reason = "a lossy link needs nft, of nftables"
    if reason is not None:
        parser.error(reason)
    return found


def training_of(options: Options) -> Training:
    """Return the training of a run, which is not started yet."""
    network = Network.parse(options.network)
    return Training(options.nodes, options.per_node, network, options.step_ms / 1e3)


def _inject(options: Options) -> list[Trial]:
    with training_of(options) as training:
        trials = run_trials(training, options.chosen, options.faults, options.seed, _print_trial)
    score = Score(trials)
    _print_table(score)
    _print_matrix(score)
    print(
        f"{len(trials)} faults of {len(options.chosen)} kinds: class and culprit within "
        f"{IN_TIME_SECONDS:g} s {score.within(IN_TIME_SECONDS):.1%}, recall {score.recall:.3f}, "
        f"precision {score.precision:.3f}",
        flush=True,
    )
    return trials


def _print_trial(trial: Trial) -> None:
    """Show what was wrong, as it happens."""
    if trial.delay is None or trial.delay > IN_TIME_SECONDS:
        late = "never" if trial.delay is None else f"after {trial.delay:.2f} s"
        print(f"! {trial.fault} {trial.expected.culprits}: {late}", flush=True)
    for each in trial.false_reports:
        print(f"! {trial.fault}: said instead: {each['cause']}: {each['sentence']}", flush=True)


def _print_table(score: Score) -> None:
    print(f"{'fault':<16}{'count':>6}{'right':>7}{'p50 s':>8}{'p99 s':>8}{'mean s':>8}")
    for fault in dict.fromkeys(trial.fault for trial in score.trials):
        trials = [trial for trial in score.trials if trial.fault == fault]
        delays = score.delays(fault) or (float("nan"),) * 3
        right = sum(trial.is_found for trial in trials)
        shown = "".join(f"{seconds:>8.2f}" for seconds in delays)
        print(f"{fault:<16}{len(trials):>6}{right:>7}{shown}")


def _print_matrix(score: Score) -> None:
    columns, rows = score.matrix()
    print("\nwhat was said first (? marks a wrong culprit)")
    print(f"{'':<16}" + " ".join(columns))
    for fault, row in rows.items():
        cells = (f"{row[column] or '.':>{len(column)}}" for column in columns)
        print(f"{fault:<16}" + " ".join(cells))
    print(flush=True)


def _watch(options: Options) -> list[dict[str, object]]:
    with training_of(options) as training:
        alarms = watch_healthy(training, options.healthy, options.burners)
    for each in alarms:
        print(f"! false alarm: {each['cause']}: {each['sentence']}")
    print(
        f"{len(alarms)} false alarms in {options.healthy:g} s of healthy training beside "
        f"{options.burners} busy processes",
        flush=True,
    )
    return alarms


def _measure(options: Options) -> list[dict[str, object]]:
    found = measure_cost(options.cost)
    print(
        f"{'all-reduce':<22}{'off us':>10}{'on us':>10}{'cost':>8}   {'of each pair':<18}"
        "p50; p99 and mean of both"
    )
    for each in found:
        print(each.line(), flush=True)
    return [asdict(each) for each in found]


if __name__ == "__main__":
    main()
