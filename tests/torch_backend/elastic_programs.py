"""Programs of ranks that reconfigure their process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from allfold.torch._creation import create
from tests.torch_backend.in_group import TIMEOUT, check, total
from tests.torch_backend.reconfiguring import options


class Member:
    """A rank with a process group that can be reconfigured, and a store that all ranks share."""

    def __init__(self, group: Any, store: Any, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self._store = store

    def publish(self, key: str) -> None:
        self._store.set(f"{key}/{self.rank}", self.group.get_reconfigure_handle())

    def handles(self, key: str, ranks: range | None = None) -> list[str]:
        """The handles of all ranks, once they have come to the same point of the program."""
        self.publish(key)
        return [self._store.get(f"{key}/{rank}").decode() for rank in ranks or range(self.size)]

    def reconfigure(self, uuid: int, handles: list[str] | set[str]) -> None:
        assert self.group.reconfigure(options(uuid, handles)).wait()

    def check_sum(self) -> None:
        """An all-reduce that tells how many ranks there are, and that each has its own number."""
        tensor = torch.full((4,), self.group.rank() + 1.0)
        self.group.allreduce([tensor]).wait()
        check(tensor, [total(self.group.size())] * 4)

    def place(self) -> tuple[int, int]:
        return self.group.rank(), self.group.size()


def elastic(program: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``program(member, ...)`` with a process group that has no group yet."""

    @wraps(program)
    def run(rank: int, world_size: int, agent: str, store: str, **more: Any) -> Any:
        os.environ["ALLFOLD_SOCKET"] = agent
        shared = FileStore(store, world_size)
        group = create(shared, rank, world_size, TIMEOUT, enable_reconfigure=True)
        try:
            return program(Member(group, shared, rank, world_size), **more)
        finally:
            group.shutdown()

    return run


@elastic
def the_same_ranks_again(member: Member) -> list[tuple[int, int]]:
    places = []
    for uuid in (100, -7):
        member.reconfigure(uuid, member.handles(f"at {uuid}"))
        member.check_sum()
        places.append(member.place())
    return places


@elastic
def messages(member: Member) -> None:
    """Each rank sends to the next one of the group, and receives from the one before."""
    member.reconfigure(200, member.handles("init"))
    rank, size = member.place()
    got = torch.zeros(4)
    sent = member.group.send([torch.full((4,), rank + 1.0)], (rank + 1) % size)
    received = member.group.recv([got], (rank - 1) % size)
    sent.wait()
    received.wait()
    check(got, [(rank - 1) % size + 1.0] * 4)


@elastic
def without_one(member: Member, *, out: int) -> tuple[int, int]:
    """All ranks but one go on; that one then joins again, as the last."""
    member.reconfigure(300, member.handles("init"))
    handles = member.handles("opened")
    if member.rank != out:
        member.reconfigure(301, handles[:out] + handles[out + 1 :])
        member.check_sum()
    alone = member.place()
    member.reconfigure(302, set(member.handles("again")))
    member.check_sum()
    if member.rank != out:
        assert member.place() == (alone[0], member.size)
    return alone


@elastic
def alone_together_and_alone(member: Member) -> None:
    for uuid in (400, 500):
        member.reconfigure(uuid + member.rank, [member.group.get_reconfigure_handle()])
        assert member.place() == (0, 1)
        member.check_sum()
        member.reconfigure(uuid + 50, member.handles(f"at {uuid}"))
        assert member.place() == (member.rank, member.size)
        member.check_sum()


@elastic
def split_and_merge(member: Member) -> list[int]:
    """Rank 0 is left out of one of the two groups, so the other one is the larger one."""
    handles = member.handles("init")
    if member.rank:
        member.reconfigure(600, handles[1:])
    else:
        member.reconfigure(601, handles[:1])
    member.check_sum()
    member.reconfigure(602, set(member.handles("merge")))
    member.check_sum()
    return [member.group.rank()]


@elastic
def late(member: Member) -> int:
    """The last ranks come into a group that runs; each rank tells the number that it has then."""
    first = member.size // 2
    handles = member.handles("init")
    if member.rank >= member.size - first:
        member.reconfigure(700, handles[-first:])
        member.check_sum()
    member.reconfigure(701, set(member.handles("all")))
    member.check_sum()
    return int(member.group.rank())


