"""The resources that other processes have used, as the kernel counts them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

_CPUCLOCK_SCHED = 2


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that the processes have used since their start, with all threads.

    From their CPU clocks (clock_getcpuclockid(3)): these count nanoseconds, where /proc counts
    ticks of 10 ms.
    """
    return sum(time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED) for pid in pids)


def memory_bytes(pids: Iterable[int]) -> int:
    """Memory of the processes together; pages that they share count once (PSS)."""
    return sum(_bytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in pids)


def peak_bytes(pid: int) -> int:
    """The largest resident set that the process has had; shared pages count in full."""
    return _bytes(Path(f"/proc/{pid}/status"), "VmHWM")


def _bytes(file: Path, name: str) -> int:
    """Return a number of bytes that a file of /proc gives in kB."""
    for line in file.read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) << 10
    raise RuntimeError(f"the kernel does not tell {name} in {file}")
