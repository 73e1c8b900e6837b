"""A rank of Gloo or of torchft in a measurement: all-reduces of 4 KiB, one after the other.

python -m benchmarks.faults.torch_ranks '{"library": "gloo", "seat": 0, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.faults.changes import NUMEL, ChangeLog

_STORE_SECONDS = 120.0


@dataclass(frozen=True)
class TorchOrders:
    """The arguments of a rank.

    Attributes:
        store: port of a TCPStore that outlives all ranks.
        lighthouse: address of torchft's.
        timeout: of an op, in seconds.
    """

    library: str
    seat: int
    world: int
    store: int
    lighthouse: str
    timeout: float
    log: str


def gloo(orders: TorchOrders, log: ChangeLog) -> None:
    """Do ops; after an error, in a new group of those who are left.

    Gloo has no membership: who is left is told by the one who kills, in no time. ``left/1`` of the
    store has the seats of the second group, and so on.
    """
    store = TCPStore(
        "127.0.0.1", orders.store, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS)
    )
    seats = list(range(orders.world))
    for generation in count():
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(generation), store),
            rank=seats.index(orders.seat),
            world_size=len(seats),
            timeout=timedelta(seconds=orders.timeout),
        )
        _until_an_error(orders, log, generation << 32)
        dist.destroy_process_group()
        seats = json.loads(store.get(f"left/{generation + 1}"))


def _until_an_error(orders: TorchOrders, log: ChangeLog, first: int) -> None:
    for number in count(first):
        tensor = torch.full((NUMEL,), float(1 << orders.seat))
        called = monotonic()
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            log.note(number, called, 0, error)
            return
        log.note(number, called, int(tensor[0]))


def torchft(orders: TorchOrders, log: ChangeLog) -> None:
    """Do steps of one all-reduce: each with a quorum before it, and a vote after it."""
    from torchft import Manager

    # Each replica has one rank, and a store of its own.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=_group_of(orders),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=1,
        timeout=timedelta(seconds=orders.timeout),
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=orders.lighthouse,
        replica_id=f"seat{orders.seat}",
        hostname="127.0.0.1",
    )
    while True:
        tensor = torch.full((NUMEL,), float(1 << orders.seat))
        called, step = monotonic(), manager.current_step()
        manager.start_quorum()
        # It divides by the number of participants whatever it is asked for.
        manager.allreduce(tensor).wait()
        if manager.should_commit():
            mask = round(float(tensor[0]) * manager.num_participants())
            log.note(step, called, mask)
        else:
            log.note(step, called, 0, RuntimeError(str(manager.errored())))


def _group_of(orders: TorchOrders) -> Any:
    timeout = timedelta(seconds=orders.timeout)
    if orders.library == "torchft+allfold":
        from allfold.torchft import ProcessGroupAllfold

        return ProcessGroupAllfold(timeout)
    from torchft import ProcessGroupGloo

    return ProcessGroupGloo(timeout=timeout)


def main() -> None:
    """Do ops until this process is killed."""
    orders = TorchOrders(**json.loads(sys.argv[1]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    log = ChangeLog(Path(orders.log))
    (gloo if orders.library == "gloo" else torchft)(orders, log)


if __name__ == "__main__":
    main()
