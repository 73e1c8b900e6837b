"""Every collective of ``torch.distributed``, with what must come out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.torch_backend.in_group import check, in_group, total

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


@in_group
def all_reduce(rank: int, size: int) -> None:
    mine = rank + 1
    for dtype in DTYPES:
        for op, expected in (
            (dist.ReduceOp.SUM, total(size)),
            (dist.ReduceOp.PRODUCT, math.factorial(size)),
            (dist.ReduceOp.MIN, 1),
            (dist.ReduceOp.MAX, size),
        ):
            tensor = torch.full((3, 5), mine, dtype=dtype)
            dist.all_reduce(tensor, op)
            check(tensor, torch.full((3, 5), expected))
    for op, expected in (
        (dist.ReduceOp.BAND, 0),
        (dist.ReduceOp.BOR, (1 << size) - 1),
        (dist.ReduceOp.BXOR, (1 << size) - 1),
    ):
        tensor = torch.tensor([1 << rank])
        dist.all_reduce(tensor, op)
        check(tensor, [expected])
    average = torch.tensor([float(mine)])
    dist.all_reduce(average, dist.ReduceOp.AVG)
    check(average, [total(size) / size])
    scaled = torch.tensor([float(mine)])
    dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(0.5))
    check(scaled, [total(size) / 2])


@in_group
def tensors_of_every_layout(rank: int, size: int) -> None:
    mine = rank + 1
    scalar = torch.tensor(mine)
    dist.all_reduce(scalar)
    check(scalar, total(size))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    base = torch.zeros(4, 6)
    base[:, ::2] = mine
    dist.all_reduce(base[:, ::2])
    expected = torch.zeros(4, 6)
    expected[:, ::2] = total(size)
    check(base, expected)
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    check(flags, [True, True, False])
    numbers = torch.tensor([mine + mine * 1j], dtype=torch.complex64)
    dist.all_reduce(numbers)
    check(numbers, [total(size) * (1 + 1j)])
    learned = torch.full((2,), float(mine), requires_grad=True)
    dist.all_reduce(learned.detach())
    check(learned.detach(), [total(size)] * 2)


@in_group
def rooted(rank: int, size: int) -> None:
    for root in range(size):
        tensor = torch.full((4,), rank)
        dist.broadcast(tensor, root)
        check(tensor, [root] * 4)
        tensor = torch.full((4,), rank + 1)
        dist.reduce(tensor, root)
        check(tensor, [total(size) if rank == root else rank + 1] * 4)
        blocks = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
        dist.gather(torch.full((2,), rank), blocks if rank == root else None, root)
        if rank == root:
            check(blocks, [[each] * 2 for each in range(size)])
        block = torch.empty(2, dtype=torch.int64)
        whole = [torch.full((2,), 10 * each + root) for each in range(size)]
        dist.scatter(block, whole if rank == root else None, root)
        check(block, [10 * rank + root] * 2)


@in_group
def gathered(rank: int, size: int) -> None:
    everyone = range(size)
    blocks = [torch.empty(2, 3, dtype=torch.int64) for _ in everyone]
    dist.all_gather(blocks, torch.full((2, 3), rank))
    check(blocks, [torch.full((2, 3), each) for each in everyone])
    uneven = [torch.empty(each + 1) for each in everyone]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    check(uneven, [[float(each)] * (each + 1) for each in everyone])
    whole = torch.empty(2 * size, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(whole, torch.full((2,), rank, dtype=torch.bfloat16))
    check(whole, [each for each in everyone for _ in range(2)])
    stacked = torch.empty(size, 2, dtype=torch.uint8)
    dist.all_gather_into_tensor(stacked, torch.full((2,), rank, dtype=torch.uint8))
    check(stacked, [[each] * 2 for each in everyone])
    odd = torch.empty(size, 2, dtype=torch.float8_e4m3fn)
    dist.all_gather_into_tensor(odd, torch.full((2,), rank).to(torch.float8_e4m3fn))
    check(odd.float(), [[each] * 2 for each in everyone])


@in_group
def scattered_sums(rank: int, size: int) -> None:
    mine = rank + 1
    block = torch.empty(2)
    dist.reduce_scatter(block, [torch.full((2,), float(mine * each)) for each in range(size)])
    check(block, [total(size) * rank] * 2)
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((each + 1,), float(mine)) for each in range(size)])
    check(uneven, [total(size)] * (rank + 1))
    whole = torch.arange(2.0 * size) * mine
    dist.reduce_scatter_tensor(block, whole)
    check(block, torch.arange(2.0 * size)[2 * rank : 2 * rank + 2] * total(size))
    dist.reduce_scatter_tensor(block, whole, dist.ReduceOp.AVG)
    check(block, torch.arange(2.0 * size)[2 * rank : 2 * rank + 2] * total(size) / size)


@in_group
def transposed(rank: int, size: int) -> None:
    everyone = range(size)
    whole = torch.empty(size, dtype=torch.int64)
    dist.all_to_all_single(whole, torch.tensor([10 * rank + to for to in everyone]))
    check(whole, [10 * source + rank for source in everyone])
    # Rank r sends r + to rows to rank "to": none of rank 0 to itself.
    rows = torch.full((sum(rank + to for to in everyone), 2), float(rank))
    got = torch.empty(sum(source + rank for source in everyone), 2)
    splits = [rank + other for other in everyone]
    dist.all_to_all_single(got, rows, splits, splits)
    check(got, [[source] * 2 for source in everyone for _ in range(source + rank)])
    outputs = [torch.empty(source + 1, rank + 1) for source in everyone]
    dist.all_to_all(outputs, [torch.full((rank + 1, to + 1), float(rank)) for to in everyone])
    check(outputs, [torch.full((source + 1, rank + 1), source) for source in everyone])


@in_group
def coalesced(rank: int, size: int) -> None:
    mine = rank + 1
    singles = [torch.full((each,), float(mine)) for each in range(1, 4)]
    singles.append(torch.tensor([mine]))
    with _coalescing_manager():
        for tensor in singles:
            dist.all_reduce(tensor)
    check(singles, [torch.full_like(tensor, total(size)) for tensor in singles])
    outputs = [torch.empty(size), torch.empty(size, dtype=torch.int32)]
    with _coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((1,), rank, dtype=output.dtype))
    manager.wait()
    check(outputs, [list(range(size))] * 2)
    blocks = [torch.empty(1), torch.empty(2)]
    with _coalescing_manager():
        for block in blocks:
            dist.reduce_scatter_tensor(block, torch.full((block.numel() * size,), float(mine)))
    check(blocks, [[total(size)], [total(size)] * 2])


def isend(tensor: torch.Tensor, to: int, tag: int = 0) -> dist.Work:
    sending = dist.isend(tensor, to, tag=tag)
    assert sending is not None
    return sending


@in_group
def messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3, dtype=torch.int64)
    sending = isend(torch.full((3,), rank), after, tag=7)
    assert dist.recv(got, before, tag=7) == before
    sending.wait()
    check(got, [before] * 3)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), after),
        dist.P2POp(dist.irecv, other := torch.empty(1), before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    check(other, [before])
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            source = dist.recv(got, None)
            check(got, [source] * 3)
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        dist.send(torch.full((3,), rank), 0)


@in_group
def works(rank: int, size: int) -> None:
    tensors = [torch.full((1000,), float(rank + each)) for each in range(20)]
    running = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert all(isinstance(work, dist.Work) for work in running)
    for each, work in enumerate(running):
        if each % 2:
            assert work.wait()
        else:
            (result,) = work.get_future().wait()
            assert result is tensors[each]
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        check(tensors[each], [sum(range(size)) + each * size] * 1000)
    doubled = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    assert doubled.then(lambda done: done.value()[0] * 2).wait().item() == 2 * size
    for _ in range(50):
        dist.barrier(async_op=True)
    dist.barrier()


@in_group
def a_future_need_not_wait_for_another(rank: int, size: int) -> None:
    """A receive whose message comes last does not hold up what was called after it."""
    peer = rank ^ 1
    got = torch.empty(1)
    receiving = dist.irecv(got, peer)
    assert receiving is not None
    late = receiving.get_future()
    early = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    assert early.wait()[0].item() == size
    assert not late.done()
    dist.barrier()
    sending = isend(torch.tensor([float(rank)]), peer)
    check(late.wait()[0], [peer])
    sending.wait()


@in_group
def groups(rank: int, size: int) -> None:
    """Sub-groups that overlap, with ops of all of them in flight at once."""
    pairs = [dist.new_group([first, (first + 1) % size]) for first in range(size)]
    mine = [(first, group) for first, group in enumerate(pairs) if dist.get_rank(group) >= 0]
    tensors = {first: torch.full((100,), float(rank)) for first, _ in mine}
    running = [dist.all_reduce(tensors[first], group=group, async_op=True) for first, group in mine]
    whole = torch.full((100,), float(rank))
    dist.all_reduce(whole)
    for work in reversed(running):
        work.wait()
    check(whole, [sum(range(size))] * 100)
    for first, _ in mine:
        check(tensors[first], [first + (first + 1) % size] * 100)
    reversed_group = dist.new_group(list(reversed(range(size))))
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, size - 1, group=reversed_group)
    check(tensor, [size - 1])
    assert dist.get_backend(reversed_group) == "allfold"
    for _, group in mine:
        dist.destroy_process_group(group)


@in_group
def unusual_dtypes(rank: int, size: int) -> None:
    """Check that dtypes that cannot be reduced are moved bit by bit, of any strides."""
    for name in (
        "uint16",
        "int4",
        "complex32",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "bits1x8",
        "bits16",
    ):
        dtype = getattr(torch, name)
        bits = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).reshape(2, -1) % 2 + 2 * rank
        given = bits.view(dtype)[:, ::2]
        dist.broadcast(given, size - 1)
        blocks = [torch.empty(2, 6, dtype=dtype) for _ in range(size)]
        dist.all_gather(blocks, given)
        expected = bits % 2 + 2 * (size - 1)
        words = expected.view(_WORDS[dtype.itemsize])[:, ::2]
        for tensor in (given, *blocks):
            check(tensor.view(words.dtype), words)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@in_group
def objects(rank: int, size: int) -> None:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": each, "text": "x" * each} for each in range(size)]
    shared = [f"of {rank}", rank]
    dist.broadcast_object_list(shared, size - 1)
    assert shared == [f"of {size - 1}", size - 1]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {each}" for each in range(size)] if rank == 0 else None)
    assert got == [f"for {rank}"]
    collected = [None] * size if rank == 0 else None
    dist.gather_object(rank, collected)
    assert collected == (list(range(size)) if rank == 0 else None)


def again(**arguments: Any) -> None:
    """The same store serves one default group after the other."""
    for _ in range(3):
        all_reduce_once(**arguments)


@in_group
def all_reduce_once(rank: int, size: int) -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    check(tensor, [size])