@elastic
def after_an_abort(member: Member) -> str:
    """One waits in a thread for an op that the last rank does not call, as all of them abort."""
    member.reconfigure(800, member.handles("init"))
    errors: list[str] = []
    if member.rank < member.size - 1:
        work = member.group.allreduce([torch.ones(4)])
        waiter = Thread(target=lambda: errors.append(_error_of(work.wait)))
        waiter.start()
        member.group.abort()
        waiter.join(20)
    member.reconfigure(801, member.handles("again"))
    member.check_sum()
    return errors[0] if errors else ""


@elastic
def in_flight(member: Member) -> str:
    """Rank 0 alone reconfigures, without the others, who wait for an op of the old group."""
    member.reconfigure(900, member.handles("init"))
    error = ""
    if member.rank == 0:
        member.reconfigure(901, [member.group.get_reconfigure_handle()])
    else:
        error = _error_of(member.group.allreduce([torch.ones(4)]).wait)
    member.reconfigure(902, member.handles("all"))
    member.check_sum()
    return error


@elastic
def after_a_timeout(member: Member) -> list[str]:
    """The kinds of error before and after, and what the abort hook has seen; rank 0 stays away."""
    member.reconfigure(1000, member.handles("init"))
    member.group.set_timeout(timedelta(seconds=3))  # within which all but rank 0 have called
    hooked = Event()
    member.group.register_abort_hook(0, hooked.set)
    if member.rank:
        work = member.group.allreduce([torch.ones(4)])
        assert hooked.wait(20)
        kinds = [member.group.get_error().name, _error_of(work.wait)]
    else:
        kinds = [member.group.get_error().name, ""]
    member.group.unregister_abort_hook(0)
    member.group.set_timeout(TIMEOUT)
    member.reconfigure(1001, member.handles("again"))
    member.check_sum()
    return [*kinds, member.group.get_error().name]


@elastic
def a_used_uuid(member: Member) -> str:
    """All but the last rank have used it; the group of these goes on."""
    last = member.size - 1
    handles = member.handles("init")
    if member.rank < last:
        member.reconfigure(1100, handles[:last])
    refusal = _error_of(lambda: member.reconfigure(1100, member.handles("used")))
    if member.rank < last:
        member.check_sum()
    member.reconfigure(1101, member.handles("fresh"))
    member.check_sum()
    return refusal


@elastic
def survive(member: Member, *, victim: int, ready: str) -> tuple[str, int, int]:
    """A rank dies while the others wait for it; then they take in a new one, the last of all."""
    if member.rank < member.size - 1:
        member.reconfigure(1200, member.handles("init", range(member.size - 1)))
    if member.rank == victim:
        Path(ready).touch()
        Event().wait()
    error = ""
    if member.rank < member.size - 1:
        error = _error_of(member.group.allreduce([torch.ones(4)]).wait)
        assert member.group.get_error().name == "REMOTE_ERROR"
    member.publish("left")
    left = [rank for rank in range(member.size) if rank != victim]
    handles = [handle for rank in left for handle in member.handles("left", range(rank, rank + 1))]
    member.reconfigure(1201, set(handles))
    member.check_sum()
    return error, *member.place()


def by_torchs_own_functions(rank: int, world_size: int, agent: str, store: str) -> None:
    """Only with torch 2.14 and later."""
    os.environ["ALLFOLD_SOCKET"] = agent
    shared = FileStore(store, world_size)
    dist.init_process_group(
        "allfold",
        store=shared,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        enable_reconfigure=True,  # type: ignore[call-arg]
    )
    functions: Any = dist
    try:
        assert functions._supports_reconfigure()
        own = functions._get_reconfigure_handle()
        functions._reconfigure(rank, [own], timeout=TIMEOUT).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert dist.get_process_group_ranks(None) == [0]
        shared.set(f"handle/{rank}", functions._get_reconfigure_handle())
        handles = [shared.get(f"handle/{each}").decode() for each in range(world_size)]
        functions._reconfigure(50, set(handles), timeout=TIMEOUT).wait()
        assert dist.get_world_size() == world_size
        assert dist.get_process_group_ranks(None) == list(range(world_size))
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, dist.get_rank())
        assert objects == list(range(world_size))
        half = dist.new_group(list(range(world_size // 2)))
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=half)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
