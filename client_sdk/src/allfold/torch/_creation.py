"""The functions that make a process group, one of which torch calls on every rank."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed.distributed_c10d import BackendConfig

from allfold._registry import open_group, registry
from allfold._starting.surroundings import VARIABLE, StartMode, are_wanted, start_mode
from allfold.torch._functional import functional
from allfold.torch._process_group import BACKEND, ProcessGroup
from allfold.torch._rendezvous import Handle, follow, lead, name_prefix
from allfold_core.errors import AgentUnreachable, AllfoldError


def create_with_options(options: Any, _backend_options: Any) -> ProcessGroup:
    """Make what torch asks for; it has more to say than :func:`create` takes."""
    return create(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        enable_reconfigure=getattr(options, "enable_reconfigure", False),  # since torch 2.14
    )


def create(
    store: Any,
    rank: int,
    world_size: int,
    timeout: timedelta,
    *,
    enable_reconfigure: bool = False,
) -> ProcessGroup:
    """Open an Allfold group for a torch group.

    ``timeout`` is that of its ops, and how long ranks wait in the store for one that is late. The
    registration, once all are there, has the time that ``ALLFOLD_INIT_TIMEOUT`` says: where no
    agent runs, nobody should have to wait half an hour to hear of it.

    Args:
        enable_reconfigure: open no group yet: that is done with the first ``reconfigure``.

    Raises:
        PeerMissing: some ranks did not come in time; names them.
        RegisterParamsMismatch: the ranks have been given different world sizes.
        AgentUnreachable: a rank has no agent; says why.
    """
    if rank == 0:
        _warn_of_other_backends()
    functional.install()
    prefix, op_seconds = name_prefix(), timeout.total_seconds()
    if enable_reconfigure:
        handle = Handle(prefix, rank)
        return ProcessGroup(handle, world_size, op_seconds, store, reconfigurable=True)
    name = _meet(store, rank, world_size, timeout)
    # What torch knows of a group's ranks does not change: it cannot go on with some of them.
    group = open_group(name, rank, world_size, agent=registry.agent, timeout=op_seconds, fixed=True)
    handle = Handle(prefix, group.rank)
    made = ProcessGroup(handle, group.world_size, op_seconds, store, reconfigurable=False)
    made.enter(group)
    return made


def _meet(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Meet the other ranks in the store, and at the same services; return the group's name."""
    try:
        if rank:
            return follow(store, rank, world_size, timeout, _take)
        offer, failure = None, None
        try:
            offer = _offer(world_size)
        except AllfoldError as error:
            failure = error
        return lead(store, world_size, timeout, offer, failure)
    except BaseException:
        registry.use(None)
        raise


def _offer(world_size: int) -> dict[str, str] | None:
    """Return how others come to the services of this job, which are started if there are none."""
    if registry.services is None and not registry.is_connected and are_wanted():
        from allfold._starting.offers import started_for_store

        registry.use(started_for_store(world_size))
    services = registry.services
    return None if services is None else services.offer.to_dict()


def _take(offer: dict[str, str] | None) -> None:
    """Come to the services that rank 0 offers, unless this process has an agent already.

    Raises:
        AgentUnreachable: this rank has another agent, or cannot have one.
    """
    if offer is None or registry.is_connected:
        return
    if named := os.environ.get("ALLFOLD_SOCKET"):
        raise AgentUnreachable(
            "rank 0 has started services for this job, as it knows of no agent, but on this rank "
            f"ALLFOLD_SOCKET names one, {named}: set it for all ranks, or for none"
        )
    if start_mode() is StartMode.NEVER:
        raise AgentUnreachable(
            "rank 0 has started services for this job, as it knows of no agent, but on this rank "
            f"{VARIABLE} is never: set that for all ranks, with an agent on each machine, or for "
            "none"
        )
    from allfold._starting.offers import ServicesOffer, taken

    registry.use(taken(ServicesOffer.from_dict(offer)))


def _warn_of_other_backends() -> None:
    """Warn where torch was asked for another backend on some devices.

    torch lets a process group that is written in Python take the place of all backends of its
    group, and C++ backends of its own cannot be made in Python.
    """
    asked = _asked_backends(sys._getframe(1))
    others = {device: name for device, name in asked.items() if name != BACKEND}
    if others:
        listed = ", ".join(f"{device}:{name}" for device, name in others.items())
        warnings.warn(
            f"Allfold serves all devices of this group, also what was to be {listed}: torch cannot "
            f'combine it with other backends. Use init_process_group("{BACKEND}"), and for another '
            "backend a group of its own: new_group(backend=...).",
            stacklevel=2,
        )


def _asked_backends(frame: FrameType | None) -> Mapping[str, str]:
    """The backend of each device that torch was asked for; it keeps that to itself until later."""
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if isinstance(config, BackendConfig):
            return config.get_device_backend_map()
        frame = frame.f_back
    return {}
