"""Programs of ranks: lossy wire formats."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

import allfold
from tests.support import tensors, wires
from tests.support.cases import digest

Row = Sequence[Any]


def run(group: allfold.Group, rows: Sequence[Row], nodes: int, times: int = 0) -> list[list[Any]]:
    """Per (kind, strategy, wire, dtype, numel), what the rank has in the end.

    Its digest, and the error compared with what is allowed: at most 1 is fine. With ``times``, of
    the last of so many calls with error feedback, which may add once more what one has cost.
    """
    found = []
    for row in rows:
        name = f"{row}" if times else None
        found.append([_one(group, nodes, name, *row) for _ in range(times or 1)][-1])
    return found


def _one(
    group: allfold.Group,
    nodes: int,
    feedback: str | None,
    kind: str,
    strategy: str,
    wire: str,
    dtype: str,
    numel: int,
) -> list[Any]:
    own = _tensor(numel, group.rank, dtype)
    given = [_numbers(_tensor(numel, rank, dtype)) for rank in range(group.world_size)]
    options = {"strategy": strategy, "wire": wire, "feedback": feedback}
    got, brought = _call(group, kind, own, given, options)
    if got is None:
        return ["", 0.0]
    times = wires.roundings(kind, strategy, nodes) * (2 if feedback else 1)
    folded = len(brought) > 1
    # A block of elements with one scale may reach into what another rank gets.
    greatest = (sum if folded else max)(np.abs(each).max(initial=0.0) for each in given)
    allowed = wires.bound(wire, brought, times, greatest) if times else np.zeros(len(brought[0]))
    if folded:
        allowed = allowed + wires.arithmetic(dtype, brought)
    error = np.abs(_numbers(got) - np.sum(brought, 0))
    fine = error <= allowed
    ratio = np.divide(error, allowed, where=allowed > 0, out=np.where(fine, 0.0, np.inf))
    return [digest(tensors.to_bytes(got)), float(ratio.max(initial=0.0))]


def _call(
    group: allfold.Group, kind: str, own: Any, given: list[Any], options: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """Return this rank's result, and each rank's part of the sum in it."""
    rank, world, root = group.rank, group.world_size, 1
    numel = len(given[0])
    blocks = [0, *accumulate(1 + numel * (2 * each + 1) // world**2 for each in range(world))]
    blocks = [min(end, numel) for end in blocks[:-1]] + [numel]
    counts = [stop - start for start, stop in pairwise(blocks)]
    mine = slice(blocks[rank], blocks[rank + 1])
    match kind:
        case "all_reduce":
            return group.all_reduce(own, **options), given
        case "reduce":
            got = group.reduce(own, root, **options)
            return (got if rank == root else None), given
        case "broadcast":
            return group.broadcast(own, root, **options), [given[root]]
        case "all_gather":
            return group.all_gather(own, **options), [np.concatenate(given)]
        case "gather":
            return group.gather(own, root, **options), [np.concatenate(given)]
        case "scatter":
            output = own[mine] * 0
            inputs = own if rank == root else None
            return group.scatter(output, inputs, root, counts=counts, **options), [
                given[root][mine]
            ]
        case "reduce_scatter":
            got = group.reduce_scatter(own, counts=counts, **options)
            return got, [each[mine] for each in given]
    received = [counts[rank]] * world
    got = group.all_to_all(own, send_counts=counts, receive_counts=received, **options)
    return got, [np.concatenate([each[mine] for each in given])]


def _tensor(numel: int, rank: int, dtype: str) -> Any:
    drawn = wires.values(numel, rank)
    if dtype in ("float32", "float64"):
        return drawn.astype(dtype)
    import torch

    return torch.from_numpy(drawn).to(getattr(torch, dtype))


def _numbers(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor.astype(np.float64)
    return tensor.double().numpy()


def special(
    group: allfold.Group, wire: str, strategies: Sequence[str], numel: int
) -> list[list[Any]]:
    """All-reduces of ones with a NaN of rank 0, an infinity of the last rank and a huge number.

    (Of 127s in int8 and of 7s in int4, in which these are exact.) Per strategy: the digest, those
    three elements, and where there is something else than a sum.
    """
    found = []
    one = {"int8": 127, "int4": 7}.get(wire, 1)
    for strategy in strategies:
        tensor = np.full(numel, one, np.float32)
        if group.rank == 0:
            tensor[numel // 4] = np.nan
        if group.rank == group.world_size - 1:
            tensor[numel // 2] = -np.inf
        tensor[3 * numel // 4] = 1e30
        group.all_reduce(tensor, wire=wire, strategy=strategy)
        shown = [str(float(tensor[numel * quarter // 4])) for quarter in (1, 2, 3)]
        odd = np.flatnonzero(tensor != one * group.world_size).tolist()
        found.append([digest(tensor.tobytes()), shown, odd])
    return found


def repeated(
    group: allfold.Group, wire: str, strategy: str, times: int, feedback: str | None, nodes: int
) -> list[Any]:
    """The same all-reduce many times: how far the mean of the results is off, and all digests.

    In units of what a single one may be off.
    """
    numel = 3000
    given = [wires.values(numel, rank).astype(np.float64) for rank in range(group.world_size)]
    greatest = sum(np.abs(each).max() for each in given)
    allowed = wires.bound(wire, given, wires.roundings("all_reduce", strategy, nodes), greatest)
    total = np.zeros(numel)
    digests = []
    for _ in range(times):
        tensor = wires.values(numel, group.rank)
        group.all_reduce(tensor, wire=wire, strategy=strategy, feedback=feedback)
        total += tensor
        digests.append(digest(tensor.tobytes()))
    error = np.abs(total / times - np.sum(given, 0))
    return [float((error / allowed).max()), float((error / allowed).mean()), digests]


def series(group: allfold.Group, wire: str) -> list[bool]:
    """Series of one name carry their rounding errors on; other names and shapes begin anew."""

    def reduced(name: str | None, numel: int = 700) -> str:
        tensor = wires.values(numel, group.rank)
        name = name and f"{name} {wire}"
        group.all_reduce(tensor, wire=wire, feedback=name, strategy="ring")
        return digest(tensor.tobytes())

    plain = reduced(None)
    first, second = reduced("a"), reduced("a")
    other = reduced("b")
    reduced("a", 800)
    return [
        first == plain,
        second != first,
        other == first,
        reduced("a") == first,
        reduced(None) == plain,
    ]


def call(group: allfold.Group, dtype: str = "float32", **options: Any) -> list[Any]:
    """An all-reduce of whole numbers; where it fails the tensor is as it was."""
    tensor = tensors.from_integers(np.arange(1000) * 1009, dtype)
    before = tensors.to_bytes(tensor)
    try:
        group.all_reduce(tensor, **options)
    except allfold.AllfoldError:
        assert tensors.to_bytes(tensor) == before
        raise
    return tensors.to_list(tensor)
