"""``python -m benchmarks.scale``: what Allfold does, and would do, with thousands of nodes.

    machine      the membership of a group alone, in this process: no network, no store
    control      a real orchestrator on a real redis-server, under the requests of all agents
    collectives  the predicted time of an all-reduce, by strategy, size and number of nodes
    plots        SVG plots of the results; needs matplotlib

Each writes one JSON file into the folder of --output. Without names, all four run. The full
measurement is ``--nodes 10000``; it takes a minute or two, and two file descriptors per node.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.errors import BenchmarkFailed
from benchmarks.requirements import require
from benchmarks.scale import collectives, control_plane, report, state_machine
from benchmarks.scale.cluster import Cluster

PARTS = ("machine", "control", "collectives", "plots")
# Beyond one connection of each node.
SPARE_DESCRIPTORS = 500


def main() -> None:
    options = _parser().parse_args()
    try:
        _run(options)
    except BenchmarkFailed as error:
        sys.exit(f"benchmarks.scale: {error}")


def _run(options: argparse.Namespace) -> None:
    cluster = Cluster(options.nodes, options.ranks_per_node)
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts or PARTS:
        if part == "plots":
            _draw(options.output, options.images or options.output)
            continue
        result = {
            "environment": machine.environment(sys.argv[1:]),
            **_measure(part, cluster, options),
        }
        name = f"scale-{part}.json"
        (options.output / name).write_text(json.dumps(result, indent=1) + "\n")
        print(report.table(part, result), flush=True)


def _measure(part: str, cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    match part:
        case "machine":
            return state_machine.measure(cluster)
        case "control":
            _raise_descriptors(cluster.nodes + SPARE_DESCRIPTORS)
            return control_plane.measure(cluster, options.replicas, options.connections)
    return collectives.measure()


def _draw(results: Path, images: Path) -> None:
    require([], plots=True)
    from benchmarks.scale import plots

    for path in plots.draw(results, images):
        print(path)


def _raise_descriptors(wanted: int) -> None:
    """Processes that are started from here inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted <= hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    elif soft < wanted:
        raise BenchmarkFailed(
            f"{wanted} file descriptors are needed and {hard} allowed (ulimit -n)"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help="see above")
    add = parser.add_argument
    add("--nodes", type=_at_least(3), default=1_000, help="one of them is lost")
    add("--ranks-per-node", type=_at_least(1), default=8)
    add("--replicas", type=_at_least(1), default=1, help="orchestrators on one Redis")
    add("--connections", type=_at_least(1), default=64, help="requests under way at once")
    add("--output", type=Path, default=Path("scale-results"), metavar="FOLDER")
    add("--images", type=Path, metavar="FOLDER", help="of plots, if another one")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} on")
        return int(text)

    return number


if __name__ == "__main__":
    main()
