"""The sources of this process's rank: one reader per launcher, all pure.

How the claims become one answer, and when two of them contradict, is in ``_ranks``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allfold_core.errors import InvalidArgument

Environment = Mapping[str, str]

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers its batch scripts and interactive shells as steps too, from about here on."""


@dataclass(frozen=True, slots=True)
class SourceReading:
    """A number, and the variable or argument that it was read from."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The rank and world size that one source gives.

    Attributes:
        names: the names of the rank and of the world size, for messages about a missing half.
        started_us: set by the launcher in what it starts itself, so it cannot be stale.
        advice: what to do when the claim decides and is not complete.
        weak: does not decide while incomplete, if another source is there.
    """

    source: str
    names: tuple[str, str]
    rank: SourceReading | None = None
    world_size: SourceReading | None = None
    started_us: bool = False
    advice: str = ""
    weak: bool = False

    @property
    def pair(self) -> tuple[int, int] | None:
        """(rank, world size) of a complete claim."""
        if self.rank is None or self.world_size is None:
            return None
        return self.rank.value, self.world_size.value

    @property
    def readings(self) -> list[SourceReading]:
        """The rank and the world size, as far as they are given."""
        return [reading for reading in (self.rank, self.world_size) if reading is not None]

    def __str__(self) -> str:
        """``torchrun: rank 1 of 4 (RANK=1, WORLD_SIZE=4)``."""
        rank = f"rank {self.rank.value}" if self.rank else "any rank"
        size = f" of {self.world_size.value}" if self.world_size else ""
        readings = ", ".join(f"{reading.name}={reading.value}" for reading in self.readings)
        return f"{self.source}: {rank}{size} ({readings})"


def arguments(rank: int | None, world_size: int | None) -> Claim:
    """Read the caller's arguments."""
    names = ("rank", "world_size")
    return Claim("arguments", names, _argument(names[0], rank), _argument(names[1], world_size))


def own_variables(env: Environment) -> Claim:
    """Read ``ALLFOLD_RANK`` and ``ALLFOLD_WORLD_SIZE``."""
    names = ("ALLFOLD_RANK", "ALLFOLD_WORLD_SIZE")
    return Claim("environment", names, _number(env, names[0]), _number(env, names[1]))


def _torchrun(env: Environment) -> Claim | None:
    started_us = bool(env.get("TORCHELASTIC_RUN_ID"))
    return _plain(env, "torchrun", ("RANK", "WORLD_SIZE"), started_us=started_us)


def _open_mpi(env: Environment) -> Claim | None:
    return _plain(env, "Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def _pmi(env: Environment) -> Claim | None:
    return _plain(env, "MPI", ("PMI_RANK", "PMI_SIZE"))


def _slurm(env: Environment) -> Claim | None:
    if not is_in_slurm_step(env):
        return None
    size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return _plain(env, "Slurm", ("SLURM_PROCID", size))


def is_in_slurm_step(env: Environment) -> bool:
    """Return True for a process that srun has started; a batch script inherits the variables."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _leader_worker_set(env: Environment) -> Claim | None:
    return _plain(env, "Kubernetes LeaderWorkerSet", ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"))


def _kubeflow(env: Environment) -> Claim | None:
    """Kubeflow numbers pods; they are ranks where each pod has one process."""
    source, names = "Kubeflow", ("PET_NODE_RANK", "PET_NNODES")
    if not any(env.get(name) for name in names):
        return None
    per_node, nodes = env.get("PET_NPROC_PER_NODE") or "1", env.get("PET_NNODES", "")
    if per_node.strip() != "1" or ":" in nodes:
        what = f"PET_NNODES={nodes}, PET_NPROC_PER_NODE={per_node}"
        advice = f"{source} gives no rank ({what}): start the script with torchrun, which does."
        return Claim(source, names, advice=advice)
    return _plain(env, source, names)


def _indexed_job(env: Environment) -> Claim | None:
    name = "JOB_COMPLETION_INDEX"
    index = _number(env, name)
    if index is None:
        return None
    return Claim(
        "Kubernetes Indexed Job",
        (name, "ALLFOLD_WORLD_SIZE"),
        rank=index,
        advice="Set ALLFOLD_WORLD_SIZE, or the argument world_size, to the Job's completions.",
        weak=True,
    )


READERS: tuple[Callable[[Environment], Claim | None], ...] = (
    _torchrun,
    _open_mpi,
    _pmi,
    _slurm,
    _leader_worker_set,
    _indexed_job,
    _kubeflow,
)


# --- reading


def _plain(
    env: Environment, source: str, names: tuple[str, str], *, started_us: bool = True
) -> Claim | None:
    """A source that has a variable for each of the two numbers."""
    rank, size = _number(env, names[0]), _number(env, names[1])
    if rank is None and size is None:
        return None
    return Claim(source, names, rank, size, started_us)


def _number(env: Environment, name: str) -> SourceReading | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(f"{name} is {text!r}, which is not a whole number from 0 on.")
    return SourceReading(name, int(text))


def _argument(name: str, value: int | None) -> SourceReading | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidArgument(f"{name} is {value!r}, which is not a whole number from 0 on.")
    return SourceReading(name, number)
