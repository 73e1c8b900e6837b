"""Processes that keep CPUs busy, for what shares a machine with them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from allfold_cluster.processes import Child, stop_all

_BURN = "while True: pass"


def start_burners(count: int) -> list[Child]:
    """Start so many processes that never sleep."""
    return [
        Child(f"burner {number}", [sys.executable, "-c", _BURN], env=os.environ)
        for number in range(count)
    ]


def end_burners(burners: Sequence[Child]) -> None:
    """Kill them."""
    for each in burners:
        each.signal(signal.SIGKILL)
    stop_all(burners)
