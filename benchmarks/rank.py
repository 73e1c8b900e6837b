"""One rank of a side-by-side measurement: Allfold and torch's Gloo in the same processes.

Both do the same all-reduce, in place, on random float32 data, in turn. Every result is checked.
A sample is the mean of some ops back to back, as nccl-tests measures; a sample counts with the
time of its slowest rank, and the figure is the median over the samples.
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

WARM_UP = 2
SMALL = 1 << 20
OPS_PER_SAMPLE = 20
SAMPLES = (7, 60)

Operation = Callable[[torch.Tensor], object]


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
            sys.stdout.flush()
    dist.destroy_process_group()
    allfold.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True, help="of Gloo's store on rank 0")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes per rank")
    parser.add_argument("--seconds", type=float, required=True, help="about so long per size")
    return parser.parse_args()


def _compare(nbytes: int, seconds: float) -> dict[str, float]:
    numel = nbytes // 4
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    source = torch.rand(numel, generator=generator)
    total = source.clone()
    dist.all_reduce(total)
    shared, plain = allfold.empty(numel, torch.float32), torch.empty(numel)
    ops = OPS_PER_SAMPLE if nbytes <= SMALL else 1

    def pair() -> tuple[float, float]:
        ours = _sample(allfold.all_reduce, shared, source, total, ops)
        return ours, _sample(dist.all_reduce, plain, source, total, ops)

    for _ in range(WARM_UP):
        pair()
    count = torch.tensor([_affordable(seconds, pair)])
    dist.broadcast(count, 0)
    times = torch.tensor([pair() for _ in range(int(count))], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    ours, theirs = (statistics.median(column) for column in times.T.tolist())
    return {"bytes": nbytes, "samples": int(count), "ops": ops, "allfold": ours, "gloo": theirs}


def _affordable(seconds: float, pair: Callable[[], object]) -> int:
    start = perf_counter()
    pair()
    fewest, most = SAMPLES
    return max(fewest, min(most, int(seconds / (perf_counter() - start))))


def _sample(
    operation: Operation, tensor: torch.Tensor, source: torch.Tensor, total: torch.Tensor, ops: int
) -> float:
    """Seconds per op. Each op but the first multiplies the sum by the world size."""
    tensor.copy_(source)
    dist.barrier()
    start = perf_counter()
    for _ in range(ops):
        operation(tensor)
    took = (perf_counter() - start) / ops
    tensor /= float(dist.get_world_size()) ** (ops - 1)
    torch.testing.assert_close(tensor, total, rtol=1e-4, atol=1e-5)
    return took


if __name__ == "__main__":
    main()
