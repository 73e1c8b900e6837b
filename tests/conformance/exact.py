"""Programs of ranks: exact results of any operation, dtype and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

import allfold
from allfold_core.errors import InvalidArgument
from tests.conformance import layouts
from tests.support import tensors
from tests.support.cases import Case, digest, inputs

# Elements of a result that are shown beside its digest.
_SHOWN = 4


def all_reduce_cases(group: allfold.Group, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Per case, the digest of the result and its first elements, for people."""
    return [_all_reduce_case(group, Case(*row)) for row in rows]


def _all_reduce_case(group: allfold.Group, case: Case) -> list[Any]:
    values = inputs(case.op, case.dtype, case.numel, group.rank)
    tensor = tensors.from_integers(values, case.dtype)
    result = group.all_reduce(tensor, case.op, strategy=case.strategy)
    assert result is tensor
    return _result(tensor)


def _result(tensor: Any) -> list[Any]:
    return [digest(tensors.to_bytes(tensor)), tensors.to_list(tensor[:_SHOWN])]


def fold(
    group: allfold.Group,
    values: Sequence[Sequence[float]],
    strategies: Sequence[str],
    *,
    dtype: str = "float32",
    op: str = "sum",
) -> list[str]:
    """All-reduce ``values[rank]`` with each strategy; the bytes of the results, as hex."""
    return [_fold(group, values[group.rank], dtype, op, strategy) for strategy in strategies]


def _fold(group: allfold.Group, values: Sequence[float], dtype: str, op: str, strategy: str) -> str:
    import torch

    tensor = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))
    return tensors.to_bytes(group.all_reduce(tensor, op, strategy=strategy)).hex()


def reduce_cases(group: allfold.Group, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Per (strategy, root, op, dtype, numel), what the rank's tensor holds afterwards."""
    return [_reduce_case(group, *row) for row in rows]


def _reduce_case(
    group: allfold.Group, strategy: str, root: int, op: str, dtype: str, numel: int
) -> list[Any]:
    tensor = tensors.from_integers(inputs(op, dtype, numel, group.rank), dtype)
    group.reduce(tensor, root, op, strategy=strategy)
    return _result(tensor)


def broadcast_cases(group: allfold.Group, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Per (strategy, root, dtype, numel), what the rank's tensor holds afterwards."""
    return [_broadcast_case(group, *row) for row in rows]


def _broadcast_case(
    group: allfold.Group, strategy: str, root: int, dtype: str, numel: int
) -> list[Any]:
    tensor = raw(dtype, numel, group.rank)
    group.broadcast(tensor, root, strategy=strategy)
    return _result(tensor)


def raw(dtype: str, numel: int, seed: int) -> Any:
    """A tensor of random bits: NaNs of all kinds, denormals, negative zeros."""
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, numel * size, np.uint8)
    if dtype != "bfloat16":
        return data.view(dtype)
    import torch

    return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)


def untouched_by_reduce(group: allfold.Group, root: int, strategy: str, arena: bool) -> bool:
    """Tell if a reduction leaves random bits as they are, except at the root."""
    tensor = raw("float32", 1000, group.rank)
    if arena:
        tensor = tensors.in_arena(tensor, group)
    before = tensors.to_bytes(tensor)
    group.reduce(tensor, root, strategy=strategy)
    return tensors.to_bytes(tensor) == before


def broadcast_without_root(
    group: allfold.Group, sources: Sequence[int], shape: Sequence[int], dtype: str, torch: bool
) -> dict[str, Any]:
    """A broadcast in which the ranks in ``sources`` bring a tensor and the others nothing."""
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(tuple(shape))
    # On all ranks: one that has not imported torch gets an array.
    made = tensors.from_integers(values, dtype, torch=torch)
    tensor = made if group.rank in sources else None
    got = group.broadcast(tensor)
    return {
        "same": got is tensor,
        "library": type(got).__module__.partition(".")[0],
        "dtype": str(got.dtype).removeprefix("torch."),
        "shape": list(got.shape),
        "values": tensors.to_list(got),
    }


# Layouts


def through_layouts(group: allfold.Group, names: Sequence[str]) -> None:
    """Every collective on tensors of each layout; the ranks have different layouts in one op."""
    for number in range(len(names)):
        name = names[(number + group.rank) % len(names)]
        root = number % group.world_size
        for kind in ("all_reduce", "reduce", "broadcast"):
            _through_layout(group, name, kind, root)


