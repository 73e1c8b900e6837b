"""Functions of torch that serve its own process groups only, extended to those of Allfold.

Each calls what it replaces for all other groups. They reach groups by a name or a class that is
written down in them, or keep the C++ half of a handle whose Python half has the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from allfold.torch._lifecycle import Lifecycle
from allfold.torch._work import Work

_MODULES = (distributed_c10d, dist)


def adapt() -> None:
    """Replace these functions; to be called once in a process."""
    _replace(c10d.Reducer, "_set_forward_pass_work_handle", _keeping_a_future)
    _replace(distributed_c10d, "_maybe_attach_flight_recorder", _recording)
    for module in _MODULES:
        _replace(module, "_set_pg_timeout", _setting_timeouts)
        _replace(module, "monitored_barrier", _monitoring)


def _replace(owner: ModuleType | type, name: str, extended: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, wraps(original)(extended(original)))


def _keeping_a_future(original: Callable[..., None]) -> Callable[..., None]:
    """Give DDP's reducer a handle that needs no Python.

    While ranks join, DDP counts those that are left, drops the handle, and has its reducer wait for
    the count in C++ and read it there, which only handles that are made in C++ can serve.
    """
    made_from: Callable[[Any], dist.Work] = vars(c10d)["_create_work_from_future"]

    def set_forward_pass_work_handle(reducer: Any, work: dist.Work, *more: Any) -> None:
        if isinstance(work, Work):
            work = made_from(work.get_future())
        original(reducer, work, *more)

    return set_forward_pass_work_handle


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    """Leave our groups without torch's flight recorder, which torch 2.15 attaches to new groups.

    It asks the C++ backend of a group for hooks, and fails where there is none, as in groups that
    are written in Python. What torch's recorder would record, agents do, for ``allfold trace``.
    """

    def maybe_attach_flight_recorder(group: dist.ProcessGroup, *more: Any) -> None:
        if _asked(group) is None:
            original(group, *more)

    return maybe_attach_flight_recorder


def _setting_timeouts(original: Callable[..., None]) -> Callable[..., None]:
    def set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        asked = _asked(group)
        if asked is None:
            original(timeout, group)
        else:
            asked.set_timeout(timeout)

    return set_pg_timeout


def _monitoring(original: Callable[..., None]) -> Callable[..., None]:
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        asked = _asked(group)
        if asked is None:
            original(group, timeout, wait_all_ranks)
        else:
            asked.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def _asked(group: Any) -> Any:
    """Return a group, by default the first one, if it is one of Allfold; else ``None``."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return group if isinstance(group, Lifecycle) else None
