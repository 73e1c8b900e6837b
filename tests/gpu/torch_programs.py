"""Programs with torch tensors on a device; run by :mod:`tests.support.processes.rank_worker`.

What must come out is computed by NumPy: :mod:`tests.support.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from math import prod
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

import allfold
from allfold_core.errors import AllfoldError
from tests.conformance import collective_programs
from tests.gpu.devices import lies_in_arena, new_stream, on, path_of, take
from tests.support import reference, tensors
from tests.support.cases import digest
from tests.support.reference import Collective
from tests.torch_backend.in_group import check, in_group, total

PLACES = ("plain", "strided", "odd", "arena", "odd arena")
_SHOWN = 24
_POISON = 0x5A


def run(group: allfold.Group, rows: Sequence[dict[str, Any]], device: str) -> dict[str, Any]:
    """The path of the rank; per case, the digest of what it has in the end and its first bytes."""
    home = take(device, group.rank)
    found = []
    for row in rows:
        call = _Call(group, Collective(**row), home)
        got = getattr(call, call.kind)()
        call.check_surroundings()
        data = b"".join(_bytes(each) for each in got)
        found.append([digest(data), data[:_SHOWN].hex()])
    return {"path": path_of(group, home), "found": found}


class _Call(collective_programs.CollectiveCall):
    """A call whose tensors are on a device, at places that need not be aligned."""

    def __init__(self, group: allfold.Group, case: Collective, device: torch.device) -> None:
        super().__init__(group, case)
        self.kind = case.kind
        self._device = device
        self._around: list[tuple[torch.Tensor, bytes]] = []

    def broadcast(self) -> list[Any]:
        return self._in_place(self._data or self._poison(self._case.nbytes(sum(self._case.rows))))

    def _output(self, shape: collective_programs.Shape) -> torch.Tensor:
        """Full of something that a result is not."""
        nbytes = prod(shape) * reference.itemsize(self._case.dtype)
        return self._made(self._poison(nbytes), shape)

    def _poison(self, nbytes: int) -> bytes:
        return bytes([1 if self._case.dtype == "bool" else _POISON]) * nbytes

    def _made(self, data: bytes, shape: collective_programs.Shape) -> torch.Tensor:
        place = self._case.place
        fresh: torch.Tensor = tensors.from_bytes(data, shape, self._case.dtype, torch=True)
        if place == "plain":
            return fresh.to(self._device)
        if place == "strided":
            base, made = tensors.strided(fresh.to(self._device))
            self._guard(base[..., 1::2])
            return cast(torch.Tensor, made)
        margin, numel = int(place.startswith("odd")), fresh.numel()
        base = self._empty(numel + 2 * margin, fresh.dtype, in_arena=place.endswith("arena"))
        base.view(torch.uint8).zero_()
        made = base[margin : margin + numel]
        made.view(torch.uint8).copy_(fresh.reshape(-1).view(torch.uint8))
        self._guard(base[:margin])
        self._guard(base[margin + numel :])
        return made.view(tuple(shape))

    def _empty(self, numel: int, dtype: torch.dtype, *, in_arena: bool) -> torch.Tensor:
        if not in_arena:
            return torch.empty(numel, dtype=dtype, device=self._device)
        made: torch.Tensor = self._group.empty(numel, dtype, device=self._device)
        assert (made.device, made.dtype) == (self._device, dtype)
        if numel:
            expected = path_of(self._group, self._device) in ("none", "ipc")
            assert lies_in_arena(self._group, made) == expected
        return made

    def _guard(self, tensor: torch.Tensor) -> None:
        self._around.append((tensor, _bytes(tensor)))

    def _check_new(self, got: Any, shape: collective_programs.Shape) -> None:
        super()._check_new(got, shape)
        assert got.device == self._device

    def check_surroundings(self) -> None:
        given = b"".join(_bytes(each) for each in self._inputs)
        assert not self._inputs or given == self._data, "an input has changed"
        for tensor, before in self._around:
            assert _bytes(tensor) == before, "the surroundings have changed"


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements in C order, after what the current stream does with them."""
    return tensors.to_bytes(tensor.cpu())


def in_place(
    group: allfold.Group, kind: str, counts: Sequence[int], device: str, arena: bool
) -> list[float]:
    """A collective whose input is a part of its output, or the other way round; the whole.

    Element k of the whole of rank r is 100 r + k.
    """
    rank, offsets = group.rank, list(accumulate(counts, initial=0))
    home = take(device, rank)
    values = torch.from_numpy(np.arange(offsets[-1], dtype=np.float32) + 100 * rank)
    whole = values.to(home)
    if arena:
        whole = group.empty(len(values), torch.float32, device=home)
        whole.copy_(values)
    mine = whole[offsets[rank] : offsets[rank + 1]]
    match kind:
        case "all_gather":
            group.all_gather(mine, whole, counts=counts)
        case "gather":
            group.gather(mine, 1, whole if rank == 1 else None, counts=counts)
        case "scatter":
            group.scatter(mine, whole if rank == 1 else None, 1, counts=counts)
        case "reduce_scatter":
            group.reduce_scatter(whole, mine, counts=counts)
        case "all_to_all":
            group.all_to_all(whole, whole)
    return tensors.to_list(whole)


# Messages