def _through_layout(group: allfold.Group, name: str, kind: str, root: int) -> None:
    ours, *all_values = [
        inputs("sum", "float32", 24, rank).reshape(layouts.SHAPE).astype(np.float32)
        for rank in (group.rank, *range(group.world_size))
    ]
    base, view, around = layouts.make(group, name, ours)
    options = {} if kind == "all_reduce" else {"root": root}
    result = getattr(group, kind)(view, **options)
    assert result is view
    expected = all_values[root] if kind == "broadcast" else sum(all_values)
    if kind == "reduce" and group.rank != root:
        expected = ours
    got = layouts.as_array(view)
    assert np.array_equal(got, expected), (name, kind, got.tolist())
    assert layouts.fillers(base) == around, (name, kind, "its surroundings have changed")


def of_shape(group: allfold.Group, shape: Sequence[int], torch: bool, arena: bool) -> list[Any]:
    """An all-reduce and a broadcast of a tensor of ones: type, shape, values."""
    tensor = tensors.from_integers(np.ones(tuple(shape), np.int64), "float32", torch=torch)
    if arena:
        tensor = tensors.in_arena(tensor, group)
    assert group.all_reduce(tensor) is tensor
    assert group.broadcast(tensor, root=0) is tensor
    return [list(tensor.shape), tensors.to_list(tensor)]


def refused(group: allfold.Group, what: str) -> None:
    """A call that cannot work, on this rank alone."""
    values = np.ones(4, np.float32)
    match what:
        case "mean of integers":
            group.all_reduce(np.ones(4, np.int64), "mean")
        case "unknown operation":
            group.all_reduce(values, "median")
        case "a list":
            group.all_reduce([1.0, 2.0])
        case "a read-only array":
            values.flags.writeable = False
            group.all_reduce(values)
        case "an array of another byte order":
            group.all_reduce(values.astype(">f4"))
        case "greatest complex number":
            group.all_reduce(values.astype(np.complex64), "max")
        case "elements that share memory":
            import torch

            group.all_reduce(torch.ones(1).expand(4))
        case "array elements that share memory":
            group.all_reduce(np.lib.stride_tricks.as_strided(values, (4,), (0,)))
        case "a root beyond the group":
            group.reduce(values, root=group.world_size)
        case "a negative root":
            group.broadcast(values, root=-1)
        case "a timeout of nothing":
            group.all_reduce(values, timeout=0)
        case "an unknown strategy":
            group.all_reduce(values, strategy="bus")
        case "a strategy that cannot run the kind":
            group.broadcast(values, root=0, strategy="ring")
        case "a strategy without a name":
            group.all_reduce(values, strategy=cast(Any, None))
        case "several strategies":
            group.all_reduce(values, strategy=cast(Any, ["ring"]))
        case "a negative shape":
            group.empty((3, -1))
        case "a shape that is no number":
            group.empty(cast(Any, "ab"))
        case "a shape for which no machine has memory":
            group.empty((1 << 40, 1 << 40))
        case _:
            raise ValueError(what)


def as_advised(group: allfold.Group) -> dict[str, str]:
    """Do what the error of each of these calls advises; return the advice by the call."""
    import torch

    followed: dict[str, str] = {}
    for what, tensor in _unusable(torch):
        try:
            group.all_reduce(tensor)
        except InvalidArgument as error:
            advice = error.message.rpartition("use ")[2]
        names = {"array": tensor, "tensor": tensor, "torch": torch, "numpy": np}
        usable = eval(advice, names)  # our own text
        for each in usable if isinstance(usable, tuple) else [usable]:
            group.all_reduce(each)
        followed[what] = advice
    return followed


def _unusable(torch: Any) -> Iterator[tuple[str, Any]]:
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    yield "read-only", frozen
    yield "byte order", np.ones(4, ">f4")
    one_place = np.lib.stride_tricks.as_strided(np.ones(4), (4,), (0,))
    yield "array elements that share memory", one_place
    yield "elements that share memory", torch.ones(1).expand(4)
    yield "a list", [1.0, 2.0]
    yield "sparse", torch.ones(4).to_sparse()
    yield "without data", torch.ones(4, device="meta")
    yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield "quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def bring(group: allfold.Group, what: str, source: int) -> list[Any]:
    """A broadcast without a root, of a tensor that only ``source`` has: [type, dtype, elements]."""
    import torch

    tensors_to_bring = {
        "uint16": np.arange(3, dtype=np.uint16),
        "datetime": np.array(["2020-01-02"], "datetime64[D]"),
        "complex": np.full(2, 1 + 2j),
        "torch.bool": torch.tensor([True, False]),
        "torch.bfloat16": torch.ones(2, dtype=torch.bfloat16),
        "a list": [1, 2],
        "structured": np.zeros(2, [("a", "i4")]),
    }
    got = group.broadcast(tensors_to_bring[what] if group.rank == source else None)
    return [type(got).__name__, str(got.dtype), str(got.tolist())]
