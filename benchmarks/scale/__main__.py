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
import os
import platform
import resource
from pathlib import Path
from typing import Any

from benchmarks.scale import collectives, control_plane, report, state_machine
from benchmarks.scale.cluster import Cluster

PARTS = ("machine", "control", "collectives", "plots")
# Beyond one connection of each node.
SPARE_DESCRIPTORS = 500


def main() -> None:
    options = _parser().parse_args()
    cluster = Cluster(options.nodes, options.ranks_per_node)
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts or PARTS:
        if part == "plots":
            _draw(options.output, options.images or options.output)
            continue
        result = {"environment": _environment(), **_measure(part, cluster, options)}
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
    try:
        from benchmarks.scale import plots
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib (pip install matplotlib): {error}") from error
    for path in plots.draw(results, images):
        print(path)


def _raise_descriptors(wanted: int) -> None:
    """Processes that are started from here inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted <= hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    elif soft < wanted:
        raise SystemExit(f"{wanted} file descriptors are needed and {hard} allowed (ulimit -n)")


def _environment() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help="see above")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1, help="orchestrators on one Redis")
    parser.add_argument("--connections", type=int, default=64, help="requests under way at once")
    parser.add_argument("--output", type=Path, default=Path("scale-results"), metavar="FOLDER")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="of plots, if another one")
    return parser


if __name__ == "__main__":
    main()
