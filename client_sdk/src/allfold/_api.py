"""The module-level functions: one connection per process, and a default group."""

from __future__ import annotations

import atexit
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from threading import RLock
from typing import Any

import numpy as np

from allfold import _ranks
from allfold._group import AUTO, Group, checked_seconds
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
) -> Group:
    """Take this process's seat in a group, and wait until every rank has taken its own.

    The first group of a process is the default of all functions. Further groups of the same ranks,
    with other names, may be opened beside it.

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

    Raises:
        MultipleRegister: this process is in the group already, or another has this rank.
        RegisterParamsMismatch: the group was opened with other parameters.
        PeerMissing: not all ranks came in time; names the missing ones.
        AgentUnreachable: no agent listens on the socket.
        OrchestratorUnreachable: the agent cannot reach the orchestrator.
        InvalidArgument, RankSourcesContradict: the arguments or variables cannot work.
    """
    global _session
    name = _checked_name(group or os.environ.get("ALLFOLD_GROUP") or DEFAULT_GROUP)
    info = _ranks.resolve(os.environ, rank=rank, world_size=world_size)
    log.info("group '%s': %s", name, info.describe())
    seconds = _seconds("timeout", timeout, "ALLFOLD_TIMEOUT", DEFAULT_TIMEOUT)
    patience = _seconds("init_timeout", init_timeout, "ALLFOLD_INIT_TIMEOUT", DEFAULT_INIT_TIMEOUT)
    overrides = _overrides(strategies)
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
        opened = Group(_session, name, info.rank, info.world_size, _left)
        try:
            opened.join(timeout=seconds, init_timeout=patience, strategies=overrides)
        except BaseException:
            _close_if_idle()
            raise
        _groups[name] = opened
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
    group: Group | None = None,
    timeout: float | None = None,
    strategy: str = AUTO,
    async_op: bool = False,
) -> Any:
    """Fold the tensors of all ranks in place; see :meth:`Group.all_reduce`."""
    return (group or _default()).all_reduce(
        tensor, op, timeout=timeout, strategy=strategy, async_op=async_op
    )


def reduce(
    tensor: Any,
    root: int = 0,
    op: str | ReduceOp = ReduceOp.SUM,
    *,
    group: Group | None = None,
    timeout: float | None = None,
    strategy: str = AUTO,
    async_op: bool = False,
) -> Any:
    """Fold the tensors of all ranks into that of ``root``; see :meth:`Group.reduce`."""
    return (group or _default()).reduce(
        tensor, root, op, timeout=timeout, strategy=strategy, async_op=async_op
    )


def broadcast(
    tensor: Any = None,
    root: int | None = None,
    *,
    group: Group | None = None,
    timeout: float | None = None,
    strategy: str = AUTO,
    async_op: bool = False,
) -> Any:
    """Give every rank the tensor of one; see :meth:`Group.broadcast`."""
    return (group or _default()).broadcast(
        tensor, root, timeout=timeout, strategy=strategy, async_op=async_op
    )


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
    try:
        if _groups:
            shutdown()
    except AllfoldError as error:
        log.warning("could not leave in order at exit: %s", error)
