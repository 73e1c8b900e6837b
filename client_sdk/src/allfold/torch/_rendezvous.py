"""How the ranks of a torch group find each other, and the Allfold group that they open."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from allfold._registry import open_group
from allfold.torch._process_group import ProcessGroup
from allfold_core.errors import PeerMissing
from allfold_core.verdict import name_ranks

_DEFAULT_PREFIX = "torch"
_PREFIX_KEPT = 90


def create(store: Any, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
    """What torch calls on every rank of a new group.

    ``timeout`` is that of its ops, and how long ranks wait in the store for one that is late. The
    registration, once all are there, has the time that ``ALLFOLD_INIT_TIMEOUT`` says: where no
    agent runs, nobody should have to wait half an hour to hear of it.
    """
    name = _agree_on_name(store, rank, world_size, timeout)
    group = open_group(name, rank, world_size, timeout=timeout.total_seconds())
    return ProcessGroup(group, store)


def _agree_on_name(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that no other group has or had; returns when all ranks are there.

    The same store may serve one group after the other, so each rank counts how often it came.
    """
    visit = store.add(f"allfold/visits/{rank}", 1)
    name_key, arrived_key, all_key = (
        f"allfold/{visit}/{what}" for what in ("name", "arrived", "all")
    )
    if rank == 0:
        prefix = os.environ.get("ALLFOLD_GROUP") or _DEFAULT_PREFIX
        store.set(name_key, f"{prefix[:_PREFIX_KEPT]}-{uuid.uuid4().hex}")
    store.set(f"{arrived_key}/{rank}", "yes")
    if store.add(arrived_key, 1) == world_size:
        store.set(all_key, "yes")
    try:
        store.wait([all_key], timeout)
    except dist.DistStoreError as error:
        missing = [each for each in range(world_size) if not store.check([f"{arrived_key}/{each}"])]
        raise PeerMissing(
            f"{name_ranks(missing)} of {world_size} did not come to the new group within "
            f"{timeout.total_seconds():g} s",
            missing_ranks=missing,
            timeout=timeout.total_seconds(),
        ) from error
    name: bytes = store.get(name_key)
    return name.decode()
