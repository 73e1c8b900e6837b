"""The requirements beside the four packages: what each peer needs, and how to get it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from benchmarks import mpi
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.plan import DEEPSPEED, MPICH, MPIS, OPENMPI, THROUGH_TORCH, TORCH, UCX

_COMPILE_SECONDS, _IMPORT_SECONDS = 600.0, 120.0
_INSTALL = "install with: pip install -c constraints.txt -r requirements-bench.txt"
_INSTALL_DEEPSPEED = "install with: pip install -c constraints.txt -r requirements-deepspeed.txt"
_INSTALL_OPENMPI = "install with: apt-get install openmpi-bin"
_INSTALL_UCX = "install with: pip install --no-deps commux"
_MODULES = {
    **dict.fromkeys((*TORCH, THROUGH_TORCH), ("torch", _INSTALL)),
    **dict.fromkeys(MPIS, ("mpi4py", _INSTALL)),
    UCX: ("commux", _INSTALL_UCX),
    DEEPSPEED: ("deepspeed", _INSTALL_DEEPSPEED),
}
_STARTERS = {MPICH: ("the mpiexec of MPICH", _INSTALL), OPENMPI: ("Open MPI", _INSTALL_OPENMPI)}


class Lack(NamedTuple):
    """Something that a peer needs and cannot have."""

    what: str
    remedy: str
    is_there: bool = False


def require(peers: Sequence[str], *, plots: bool) -> None:
    """``BenchmarkFailed``, with the command that helps, where something is not installed."""
    lacks = [lack for peer in peers if (lack := lacking(peer))]
    if plots and find_spec("matplotlib") is None:
        lacks.append(Lack("matplotlib", _INSTALL))
    if lacks:
        raise BenchmarkFailed(_told(lacks))
    if DEEPSPEED in peers:
        _compile_deepspeed()


def _told(lacks: Sequence[Lack]) -> str:
    remedies = dict.fromkeys((lack.is_there, lack.remedy) for lack in lacks)
    told = []
    for remedy in remedies:
        names = dict.fromkeys(each.what for each in lacks if (each.is_there, each.remedy) == remedy)
        state = "not usable" if remedy[0] else "not installed"
        told.append(f"{state}: {', '.join(names)}; {remedy[1]}")
    return "\n".join(told)


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
    """Return False where a peer lacks something."""
    return lacking(peer) is None


def lacking(peer: str) -> Lack | None:
    """Return what a peer needs and this machine lacks."""
    module = _MODULES.get(peer)
    if module is not None and find_spec(module[0]) is None:
        return Lack(*module)
    if peer in MPIS and mpi.starter(peer) is None:
        return Lack(*_STARTERS[peer])
    if peer == UCX and (said := _import_error("commux")):
        remedy = f"its wheel was built for another torch ({said}); see docs/benchmarks.md"
        return Lack("commux", remedy, is_there=True)
    return None


@cache
def _import_error(module: str) -> str | None:
    """Return why a module cannot be imported, which is tried in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, {module}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_IMPORT_SECONDS,
    )
    said = done.stderr.strip().splitlines()[-1:]
    return "".join(said) or f"status {done.returncode}" if done.returncode else None


def left_out(peer: str) -> str:
    """Return why a peer takes no part."""
    lack = lacking(peer)
    if lack is None:
        return f"{peer} is left out"
    state = "cannot be used" if lack.is_there else "is not installed"
    return f"{peer} is left out, because {lack.what} {state}; {lack.remedy}"
