"""``python -m benchmarks``: Allfold against torch's Gloo on this machine, as a table.

Throughput is the tensor's size over the time of an op (nccl-tests' "algbw"). A figure of this
command belongs to the machine it ran on, and to nothing else running there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allfold.cli._stack import LocalStack

RANK_SCRIPT = Path(__file__).with_name("rank.py")
DEADLINE_SECONDS = 300.0
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One shape and size, with the most that Allfold may take of Gloo's time."""

    nodes: int
    ranks_per_node: int
    nbytes: int
    limit: float


CASES = (
    Case(1, 4, 64 * MIB, 1 / 3),
    Case(2, 2, 64 * MIB, 1 / 2),
    Case(1, 2, 4096, 1 / 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="about so long per case")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    results = []
    print(
        f"{'nodes x ranks':>13} {'size':>9} {'allfold':>12} {'gloo':>12} {'ratio':>7} {'target':>7}"
    )
    for case in CASES:
        result = _measure(case, options.seconds)
        results.append(result)
        print(_row(case, result), flush=True)
    print("ratio: Gloo's time over Allfold's; medians, slowest rank, same processes, in turn")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def _row(case: Case, result: dict[str, Any]) -> str:
    ratio = result["gloo"] / result["allfold"]
    shape = f"{case.nodes} x {case.ranks_per_node}"
    size = f"{case.nbytes // MIB} MiB" if case.nbytes >= MIB else f"{case.nbytes // 1024} KiB"
    ours, theirs = (_figure(case, result[name]) for name in ("allfold", "gloo"))
    return f"{shape:>13} {size:>9} {ours:>12} {theirs:>12} {ratio:>6.2f}x {1 / case.limit:>6.1f}x"


def _figure(case: Case, seconds: float) -> str:
    if case.nbytes < MIB:
        return f"{seconds * 1e6:.0f} us"
    return f"{case.nbytes / seconds / 1e9:.2f} GB/s"


def _measure(case: Case, seconds: float) -> dict[str, Any]:
    with LocalStack(case.nodes) as stack:
        ranks = list(_start_ranks(case, stack, seconds))
        try:
            output, _ = ranks[0].communicate(timeout=DEADLINE_SECONDS)
            statuses = [rank.wait(timeout=DEADLINE_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(statuses):
        raise SystemExit(f"{case}: the ranks ended with {statuses}")
    result = json.loads(output)
    return {**vars(case), **result}


def _start_ranks(
    case: Case, stack: LocalStack, seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    world_size = case.nodes * case.ranks_per_node
    port = _free_port()
    for rank in range(world_size):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        yield subprocess.Popen(
            [
                *(sys.executable, str(RANK_SCRIPT), "--port", str(port)),
                *("--sizes", str(case.nbytes), "--seconds", str(seconds)),
            ],
            env=os.environ | stack.environment(rank // case.ranks_per_node) | variables,
            stdout=subprocess.PIPE if rank == 0 else None,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
