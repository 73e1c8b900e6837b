"""Programs of ranks: the sparse wire format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import allfold
from tests.support.cases import digest


def whole_numbers(numel: int, rank: int, seq: int) -> np.ndarray[Any, Any]:
    """Return what a rank brings to an op."""
    return np.random.default_rng([numel, rank, seq]).integers(-40, 41, numel).astype(np.float32)


def drained(group: allfold.Group, numel: int, calls: int, most: int) -> list[Any]:
    """Some sums of whole numbers, and then of zeros until nothing comes any more.

    Returns whether all results together are exactly what all ranks have brought, how many calls
    there were, and the digest of all results.
    """
    given, got, results = np.zeros(numel), np.zeros(numel), []
    for seq in range(most):
        tensor = np.zeros(numel, np.float32)
        if seq < calls:
            tensor = whole_numbers(numel, group.rank, seq)
            given += sum(whole_numbers(numel, rank, seq) for rank in range(group.world_size))
        group.all_reduce(tensor, wire="topk", feedback="drained")
        got += tensor
        results.append(tensor.tobytes())
        if seq >= calls and not tensor.any():
            break
    return [bool((got == given).all()), len(results), digest(b"".join(results))]


def mean_of_means(
    group: allfold.Group, numel: int, times: Sequence[int], in_rounds: bool
) -> list[Any]:
    """Of one mean again and again, how far the mean of so many results is off, by times.

    As a share of the mean itself, which in rounds is weighted. With the digest of all results.
    """
    options: dict[str, Any] = {"wire": "topk", "feedback": f"means {in_rounds}"}
    weights = [rank + 1 if in_rounds else 1 for rank in range(group.world_size)]
    values = [
        np.random.default_rng([numel, rank]).normal(size=numel).astype(np.float32)
        for rank in range(group.world_size)
    ]
    right, total = np.average(values, 0, weights), np.zeros(numel)
    errors, results = [], []
    for seq in range(1, max(times) + 1):
        tensor = values[group.rank].copy()
        if in_rounds:
            group.start_round(tensor, weight=weights[group.rank], **options).wait()
        else:
            group.all_reduce(tensor, "mean", **options)
        total += tensor
        results.append(tensor.tobytes())
        if seq in times:
            error = np.linalg.norm(total / seq - right) / np.linalg.norm(right)
            errors.append(float(error))
    return [errors, digest(b"".join(results))]


def reduced(group: allfold.Group, kind: str, dtype: str, numel: int) -> list[Any]:
    """The second result of a reduction: which elements are not 0, and the digest."""
    options: dict[str, Any] = {"wire": "topk", "feedback": f"{kind} {dtype}"}
    for seq in (1, 2):
        tensor = whole_numbers(numel, group.rank, seq).astype(dtype)
        match kind:
            case "all_reduce":
                got = group.all_reduce(tensor, **options)
            case "reduce":
                got = group.reduce(tensor, 1, **options)
            case _:
                got = group.reduce_scatter(tensor, **options)
    return [int(np.count_nonzero(got)), digest(got.tobytes())]


def moved(group: allfold.Group, kind: str) -> None:
    """A collective that only moves."""
    options: dict[str, Any] = {"wire": "topk", "feedback": "moved"}
    tensor = np.ones(10 * group.world_size, np.float32)
    match kind:
        case "broadcast":
            group.broadcast(tensor, 0, **options)
        case "all_gather":
            group.all_gather(tensor, **options)
        case "gather":
            group.gather(tensor, 0, **options)
        case "scatter":
            group.scatter(tensor[:10], tensor if group.rank == 0 else None, 0, **options)
        case _:
            group.all_to_all(tensor, **options)
