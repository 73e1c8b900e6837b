"""Programs of ranks for the tests of metrics."""

from __future__ import annotations

import time

import numpy as np

import allfold


def all_reduces(group: allfold.Group, numel: int, times: int) -> float:
    """So many all-reduces of float32; the first element of the last result."""
    total = 0.0
    for _ in range(times):
        total = float(group.all_reduce(np.ones(numel, np.float32))[0])
    return total


def late_all_reduces(group: allfold.Group, late: int, until: float) -> int:
    """All-reduces of 1 MiB to which one rank comes 0.1 s late; how many there were.

    Args:
        until: seconds since 1970.
    """
    done, goes_on = 0, np.ones(1 << 18, np.float32)
    while goes_on.min() > 0:
        if group.rank == late:
            time.sleep(0.1)
        goes_on[:] = time.time() < until
        goes_on = group.all_reduce(goes_on, "min")
        done += 1
    return done


def round_(group: allfold.Group, quorum: int) -> bool:
    """A weighted mean that does not wait long for more than a quorum; True if this rank took part.

    It is awaited, so the next call is another round.
    """
    tensor = np.ones(3000, np.float32)
    return group.start_round(tensor, quorum=quorum, within=0.05).wait().took_part
