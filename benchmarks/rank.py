"""One rank of a side-by-side measurement: Allfold and torch's Gloo in the same processes.

Both do the same all-reduce in turn, in place, on random float32 data. Every result is checked.
An iteration's time is that of the slowest rank; the figure is the median over iterations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

import allfold

WARM_UP = 3


def main() -> None:
    options = _options()
    group = allfold.init(timeout=120)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=120),
    )
    for size in options.sizes:
        result = _compare(size, options.seconds)
        if group.rank == 0:
            sys.stdout.write(json.dumps(result) + "\n")
    dist.destroy_process_group()
    allfold.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True, help="of Gloo's store on rank 0")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes per rank")
    parser.add_argument("--seconds", type=float, default=4.0, help="about so long per size")
    return parser.parse_args()


def _compare(nbytes: int, seconds: float) -> dict[str, float]:
    numel = nbytes // 4
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    source = torch.rand(numel, generator=generator)
    expected = source.clone()
    dist.all_reduce(expected)
    shared = allfold.empty(numel, torch.float32)
    plain = torch.empty(numel)

    def run(operation: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
        tensor.copy_(source)
        dist.barrier()
        start = perf_counter()
        operation(tensor)
        took = perf_counter() - start
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)
        return took

    def pair() -> tuple[float, float]:
        return run(allfold.all_reduce, shared), run(dist.all_reduce, plain)

    for _ in range(WARM_UP):
        pair()
    start = perf_counter()
    pair()
    iterations = torch.tensor([max(5, min(400, int(seconds / (perf_counter() - start))))])
    dist.broadcast(iterations, 0)
    times = torch.tensor([pair() for _ in range(int(iterations))], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    ours, theirs = (statistics.median(column.tolist()) for column in times.T)
    return {"bytes": nbytes, "iterations": int(iterations), "allfold": ours, "gloo": theirs}


if __name__ == "__main__":
    main()
