"""A job of two ranks that reduce all the time, while something is done to their services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from allfold_cluster import Cluster
from tests.support.processes.services import ROOT

_SECONDS = 60.0
# All-reduces until a file is there; then one more group is opened, which needs all services.
_RANK = """
import pathlib, sys
import numpy as np
import allfold
until, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
group = allfold.init(rank=rank, world_size=2, timeout=30.0)
ops, ends = 0, np.zeros(1, np.int64)
while not ends[0]:
    for size in (8, 300_000):
        values = np.full(size, rank + 1, np.int32)
        group.all_reduce(values)
        assert (values == 3).all()
        ops += 1
    ends[0] = until.exists()
    group.all_reduce(ends, "max")
    if ops == 2:
        print("began", flush=True)
group.shutdown()
group = allfold.init(rank=rank, world_size=2, group="again", timeout=30.0)
values = np.ones(4)
group.all_reduce(values)
assert (values == 2).all()
group.shutdown()
print("all well after", ops, "ops", flush=True)
"""


class SteadyJob:
    """The two ranks, one on each node of a stack; they have begun.

    Args:
        until: the file that ends them.

    Attributes:
        ranks: their processes.
    """

    def __init__(self, stack: Cluster, until: Path) -> None:
        self._until = until
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(until), str(rank)],
                env=os.environ | stack.environment(f"node{rank}"),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        assert self.ranks[0].stdout is not None
        said = self.ranks[0].stdout.readline()
        assert said == "began\n", [said, *self.kill()]

    def end(self) -> None:
        """Have the ranks end, and check that no op has failed."""
        self._until.touch()
        for rank in self.ranks:
            out, _ = rank.communicate(timeout=_SECONDS)
            assert "all well after" in out, out
            assert rank.returncode == 0

    def kill(self) -> list[str]:
        """End the ranks in any case; what they said."""
        for rank in self.ranks:
            rank.kill()
        return [rank.communicate(timeout=_SECONDS)[0] for rank in self.ranks]
