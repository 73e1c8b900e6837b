"""The module-level functions: one connection per process, and a default group."""

from __future__ import annotations

import atexit
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Any, Unpack

import numpy as np

from allfold import _ranks
from allfold._calls import checked_wire
from allfold._group import NATIVE, Group, Options, checked_members, checked_seconds
from allfold._session import Session
from allfold_core.compiler import parse_overrides
from allfold_core.errors import (
    AllfoldError,
    InvalidArgument,
    MultipleRegister,
    MultipleUnregister,
    RegisterNotFirstOperation,
)
from allfold_core.local_wire import default_socket
from allfold_core.operations import ReduceOp

log = logging.getLogger("allfold")

DEFAULT_GROUP = "default"
DEFAULT_TIMEOUT = 300.0
DEFAULT_INIT_TIMEOUT = 60.0
_EXIT_SECONDS = 1.0

# It becomes a part of URLs, where "." and ".." have a meaning of their own.
_GROUP_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")

_lock = RLock()
_session: Session | None = None
_groups: dict[str, Group] = {}


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
) -> Group:
    """Take this process's seat in a group, and wait until every rank has taken its own.

    The first group of a process is the default of all functions. Further groups of the same ranks,
    with other names, may be opened beside it; :func:`new_group` makes groups of some of them.

    Args:
        rank: this process, 0 to ``world_size - 1``. Default: what torchrun, Slurm, MPI or
            Kubernetes say in the environment; one log line says which of them did.
        world_size: the number of ranks, over all machines.
        group: its name (``ALLFOLD_GROUP``, else "default"). Jobs that share an orchestrator need
            different ones.
        agent: path of the node agent's socket (``ALLFOLD_SOCKET``).
        timeout: seconds until an op fails, where it does not say (``ALLFOLD_TIMEOUT``, else 300).
        init_timeout: seconds for all of the registration (``ALLFOLD_INIT_TIMEOUT``, else 60).
        strategies: by kind, as a mapping or as ``"all_reduce=ring;broadcast=tree(4)"``
            (``ALLFOLD_STRATEGY``). Must be the same on every rank.
        wire: how the data of reductions travels between nodes, where a call does not say
            (``ALLFOLD_WIRE``, else "native"). Must be the same on every rank.

    Raises:
        MultipleRegister: this process is in the group already, or another has this rank.
        RegisterParamsMismatch: the group was opened with other parameters.
        PeerMissing: not all ranks came in time; names the missing ones.
        AgentUnreachable: no agent listens on the socket.
        OrchestratorUnreachable: the agent cannot reach the orchestrator.
        InvalidArgument, RankSourcesContradict: the arguments or variables cannot work.
    """
    name = _checked_name(group or os.environ.get("ALLFOLD_GROUP") or DEFAULT_GROUP)
    info = _ranks.resolve(os.environ, rank=rank, world_size=world_size)
    log.info("group '%s': %s", name, info.describe())
    return open_group(
        name,
        info.rank,
        info.world_size,
        agent=agent,
        timeout=timeout,
        init_timeout=init_timeout,
        strategies=strategies,
        wire=wire,
    )


def open_group(
    name: str,
    rank: int,
    world_size: int,
    *,
    agent: str | None = None,
    timeout: float | None = None,
    init_timeout: float | None = None,
    strategies: str | Mapping[str, str] | None = None,
    wire: str | None = None,
) -> Group:
    """Like :func:`init` for a seat that the caller knows, whatever the environment says of ranks.

    For frameworks, which number the ranks of their groups themselves.
    """
    global _session
    seconds = _seconds("timeout", timeout, "ALLFOLD_TIMEOUT", DEFAULT_TIMEOUT)
    patience = _seconds("init_timeout", init_timeout, "ALLFOLD_INIT_TIMEOUT", DEFAULT_INIT_TIMEOUT)
    overrides = _overrides(strategies)
    wire_format = checked_wire(wire or os.environ.get("ALLFOLD_WIRE") or NATIVE)
    with _lock:
        _forget_lost_agent()
        if name in _groups:
            raise MultipleRegister(
                f"this process is rank {_groups[name].rank} of group '{name}' already"
            )
        if _session is None:
            _session = Session(agent or _socket_path(), patience)
        _session.check_process()
        if agent and agent != _session.path:
            raise InvalidArgument(
                f"this process uses the node agent at {_session.path} already, and can use only "
                f"one at a time, not also {agent}; leave its groups first"
            )
        opened = Group(_session, name, rank, world_size, _left, wire_format.label)
        try:
            opened.join(timeout=seconds, init_timeout=patience, strategies=overrides)
        except BaseException:
            _close_if_idle()
            raise
        _groups[name] = opened
    return opened


def new_group(
    ranks: Sequence[int],
    *,
    group: Group | None = None,
    timeout: float | None = None,
    init_timeout: float | None = None,
    strategies: str | Mapping[str, str] | None = None,
    wire: str | None = None,
) -> Group | None:
    """A group of some ranks of another one, numbered from 0 in the order given.

    Called by every rank that is in it, with the same arguments; a rank that is not may call it too,
    and gets ``None`` at once. A rank may be in any number of groups, with ops of all of them in
    flight; :func:`shutdown` with the group leaves it.

    Args:
        ranks: of ``group`` (by default the first group of the process), each once.
        group: the group that they are ranks of.
        timeout, init_timeout, strategies, wire: as for :func:`init`; ``timeout`` and ``wire`` are
            by default those of ``group``.

    Raises:
        InvalidArgument: ``ranks`` is empty, or names a rank twice or one that does not exist.
        The errors of :func:`init`.
    """
    parent = group or _default()
    members = checked_members(parent, ranks)
    if parent.rank not in members:
        return None
    name = parent.name_of_child(members)
    opened = open_group(
        name,
        members.index(parent.rank),
        len(members),
        timeout=parent.timeout if timeout is None else timeout,
        init_timeout=init_timeout,
        strategies=strategies,
        wire=parent.wire if wire is None else wire,
    )
    parent.count_child(members)
    return opened


