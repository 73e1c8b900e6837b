"""The rank of this process, read from what started it.

:func:`resolve` looks at these sources, in this order:

1. the arguments ``rank`` and ``world_size``,
2. ``ALLFOLD_RANK`` and ``ALLFOLD_WORLD_SIZE`` (1 and 2 may give one half each),
3. torchrun and ``allfold run``: ``RANK``, ``WORLD_SIZE``,
4. Open MPI: ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``,
5. MPICH and others with PMI: ``PMI_RANK``, ``PMI_SIZE``,
6. Slurm, inside an ``srun`` step only: ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` or
   ``SLURM_NTASKS``,
7. Kubernetes: LeaderWorkerSet (``LWS_WORKER_INDEX``, ``LWS_GROUP_SIZE``), an Indexed Job
   (``JOB_COMPLETION_INDEX``; its size must come from 1 or 2), Kubeflow (``PET_NODE_RANK``,
   ``PET_NNODES``, where ``PET_NPROC_PER_NODE`` is 1),
8. nothing at all: rank 0 of 1.

**The first source of which anything is set decides.** It must be complete, except that 1 and 2 may
give the half that it lacks. Half a source behind a complete one says nothing.

**The sources behind it must not contradict it**, that is, must not number this process in another
way. Launchers are nested, so two of them may differ and both be right:

- a source that knows one process only ("rank 0 of 1") contradicts nobody;
- a source behind may number the *nodes*, with k ranks on each: rank r of k·n lies on node r // k;
- what torchrun (recognised by ``TORCHELASTIC_RUN_ID``), MPI or Slurm number, they started
  themselves, so it cannot be stale, and nothing further out is looked at: torchrun wins over
  Slurm, Slurm over Kubernetes. ``RANK`` and ``WORLD_SIZE`` alone may have been exported by hand,
  for this process or for another one, and are compared.

Names that end in ``_PORT`` or ``_HOST`` are never read: Kubernetes sets ``<SERVICE>_PORT`` for
every Service, whatever it is called. An empty variable counts as unset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allfold._process.rank_sources import (
    READERS,
    Claim,
    Environment,
    SourceReading,
    arguments,
    own_variables,
)
from allfold_core.errors import InvalidArgument, RankSourcesContradict

SINGLE_PROCESS = "single process"


class SingleProcessWarning(UserWarning):
    """``init`` found no number of this process anywhere, and took it for the only one."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The number of this process in its job.

    Attributes:
        rank: from 0 to ``world_size - 1``; ``None`` for whichever is free.
        world_size: how many ranks the job has, or begins with.
        source: what decided, with the names that were read.
    """

    rank: int | None
    world_size: int
    source: str

    @property
    def is_assumed(self) -> bool:
        """True where no argument, variable or launcher has numbered this process."""
        return self.source == SINGLE_PROCESS

    def describe(self) -> str:
        """One line for the log: ``rank 1 of 4 (from torchrun: RANK, WORLD_SIZE)``."""
        if self.rank is None:
            return f"one of its ranks; it opens with {self.world_size} ({self.source})"
        origin = self.source if self.is_assumed else f"from {self.source}"
        return f"rank {self.rank} of {self.world_size} ({origin})"


def resolve(
    env: Environment, *, rank: int | None = None, world_size: int | None = None
) -> RankInfo:
    """Find this process's rank; see the module's text for the order and the rules.

    Raises:
        InvalidArgument: a value is no number or out of range, or the deciding source is not
            complete; the message names the variable.
        RankSourcesContradict: two sources number this process differently; both are shown.
    """
    explicit = _explicit(arguments(rank, world_size), own_variables(env))
    launched = [claim for read in READERS if (claim := read(env)) is not None]
    winner = _complete(explicit, launched)
    if winner is None:
        return RankInfo(0, 1, SINGLE_PROCESS)
    pair = _checked_pair(winner)
    _refuse_contradictions(winner, launched)
    names = dict.fromkeys(reading.name for reading in winner.readings)
    return RankInfo(*pair, f"{winner.source}: {', '.join(names)}")


def resolve_elastic(
    env: Environment, rank: int | None, world_size: int | None, opens_with: int
) -> RankInfo:
    """Find this process's rank in a group that others may join while it runs.

    It needs none: then it gets whichever is free, and the group opens with ``world_size`` ranks, or
    with ``opens_with`` where nothing says how many there are.
    """
    if rank is None and world_size is not None:
        return RankInfo(None, world_size, "from world_size")
    info = resolve(env, rank=rank, world_size=world_size)
    return RankInfo(None, opens_with, "from min_world") if info.is_assumed else info


def _explicit(ours: Claim, theirs: Claim) -> Claim | None:
    """Arguments and ``ALLFOLD_*`` together: each half from either."""
    if not ours.readings:
        return theirs if theirs.readings else None
    _refuse_different_halves(ours, theirs)
    rank, size = ours.rank or theirs.rank, ours.world_size or theirs.world_size
    return replace(ours, rank=rank, world_size=size)


def _complete(explicit: Claim | None, launched: Sequence[Claim]) -> Claim | None:
    """The deciding claim with what explicit halves add, or None when no source says anything."""
    if explicit is not None and explicit.pair is not None:
        return explicit
    deciding = _deciding(launched)
    if deciding is None:
        return _alone(explicit) if explicit is not None else None
    return _with_explicit_half(deciding, explicit)


def _deciding(launched: Sequence[Claim]) -> Claim | None:
    firm = [claim for claim in launched if claim.pair is not None or not claim.weak]
    return next(iter([*firm, *launched]), None)


def _alone(explicit: Claim) -> Claim:
    """Half an explicit claim with no launcher beside it: enough for a world of one only."""
    size = explicit.world_size
    if size is not None and size.value == 1:
        return replace(explicit, rank=SourceReading(size.name, 0))
    return explicit


def _with_explicit_half(claim: Claim, explicit: Claim | None) -> Claim:
    """``claim`` with the half that it lacks from ``explicit``; halves that both have must agree."""
    if explicit is None:
        return claim
    _refuse_different_halves(explicit, claim)
    rank, size = claim.rank or explicit.rank, claim.world_size or explicit.world_size
    return replace(claim, rank=rank, world_size=size)


def _half_given(claim: Claim) -> InvalidArgument:
    if claim.rank is None and claim.advice:
        return InvalidArgument(claim.advice, source=claim.source)
    given = claim.readings[0]
    missing = claim.names[1] if claim.rank else claim.names[0]
    advice = claim.advice or f"Set {missing}, or unset {given.name}."
    return InvalidArgument(
        f"{given.name} is {given.value}, but {missing} is missing, so {claim.source} gives no "
        f"rank. {advice}",
        source=claim.source,
        missing=missing,
    )


def _checked_pair(claim: Claim) -> tuple[int, int]:
    rank, size = claim.rank, claim.world_size
    if rank is None or size is None:
        raise _half_given(claim)
    if size.value < 1:
        raise InvalidArgument(f"{size.name} is {size.value}, but a world has at least 1 rank.")
    if rank.value >= size.value:
        raise InvalidArgument(
            f"{rank.name} is {rank.value}, but {size.name} is {size.value}: "
            f"ranks go from 0 to {size.value - 1}."
        )
    return rank.value, size.value


def _refuse_contradictions(winner: Claim, launched: Iterable[Claim]) -> None:
    if winner.started_us:
        return
    for claim in launched:
        if not _compatible(winner.pair, claim.pair):
            raise _contradiction(winner, claim)
        if claim.started_us and claim.pair is not None:
            return


def _refuse_different_halves(first: Claim, second: Claim) -> None:
    for one, other in ((first.rank, second.rank), (first.world_size, second.world_size)):
        if one and other and one.value != other.value:
            raise _contradiction(first, second)


def _compatible(inner: tuple[int, int] | None, outer: tuple[int, int] | None) -> bool:
    """Return True if both can be right: equal, or the outer one numbers one process, or nodes."""
    if inner is None or outer is None or outer[1] <= 1:
        return True
    ranks_per_node, rest = divmod(inner[1], outer[1])
    return rest == 0 and inner[0] // ranks_per_node == outer[0]


def _contradiction(first: Claim, second: Claim) -> RankSourcesContradict:
    return RankSourcesContradict(
        f"Two sources number this process differently. {first}; {second}. "
        "Remove one of them, or make them equal.",
        first=str(first),
        second=str(second),
    )
