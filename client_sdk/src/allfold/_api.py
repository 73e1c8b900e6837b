"""The module-level functions: those of :class:`allfold.Group` for a default group."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from allfold._calls.options import Options, RoundOptions, with_checked_names
from allfold._group import Group
from allfold._handles.round import Round
from allfold._process.ranks import RankInfo, SingleProcessWarning, resolve, resolve_elastic
from allfold._process.settings import group_name
from allfold._registry import open_group, registry
from allfold._state.state import State
from allfold_core.group_options import BY_ARGUMENT
from allfold_core.operations import ReduceOp

log = logging.getLogger("allfold")

_ASSUMED = (
    "allfold.init() takes this process for rank 0 of 1, because no launcher has numbered it. Start "
    "the script with 'allfold run' or torchrun (which set RANK and WORLD_SIZE), or set "
    "ALLFOLD_RANK and ALLFOLD_WORLD_SIZE. Where one process is all there is, say so: "
    "init(rank=0, world_size=1)."
)


@with_checked_names
def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    group: str | None = None,
    agent: str | None = None,
    timeout: float | None = None,
    init_timeout: float | None = None,
    strategies: str | Mapping[str, str] | None = None,
    wire: str | None = None,
    on_loss: str | None = None,
    min_world: int | None = None,
    max_world: int | None = None,
    joins: str | None = None,
    traffic: str | None = None,
    group_key: str | None = None,
    state: State | None = None,
) -> Group:
    """Join a group as one of its ranks, and wait until every rank has joined.

    With ``max_world`` the group is *elastic*: it opens when ``world_size`` ranks have come, or
    ``min_world`` of them if nothing numbers them, and other ranks can join it while it runs. A rank
    that joins later gets the next number, and ``init`` returns when the rank is in the group.

    The first group of a process is the default of all functions. Further groups of the same ranks,
    with other names, may be opened beside it; :func:`new_group` makes groups of some of them.

    Args:
        rank: this process, 0 to ``world_size - 1``. Default: what torchrun, Slurm, MPI or
            Kubernetes say in the environment; one log line says which of them did. Where nothing
            says it, this is rank 0 of 1, with a ``SingleProcessWarning``.
        world_size: the number of ranks, over all machines.
        group: its name (``ALLFOLD_GROUP``, else "default"). Jobs that share an orchestrator need
            different ones.
        agent: path of the node agent's socket (``ALLFOLD_SOCKET``).
        timeout: seconds until an op fails, if its call gives none (``ALLFOLD_TIMEOUT``, else 300).
        init_timeout: seconds for all of the registration (``ALLFOLD_INIT_TIMEOUT``, else 60).
        strategies: by kind, as a mapping or as ``"all_reduce=ring;broadcast=tree(4)"``
            (``ALLFOLD_STRATEGY``). Must be the same on every rank.
        wire: how the data of reductions travels between nodes, if a call does not say
            (``ALLFOLD_WIRE``, else "native"). Must be the same on every rank.
        on_loss: what happens to ops interrupted by the loss of a rank. ``"raise"``: they fail with
            the same error on every remaining rank. ``"shrink"``: the remaining ranks repeat them
            where possible, and they succeed with fewer participants (``ALLFOLD_ON_LOSS``, else
            "raise"). Must be the same on every rank.
        min_world: with fewer ranks than this left, the group runs no more ops
            (``ALLFOLD_MIN_WORLD``, else 1). Ops in flight fail; in an elastic group, ops that are
            called after that wait for other ranks to join, for up to ``init_timeout``. Must be the
            same on every rank.
        max_world: the most ranks that the group has at a time (``ALLFOLD_MAX_WORLD``; by default
            nobody joins it while it runs). Must be the same on every rank.
        joins: when ranks may join an elastic group: ``"any"``, between any two ops; ``"commit"``,
            only where all ranks call :meth:`Group.boundary`, as :meth:`allfold.State.commit` does.
            Default: "commit" with a ``state``, else "any". Must be the same on every rank.
        traffic: what the group's bytes give way to on lines between machines. ``"background"``: to
            those of all other groups; ``"normal"``: to those of groups that are ``"high"``
            (``ALLFOLD_TRAFFIC``, else "normal"). Must be the same on every rank.
        group_key: a secret that every rank of the group must have; others cannot join
            (``ALLFOLD_GROUP_KEY``; by default whoever reaches an agent can).
        state: what a rank needs to continue where the others are. When ``init`` returns, all ranks
            have the same state. In a group that opens, that is the state of rank 0, or of a rank
            with more commits; a rank that joins a running group gets the state of the others.

    Raises:
        MultipleRegister: this process is in the group already, or another has this rank.
        RegisterParamsMismatch: the group was opened with other parameters, or another key.
        PeerMissing: not all ranks came in time; names the missing ones.
        AgentUnreachable: no agent listens on the socket.
        OrchestratorUnreachable: the agent cannot reach the orchestrator.
        InvalidArgument, RankSourcesContradict: the arguments or variables cannot work.
    """
    name = group_name(group)
    most = BY_ARGUMENT["max_world"].read(max_world, os.environ, {})
    info = _numbered(rank, world_size, min_world, most)
    log.info("group '%s': %s", name, info.describe())
    if info.is_assumed:
        warnings.warn(_ASSUMED, SingleProcessWarning, stacklevel=3)
    opened = open_group(
        name,
        info.rank,
        info.world_size,
        agent=agent,
        timeout=timeout,
        init_timeout=init_timeout,
        strategies=strategies,
        wire=wire or None,
        on_loss=on_loss,
        min_world=min_world,
        max_world=most,
        joins=joins or ("any" if state is None else "commit"),
        traffic=traffic,
        group_key=group_key,
    )
    if state is not None:
        _share(state, opened)
    return opened


def _numbered(
    rank: int | None, world_size: int | None, min_world: int | None, most: int | None
) -> RankInfo:
    """Return rank and world size: as given, else as a launcher has put them in the environment."""
    if most is None:
        return resolve(os.environ, rank=rank, world_size=world_size)
    opens_with = BY_ARGUMENT["min_world"].read(min_world, os.environ, {"max_world": most})
    return resolve_elastic(os.environ, rank, world_size, opens_with)


def _share(state: State, group: Group) -> None:
    """Give a rank that has joined a group the state of the others; if that fails, it leaves."""
    try:
        group.on_joined = state.meet_newcomers
        if group.epoch:
            state.catch_up(group)
        else:
            state.sync(group)
    except BaseException:
        group.abandon()
        raise


@with_checked_names
def new_group(
    ranks: Sequence[int],
    *,
    group: Group | None = None,
    timeout: float | None = None,
    init_timeout: float | None = None,
    strategies: str | Mapping[str, str] | None = None,
    wire: str | None = None,
    on_loss: str | None = None,
    min_world: int = 1,
    traffic: str | None = None,
) -> Group | None:
    """Make a group of some ranks of another one, numbered from 0 in the order given.

    Called by every rank that is in it, with the same arguments; a rank that is not may call it too,
    and gets ``None`` at once. A rank may be in any number of groups, with ops of all of them in
    flight; :func:`shutdown` with the group leaves it.

    Args:
        ranks: of ``group`` (by default the first group of the process), each once.
        group: the group that they are ranks of.
        timeout, init_timeout, strategies, wire, on_loss, min_world, traffic: as for :func:`init`;
            ``timeout``, ``wire``, ``on_loss`` and ``traffic`` are by default those of ``group``.

    Raises:
        InvalidArgument: ``ranks`` is empty, or names a rank twice or one that does not exist.
        AllfoldError: the errors of :func:`init`.
    """
    parent = _chosen(group)
    members = parent.membership.checked_members(ranks)
    if parent.rank not in members:
        return None
    opened = open_group(
        parent.membership.subgroup_name(members),
        members.index(parent.rank),
        len(members),
        timeout=parent.timeout if timeout is None else timeout,
        init_timeout=init_timeout,
        strategies=strategies,
        wire=wire or parent.wire,
        on_loss=parent.on_loss if on_loss is None else on_loss,
        min_world=min_world,
        traffic=parent.traffic if traffic is None else traffic,
    )
    parent.membership.count_subgroup(members)
    return opened


def shutdown(group: Group | None = None) -> None:
    """Wait for the ops in flight and leave a group, or all of them.

    Raises:
        MultipleUnregister: there is none to leave.
    """
    registry.leave(group)


def is_initialized() -> bool:
    """Return True if this process is in a group."""
    return len(registry) > 0


def _chosen(group: Group | None) -> Group:
    """Return the group that was given, or the first of the process."""
    return group or registry.default()


def rank(group: Group | None = None) -> int:
    """Return this process's rank in a group."""
    return _chosen(group).rank


