"""What ranks run in the tests of metrics."""

from __future__ import annotations

import numpy as np

import allfold


def all_reduces(group: allfold.Group, numel: int, times: int) -> float:
    """So many all-reduces of float32; the first element of the last result."""
    total = 0.0
    for _ in range(times):
        total = float(group.all_reduce(np.ones(numel, np.float32))[0])
    return total
