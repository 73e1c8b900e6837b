"""The workloads of a rank, run once for each contestant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.devices import Operation

NO_SYNC = "no_sync"
"""The contestant that does a training step without communication."""


class Workload(Protocol):
    """Something that several contestants do in turn. Ops are numbered from 0 in each turn."""

    @property
    def contestants(self) -> Sequence[str]:
        """Their names, in the order of their turns."""

    def operation(self, contestant: str, /) -> Operation:
        """Return what is timed."""

    def write(self, contestant: str, op: int, /) -> None:
        """Write the data of an op, which are not those of the op before; not timed."""

    def keep(self, contestant: str, op: int, /) -> None:
        """Keep the result of an op after which others come; not timed."""

    def count_wrong(self, contestant: str, ops: int, /) -> int:
        """Elements of the results of a turn of so many ops that are wrong."""


@dataclass
class Times:
    """One rank's share of a turn.

    Attributes:
        calls, returns: of each op, on the clock that all processes of a machine share.
        cpu: CPU-seconds of the process during the ops, all together.
    """

    calls: list[float]
    returns: list[float]
    cpu: float = 0.0


def take_turn(
    workload: Workload, contestant: str, ops: int, compute: Operation | None = None
) -> Times:
    """Do so many ops; between two readings of the clock there is the op and nothing else.

    Args:
        compute: what comes before each op; nothing, if they are to be back to back.
    """
    operation = workload.operation(contestant)
    clock, cpu = time.monotonic, time.process_time
    times = Times([0.0] * ops, [0.0] * ops)
    calls, returns = times.calls, times.returns
    for op in range(ops):
        if compute is not None:
            compute()
        workload.write(contestant, op)
        before = cpu()
        calls[op] = clock()
        operation()
        returns[op] = clock()
        times.cpu += cpu() - before
        if op < ops - 1:  # the last result stays where it is
            workload.keep(contestant, op)
    return times
