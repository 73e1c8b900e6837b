"""A rank of the measurement: all-reduces of one size, one after the other or several in flight.

python -m benchmarks.traffic.rank '{"rank": 0, "group": "front", ...}'
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

import allfold

WORLD = 2
_WARM_UP = 20


@dataclass(frozen=True)
class Orders:
    """The arguments of a rank.

    Attributes:
        traffic: the class of the group.
        nbytes: of the tensor.
        depth: so many ops are in flight at a time.
        seconds: from the first measured op to the last.
        pause: seconds of (emulated) computing between two ops.
        results: the file for the seconds of each op.
    """

    rank: int
    group: str
    traffic: str
    nbytes: int
    depth: int
    seconds: float
    pause: float
    results: str

    def pack(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Run the ops until both ranks want to end, and write how long each took."""
    orders = Orders(**json.loads(sys.argv[1]))
    group = allfold.init(
        rank=orders.rank,
        world_size=WORLD,
        group=orders.group,
        traffic=orders.traffic,
        timeout=120.0,
    )
    Path(orders.results).write_text(json.dumps(_measured(group, orders)))
    allfold.shutdown()


def _measured(group: allfold.Group, orders: Orders) -> list[float]:
    tensors = deque(np.zeros(orders.nbytes // 4, np.float32) for _ in range(orders.depth))
    under_way: deque[tuple[float, allfold.Work]] = deque()
    seconds: list[float] = []
    until = float("inf")
    for number in range(sys.maxsize):
        if len(under_way) == orders.depth:
            began, work = under_way.popleft()
            result = work.wait()
            seconds.append(perf_counter() - began)
            if result[0]:  # a rank wants to end; both see it in the same op
                break
            _compute(orders.pause)
        if number == _WARM_UP * orders.depth:
            seconds.clear()
            begun_file(orders.results).touch()
            until = perf_counter() + orders.seconds
        tensor = tensors[0]
        tensors.rotate(-1)
        tensor[0] = perf_counter() > until
        under_way.append((perf_counter(), group.all_reduce(tensor, async_op=True)))
    for _, work in under_way:
        work.wait()
    return seconds


def begun_file(results: str) -> Path:
    """Return the file that a rank makes when its first measured op begins."""
    return Path(f"{results}.begun")


def _compute(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


if __name__ == "__main__":
    main()