def world_size(group: Group | None = None) -> int:
    """Return the number of ranks of a group."""
    return _chosen(group).world_size


def all_reduce(
    tensor: Any,
    op: str | ReduceOp = ReduceOp.SUM,
    *,
    factor: float | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Reduce the tensors of all ranks in place; see :meth:`Group.all_reduce`."""
    return _chosen(group).all_reduce(tensor, op, factor=factor, **options)


def start_round(
    tensors: Any,
    op: str = "mean",
    *,
    group: Group | None = None,
    **options: Unpack[RoundOptions],
) -> Round:
    """Start a weighted mean in the background; see :meth:`Group.start_round`."""
    return _chosen(group).start_round(tensors, op, **options)


def reduce(
    tensor: Any,
    root: int = 0,
    op: str | ReduceOp = ReduceOp.SUM,
    *,
    factor: float | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Reduce the tensors of all ranks into that of ``root``; see :meth:`Group.reduce`."""
    return _chosen(group).reduce(tensor, root, op, factor=factor, **options)


def broadcast(
    tensor: Any = None,
    root: int | None = None,
    *,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give every rank the tensor of one; see :meth:`Group.broadcast`."""
    return _chosen(group).broadcast(tensor, root, **options)


def all_gather(
    tensor: Any,
    output: Any = None,
    *,
    counts: Sequence[int] | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give every rank the tensors of all; see :meth:`Group.all_gather`."""
    return _chosen(group).all_gather(tensor, output, counts=counts, **options)


def gather(
    tensor: Any,
    root: int = 0,
    output: Any = None,
    *,
    counts: Sequence[int] | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give ``root`` the tensors of all; see :meth:`Group.gather`."""
    return _chosen(group).gather(tensor, root, output, counts=counts, **options)


def scatter(
    output: Any,
    inputs: Any = None,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give every rank its block of what ``root`` has; see :meth:`Group.scatter`."""
    return _chosen(group).scatter(output, inputs, root, counts=counts, **options)


def reduce_scatter(
    inputs: Any,
    output: Any = None,
    op: str | ReduceOp = ReduceOp.SUM,
    *,
    factor: float | None = None,
    counts: Sequence[int] | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Reduce the tensors of all ranks, each gets its block; see :meth:`Group.reduce_scatter`."""
    return _chosen(group).reduce_scatter(
        inputs, output, op, factor=factor, counts=counts, **options
    )


def all_to_all(
    inputs: Any,
    output: Any = None,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give block j of rank i to rank j; see :meth:`Group.all_to_all`."""
    return _chosen(group).all_to_all(
        inputs, output, send_counts=send_counts, receive_counts=receive_counts, **options
    )


@with_checked_names
def send(
    tensor: Any,
    to: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Send a tensor to one rank; see :meth:`Group.send`."""
    return _chosen(group).send(tensor, to, tag=tag, timeout=timeout, async_op=async_op)


@with_checked_names
def recv(
    tensor: Any,
    source: int | None = None,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Receive a tensor from one rank, or from any; see :meth:`Group.recv`."""
    return _chosen(group).recv(tensor, source, tag=tag, timeout=timeout, async_op=async_op)


@with_checked_names
def barrier(
    *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Wait until every rank has called it; see :meth:`Group.barrier`."""
    return _chosen(group).barrier(timeout=timeout, async_op=async_op)


def empty(
    shape: int | tuple[int, ...],
    dtype: Any = np.float32,
    *,
    device: Any = "cpu",
    group: Group | None = None,
) -> Any:
    """Make an uninitialized tensor in the arena, which collectives need not copy.

    See :meth:`Group.empty`.
    """
    return _chosen(group).empty(shape, dtype, device=device)
