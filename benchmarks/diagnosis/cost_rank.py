"""A rank that all-reduces for as long as it is told, and says how long each took."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import allfold

_OPS_OF_A_BATCH = 20


def main() -> None:
    """Serve requests of one line each until standard input ends."""
    told = json.loads(sys.argv[1])
    group = allfold.init(
        group="cost", agent=told["agent"], rank=told["rank"], world_size=told["world"]
    )
    print("[]", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_time(group, request["nbytes"], request["seconds"])), flush=True)


def _time(group: allfold.Group, nbytes: int, seconds: float) -> list[float]:
    random = np.random.default_rng(1)
    tensor = random.integers(0, 2, nbytes // 4).astype(np.float32)
    given, expected = tensor.copy(), tensor * group.world_size
    times: list[float] = []
    until, go_on = time.monotonic() + seconds, True
    while go_on:
        for _ in range(_OPS_OF_A_BATCH):
            began = time.perf_counter()
            result = group.all_reduce(tensor)
            times.append(time.perf_counter() - began)
            if not np.array_equal(result, expected):
                raise AssertionError("a wrong sum")
            tensor[:] = given  # which the result has replaced
        # All ranks end with the same op.
        go_on = bool(group.all_reduce(np.array([time.monotonic() < until], np.float32))[0])
    return times


if __name__ == "__main__":
    main()
