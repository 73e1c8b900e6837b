"""The workloads of a rank, run once for each contestant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

NO_SYNC = "no_sync"
"""The contestant that does a training step without communication."""


class Workload(Protocol):
    """Something that several contestants do in turn."""

    @property
    def contestants(self) -> Sequence[str]:
        """Their names, in the order of their turns."""

    def reset(self, contestant: str, /) -> None:
        """Prepare the data; not measured."""

    def run(self, contestant: str, ops: int, /) -> list[float]:
        """Do it so often, back to back; the seconds of each."""

    def count_wrong(self, contestant: str, ops: int, /) -> int:
        """Elements of the result of that many ops that are wrong. Every rank asks together."""


def timed(operation: Callable[[], object], ops: int) -> list[float]:
    """The seconds of each of so many operations, back to back."""
    clock = time.perf_counter
    moments = [clock()]
    for _ in range(ops):
        operation()
        moments.append(clock())
    return [after - before for before, after in pairwise(moments)]
