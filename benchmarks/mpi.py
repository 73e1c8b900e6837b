"""The starters of MPI's ranks, and the settings in which each MPI is at its best."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.plan import MPICH, OPENMPI

_VERSION_SECONDS = 20.0
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
# Open MPI does so by itself, where it can tell.
_YIELDING = ("--mca", "mpi_yield_when_idle", "1")
_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_STARTERS = {
    # The mpiexec of the system may be that of another MPI, so it is taken by a name of its own.
    MPICH: ("mpiexec.mpich", "mpiexec.hydra"),
    OPENMPI: ("mpirun.openmpi", "orterun", "prterun"),
}


def starter(mpi: str) -> str | None:
    """Return the program that starts the ranks of an MPI: MPICH's wheel has one."""
    wheel = Path(sys.executable).with_name("mpiexec")
    if mpi == MPICH and wheel.exists():
        return str(wheel)
    return next(filter(None, map(shutil.which, _STARTERS[mpi])), None)


def start(mpi: str, world: int, *, crowded: bool) -> list[str]:
    """Return the beginning of the command that starts so many ranks.

    Args:
        crowded: there are more ranks than cores.
    """
    command = [starter(mpi) or mpi, "-n", str(world)]
    if mpi == MPICH:
        return command
    # Bound to a core each, the ranks would hold up the agents and the other libraries, too.
    command += ["--bind-to", "none"]
    return [*command, "--oversubscribe", *_YIELDING] if crowded else command


def settings(mpi: str, *, crowded: bool) -> Mapping[str, str]:
    """Return an MPI's best settings; what is in the environment already wins.

    MPICH's own shared memory spins without ever giving way, so that ranks without a core of their
    own take a whole time slice per message (8 ms for 4 KiB, 4 ranks on 2 cores); that of UCX does
    not (0.03 ms).
    """
    if mpi == OPENMPI:
        # mpi4py takes MPICH's wheel by itself, and this one when it is told to.
        return {"MPI4PY_MPIABI": OPENMPI, **dict.fromkeys(_AS_ROOT, "1")}
    return {"MPIR_CVAR_NOLOCAL": "1"} if crowded else {}


def rank() -> int:
    """Return the number of this process, which a starter gave it."""
    return int(next(os.environ[name] for name in _RANK if name in os.environ))


def version() -> str | None:
    """Return the version of Open MPI, which is no Python package."""
    command = starter(OPENMPI)
    if command is None:
        return None
    done = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS
    )
    found = re.search(r"\d+\.\d+\.\d+\S*", done.stdout)
    return found[0] if found else None
