"""The requirements beside the four packages, and the settings of MPICH."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.plan import DEEPSPEED, MPICH, THROUGH_TORCH, TORCH

_INSTALL = "install with: pip install -c constraints.txt -r requirements-bench.txt"
_COMPILE_SECONDS = 600.0
_INSTALL_DEEPSPEED = "install with: pip install -c constraints.txt -r requirements-deepspeed.txt"
_MODULES = {
    **dict.fromkeys((*TORCH, THROUGH_TORCH), "torch"),
    MPICH: "mpi4py",
    DEEPSPEED: "deepspeed",
}


def require(peers: Sequence[str], *, plots: bool) -> None:
    """``BenchmarkFailed``, with the command that helps, where something is not installed."""
    missing = list(dict.fromkeys(_MODULES[peer] for peer in peers if not is_installed(peer)))
    missing += ["matplotlib"] if plots and find_spec("matplotlib") is None else []
    if missing:
        install = _INSTALL_DEEPSPEED if missing == ["deepspeed"] else _INSTALL
        raise BenchmarkFailed(f"not installed: {', '.join(missing)}; {install}")
    if MPICH in peers:
        mpiexec()
    if DEEPSPEED in peers:
        _compile_deepspeed()


def _compile_deepspeed() -> None:
    """Once, before the ranks need it; later calls find it done."""
    command = python("benchmarks.libraries.deepspeed")
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=_COMPILE_SECONDS
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise BenchmarkFailed(
            f"DeepSpeed's op was not compiled, which takes g++ and ninja: {''.join(said)} "
            f"({' '.join(command)} shows all); --peers leaves it out"
        )


def is_installed(peer: str) -> bool:
    """Return False where the Python package of a peer is missing."""
    return peer not in _MODULES or find_spec(_MODULES[peer]) is not None


def left_out(peer: str) -> str:
    """Return why an optional peer takes no part."""
    return f"{peer} is left out, because it is not installed; {_INSTALL_DEEPSPEED}"


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
