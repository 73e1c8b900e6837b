"""A member that opens a group again and again, and does one op of 4 KiB in each.

python -m benchmarks.faults.reform_rank '{"library": "gloo", "seat": 0, ...}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

import allfold
from benchmarks.faults.changes import NUMEL

_SECONDS = timedelta(seconds=120)


def _meet(store: TCPStore, name: str, world: int) -> None:
    """Wait until all members are here."""
    if store.add(f"{name}/count", 1) == world:
        store.set(f"{name}/open", "1")
    store.wait([f"{name}/open"])


def _gloo(store: TCPStore, name: str, seat: int, world: int) -> Callable[[], None]:
    dist.init_process_group(
        "gloo", store=PrefixStore(name, store), rank=seat, world_size=world, timeout=_SECONDS
    )
    tensor = torch.ones(NUMEL)

    def op() -> None:
        dist.all_reduce(tensor)

    return op


def _allfold(_store: TCPStore, name: str, seat: int, world: int) -> Callable[[], None]:
    group = allfold.init(rank=seat, world_size=world, group=name)
    tensor = torch.ones(NUMEL)

    def op() -> None:
        group.all_reduce(tensor)

    return op


def main() -> None:
    """Print the seconds of all rounds: to open, and for the first op."""
    orders = json.loads(sys.argv[1])
    seat, world = orders["seat"], orders["world"]
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", orders["store"], is_master=False, timeout=_SECONDS)
    is_gloo = orders["library"] == "gloo"
    open_group = _gloo if is_gloo else _allfold
    found = []
    for number in range(orders["rounds"] + 1):
        _meet(store, f"begin{number}", world)
        began = monotonic()
        op = open_group(store, f"round{number}", seat, world)
        opened = monotonic()
        op()
        found.append((opened - began, monotonic() - opened))
        _meet(store, f"end{number}", world)
        if is_gloo:
            dist.destroy_process_group()
        else:
            allfold.shutdown()
    print(json.dumps(found[1:]))  # the first one loads what both libraries load once


if __name__ == "__main__":
    main()