def messages(
    group: allfold.Group, device: str, dtype: str, numels: Sequence[int]
) -> list[list[str]]:
    """To the next rank and from the one before, all at once, with tags; what came, as hex.

    Every second tensor is strided. The receives are waited for in the opposite order.
    """
    home = take(device, group.rank)
    after = (group.rank + 1) % group.world_size
    before = (group.rank - 1) % group.world_size
    sent, got = [], []
    for tag, numel in enumerate(numels):
        given = _message(group.rank, tag, numel, dtype, home)
        sent.append(group.send(given, after, tag=tag, async_op=True))
        target = _message(99, tag, numel, dtype, home)
        got.append((group.recv(target, before, tag=tag, async_op=True), target))
    for work, _ in reversed(got):
        assert work.wait() == before
    for work in sent:
        work.wait()
    return [[_bytes(target).hex()] for _, target in got]


def message(rank: int, tag: int, numel: int) -> Any:
    """The numbers that a rank sends with a tag."""
    return (np.arange(numel, dtype=np.int64) * 7 + 31 * rank + tag) % 113


def _message(rank: int, tag: int, numel: int, dtype: str, home: torch.device) -> Any:
    made = tensors.from_integers(message(rank, tag, numel), dtype, torch=True).to(home)
    return tensors.strided(made)[1] if tag % 2 else made


def from_anybody(group: allfold.Group, device: str) -> list[list[int]]:
    """Rank 0 gets one message of every other rank: who they came from, and what was in them."""
    home = take(device, group.rank)
    if group.rank:
        group.send(torch.full((3,), group.rank, device=home), 0)
        return []
    found = []
    for _ in range(group.world_size - 1):
        target = torch.full((3,), 77, device=home)
        source = group.recv(target)
        found.append([source, *target.tolist()])
    return sorted(found)


# What is no torch tensor


def arrays(group: allfold.Group) -> list[Any]:
    """An array that is nobody's but Allfold's, seen through torch: its type and its elements."""
    home = take("cuda", group.rank)
    array = group.empty((2, 3), "float32", device=home)
    seen = torch.as_tensor(array, device=home)
    assert lies_in_arena(group, seen)
    seen.copy_(torch.arange(6.0, device=home).reshape(2, 3) + group.rank)
    assert group.all_reduce(array) is array
    return [str(array.dtype), list(array.shape), seen.flatten().tolist()]


def of_cupy(group: allfold.Group) -> list[Any]:
    """CuPy's arrays, on a stream of its own: what is reduced, and what is new."""
    cupy: Any = import_module("cupy")
    with cupy.cuda.Device(take("cuda", group.rank).index), cupy.cuda.Stream(non_blocking=True):
        array = cupy.arange(6, dtype=cupy.float32) + group.rank
        group.all_reduce(array)
        blocks = group.all_gather(cupy.full(2, group.rank, cupy.int16))
        assert isinstance(blocks, cupy.ndarray)
        return [array.tolist(), blocks.tolist()]


# What cannot work


def two_places(group: allfold.Group) -> str:
    """Return the error of a call on tensors of the host and of a GPU, before anything is sent."""
    home = take("cuda", group.rank)
    try:
        group.all_gather(torch.ones(2, device=home), torch.ones(2 * group.world_size))
    except AllfoldError as error:
        return str(error)
    return "nothing"


def mismatch(group: allfold.Group, device: str) -> dict[str, Any]:
    """The last rank brings another shape; the error, the tensor after it, and the next op."""
    home = take(device, group.rank)
    odd = group.rank == group.world_size - 1
    tensor = torch.full((4 if odd else 3,), group.rank + 1.0, device=home)
    found: dict[str, Any] = {"error": "nothing"}
    try:
        group.all_reduce(tensor)
    except AllfoldError as error:
        found["error"] = str(error)
    found["tensor"] = tensor.tolist()
    found["next"] = group.all_reduce(torch.ones(2, device=home)).tolist()
    return found


# torch.distributed


def with_default_device(
    rank: int, module: str, function: str, device: str, **arguments: Any
) -> Any:
    """A program of the CPU's tests whose tensors are made on another device, on a side stream."""
    home = take(device, rank)
    program = getattr(import_module(module), function)
    with home, on(new_stream(home)):
        return program(rank=rank, **arguments)


@in_group
def all_reduce_of_torch(rank: int, size: int) -> None:
    """Every operation that torch has had for long."""
    for op, mine, expected in (
        (dist.ReduceOp.SUM, rank + 1, total(size)),
        (dist.ReduceOp.AVG, rank + 1, total(size) / size),
        (dist.ReduceOp.PRODUCT, 2, 2**size),
        (dist.ReduceOp.MIN, rank + 1, 1),
        (dist.ReduceOp.MAX, rank + 1, size),
        (dist.ReduceOp.BAND, 1 << rank, 0),
        (dist.ReduceOp.BOR, 1 << rank, (1 << size) - 1),
        (dist.ReduceOp.BXOR, 1 << rank, (1 << size) - 1),
    ):
        is_bitwise = op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
        for dtype in (torch.int32,) if is_bitwise else (torch.float32, torch.bfloat16):
            tensor = torch.full((3, 5), mine, dtype=dtype)
            dist.all_reduce(tensor, op)
            check(tensor, torch.full((3, 5), expected))
