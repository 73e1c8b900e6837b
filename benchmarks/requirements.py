"""The requirements beside the four packages, and the settings of MPICH."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.errors import BenchmarkFailed
from benchmarks.plan import TORCH

_INSTALL = "install with: pip install -r requirements-bench.txt"
_MODULES = {**{peer: ["torch"] for peer in TORCH}, "mpich": ["mpi4py"]}


def require(peers: Sequence[str], *, plots: bool) -> None:
    """``BenchmarkFailed``, with the command that helps, where something is not installed."""
    needed = [name for peer in peers for name in _MODULES.get(peer, [])]
    needed += ["matplotlib"] if plots else []
    missing = [name for name in dict.fromkeys(needed) if find_spec(name) is None]
    if missing:
        raise BenchmarkFailed(f"not installed: {', '.join(missing)}; {_INSTALL}")
    if "mpich" in peers:
        mpiexec()


def mpiexec() -> str:
    """The starter of the ``mpich`` wheel, or else the one of the system."""
    ours = Path(sys.executable).with_name("mpiexec")
    found = str(ours) if ours.exists() else shutil.which("mpiexec")
    if found is None:
        raise BenchmarkFailed(f"there is no mpiexec; {_INSTALL}")
    return found


def mpi_settings(world: int) -> dict[str, str]:
    """Return MPICH's best settings; what is in the environment already wins.

    Its own shared memory spins without ever giving way, so that ranks without a core of their own
    take a whole time slice per message (8 ms for 4 KiB, 4 ranks on 2 cores); that of UCX does not
    (0.03 ms).
    """
    cores = len(os.sched_getaffinity(0))
    return {"MPIR_CVAR_NOLOCAL": "1"} if world > cores else {}