def shutdown(group: Group | None = None) -> None:
    """Wait for the ops in flight and leave a group, or all of them.

    Raises:
        MultipleUnregister: there is none to leave.
    """
    with _lock:
        leaving = [group] if group is not None else list(_groups.values())
        if not leaving:
            raise MultipleUnregister("this process is in no group; allfold.init comes first")
        failures: list[AllfoldError] = []
        for each in leaving:
            try:
                each.shutdown()
            except AllfoldError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _left(group: Group) -> None:
    """A group was left, by whichever way."""
    with _lock:
        if _groups.get(group.name) is group:
            del _groups[group.name]
        _close_if_idle()


def _forget_lost_agent() -> None:
    """An agent that died took its groups along: they must not stand in the way of new ones."""
    if _session is not None and _session.lost:
        _groups.clear()
        _close_if_idle()


def _close_if_idle() -> None:
    global _session
    if not _groups and _session is not None:
        _session.close()
        _session = None


def _socket_path() -> str:
    given = os.environ.get("ALLFOLD_SOCKET")
    return given or default_socket(os.environ, os.getuid(), tempfile.gettempdir())


def _checked_name(name: str) -> str:
    if not _GROUP_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of a group: it has 1 to 128 letters, digits and . _ -"
        )
    return name


def _seconds(name: str, given: float | None, variable: str, default: float) -> float:
    if given is not None:
        return checked_seconds(name, given)
    return checked_seconds(variable, os.environ.get(variable, default))


def _overrides(strategies: str | Mapping[str, str] | None) -> dict[str, str]:
    if isinstance(strategies, Mapping):
        text = ";".join(f"{kind}={name}" for kind, name in strategies.items())
    else:
        text = strategies if strategies is not None else os.environ.get("ALLFOLD_STRATEGY", "")
    return parse_overrides(text)


def _default() -> Group:
    group = next(iter(_groups.values()), None)
    if group is None:
        raise RegisterNotFirstOperation("allfold.init must be called before any other function")
    return group


def is_initialized() -> bool:
    """Whether this process is in a group."""
    return bool(_groups)


def rank(group: Group | None = None) -> int:
    """This process's rank in a group."""
    return (group or _default()).rank


def world_size(group: Group | None = None) -> int:
    """The number of ranks of a group."""
    return (group or _default()).world_size


def all_reduce(
    tensor: Any,
    op: str | ReduceOp = ReduceOp.SUM,
    *,
    factor: float | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Fold the tensors of all ranks in place; see :meth:`Group.all_reduce`."""
    return (group or _default()).all_reduce(tensor, op, factor=factor, **options)


def reduce(
    tensor: Any,
    root: int = 0,
    op: str | ReduceOp = ReduceOp.SUM,
    *,
    factor: float | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Fold the tensors of all ranks into that of ``root``; see :meth:`Group.reduce`."""
    return (group or _default()).reduce(tensor, root, op, factor=factor, **options)


def broadcast(
    tensor: Any = None,
    root: int | None = None,
    *,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give every rank the tensor of one; see :meth:`Group.broadcast`."""
    return (group or _default()).broadcast(tensor, root, **options)


def all_gather(
    tensor: Any,
    output: Any = None,
    *,
    counts: Sequence[int] | None = None,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Any:
    """Give every rank the tensors of all; see :meth:`Group.all_gather`."""
    return (group or _default()).all_gather(tensor, output, counts=counts, **options)


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
    return (group or _default()).gather(tensor, root, output, counts=counts, **options)


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
    return (group or _default()).scatter(output, inputs, root, counts=counts, **options)


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
    """Fold the tensors of all ranks, each gets its block; see :meth:`Group.reduce_scatter`."""
    return (group or _default()).reduce_scatter(
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
    return (group or _default()).all_to_all(
        inputs, output, send_counts=send_counts, receive_counts=receive_counts, **options
    )


def send(
    tensor: Any,
    to: int,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Give one rank a tensor; see :meth:`Group.send`."""
    return (group or _default()).send(tensor, to, tag=tag, timeout=timeout, async_op=async_op)


def recv(
    tensor: Any,
    source: int | None = None,
    *,
    tag: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Get a tensor of one rank, or of any; see :meth:`Group.recv`."""
    return (group or _default()).recv(tensor, source, tag=tag, timeout=timeout, async_op=async_op)


def barrier(
    *, group: Group | None = None, timeout: float | None = None, async_op: bool = False
) -> Any:
    """Wait until every rank has called it; see :meth:`Group.barrier`."""
    return (group or _default()).barrier(timeout=timeout, async_op=async_op)


def empty(
    shape: int | tuple[int, ...], dtype: Any = np.float32, *, group: Group | None = None
) -> Any:
    """An uninitialized tensor in the arena, which collectives need not copy.

    See :meth:`Group.empty`.
    """
    return (group or _default()).empty(shape, dtype)


@atexit.register
def _leave_at_exit() -> None:
    if _session is None or _session.pid != os.getpid():
        return
    if not all(group.quiesce(_EXIT_SECONDS) for group in list(_groups.values())):
        # Most likely an error is on its way out of the script: it must not wait for others. The
        # agent tells them that this rank is gone.
        log.warning("ops are still in flight at exit; their groups lose this rank")
        _session.close()
        return
    try:
        if _groups:
            shutdown()
    except AllfoldError as error:
        log.warning("could not leave in order at exit: %s", error)
