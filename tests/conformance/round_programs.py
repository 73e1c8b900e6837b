"""Programs of ranks: rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import allfold
from tests.support import tensors, wires
from tests.support.cases import digest


def told(result: allfold.RoundResult) -> list[Any]:
    """What all ranks have alike of a result, but for its tensors."""
    return [result.epoch, list(result.weights), list(result.participants)]


def whole_numbers(group: allfold.Group, dtype: str, strategy: str, numel: int) -> list[Any]:
    """A round of whole numbers whose mean is one too: how many elements are wrong, and the rest.

    Rank r has weight r + 1, and all numbers are multiples of the sum of the weights.
    """
    total = group.world_size * (group.world_size + 1) // 2
    given = [_drawn(rank, numel) for rank in range(group.world_size)]
    tensor = tensors.from_integers(given[group.rank] * total, dtype)
    result = group.start_round(tensor, weight=group.rank + 1, strategy=strategy).wait()
    right = sum((rank + 1) * each for rank, each in enumerate(given))
    assert result.tensors is tensor
    wrong = np.count_nonzero(np.array(tensors.to_list(tensor)) != right)
    return [int(wrong), result.took_part, result.bytes, *told(result)]


def _drawn(rank: int, numel: int) -> Any:
    return np.random.default_rng([numel, rank]).integers(-2, 3, numel)


def lossy(group: allfold.Group, wire: str, numel: int, nodes: int) -> list[Any]:
    """A round of random numbers: its digest, its weights, and its error.

    The error is compared with what is allowed: at most 1 is fine.
    """
    given = [wires.values(numel, rank).astype(np.float64) for rank in range(group.world_size)]
    tensor = wires.values(numel, group.rank)
    weight = 1e5 * (group.rank + 1) + 1 / 3
    weights = group.start_round(tensor, weight=weight, wire=wire).wait().weights
    shares = [each * of_rank / sum(weights) for each, of_rank in zip(weights, given, strict=True)]
    allowed = wires.arithmetic("float32", shares)
    if times := wires.roundings("all_reduce", "auto", nodes):
        allowed += wires.bound(wire, shares, times, sum(np.abs(each).max() for each in shares))
    error = np.abs(tensor - np.sum(shares, 0)) / allowed
    return [digest(tensor.tobytes()), list(weights), float(error.max())]


def repeated(group: allfold.Group, wire: str, numel: int, times: int) -> list[float]:
    """The same round with feedback many times: how far one is off, and the mean of all."""
    given = [wires.values(numel, rank).astype(np.float64) for rank in range(group.world_size)]
    total, first = np.zeros(numel), 0.0
    mean = np.zeros(numel)
    for number in range(times):
        tensor = wires.values(numel, group.rank)
        result = group.start_round(
            tensor, weight=group.rank + 1, wire=wire, feedback=f"rounds of {wire}"
        ).wait()
        total += tensor
        mean = np.dot(result.weights, given) / sum(result.weights)
        if not number:
            first = float(np.abs(tensor - mean).max())
    return [first, float(np.abs(total / times - mean).max())]


def changing(
    group: allfold.Group, weights: Sequence[Sequence[float]], strategy: str, series: str
) -> list[float]:
    """Rounds of normal numbers with weights of each: how far each is off at most."""
    drawn, errors = np.random.default_rng(1), []
    for of_ranks in weights:
        given = drawn.normal(size=(group.world_size, 4096)).astype(np.float32)
        tensor = given[group.rank].copy()
        group.start_round(
            tensor, weight=of_ranks[group.rank], wire="int4", feedback=series, strategy=strategy
        ).wait()
        errors.append(float(np.abs(tensor - np.average(given, 0, weights=of_ranks)).max()))
    return errors


def apart(group: allfold.Group, absent: Sequence[int]) -> list[Any]:
    """A round in which some ranks have NaN, and no weight."""
    is_absent = group.rank in absent
    tensor = np.full(5000, np.nan if is_absent else 6.0 + group.rank, np.float32)
    result = group.start_round(tensor, weight=0 if is_absent else 2).wait()
    return [sorted(set(tensor.tolist())), result.took_part, *told(result)]


def in_flight(group: allfold.Group, count: int) -> list[Any]:
    """Many rounds at once, waited for from the last one on, and an all-reduce amid them."""
    given = [np.full(100 * number + 1, number + group.rank, np.float32) for number in range(count)]
    rounds = [group.start_round([each, each.copy()], weight=3) for each in given]
    plain = group.all_reduce(np.ones(3, np.float32))
    results = [each.wait() for each in reversed(rounds)]
    again = rounds[0].wait()
    assert all(each.is_completed() for each in rounds)
    assert again is results[-1]
    assert all(0 <= each.hidden_seconds <= each.seconds < 60 for each in results)
    mean = (group.world_size - 1) / 2
    right = [{number + mean} for number in range(count)]
    found = [{*first.tolist(), *second.tolist()} for first, second in (r.tensors for r in results)]
    return [found[::-1] == right, plain.tolist()]


def dropped(group: allfold.Group) -> bool:
    """The handle is dropped, and the mean comes to the tensor all the same."""
    tensor = np.full(9, group.rank, np.float32)
    group.start_round(tensor)
    group.barrier()
    seen = group.start_round(np.zeros(1, np.float32)).wait()
    return tensor.tolist() == [(group.world_size - 1) / 2] * 9 and seen.took_part


def weightless(group: allfold.Group) -> list[float]:
    """All weights are 0: an error, after which the tensor is as it was, and a round works."""
    tensor = np.arange(4, dtype=np.float32) + group.rank
    try:
        group.start_round(tensor, weight=0).wait()
    except allfold.InvalidArgument as error:
        assert "all weights are 0" in error.message, error.message
    else:
        raise AssertionError("no error")
    kept: list[float] = tensor.tolist()
    group.start_round(tensor).wait()
    return kept


def call(
    group: allfold.Group, dtype: str = "float32", numel: int = 1000, **options: Any
) -> list[float]:
    """A round; where it fails the tensor is as it was."""
    tensor = tensors.from_integers(np.full(numel, group.rank), dtype)
    try:
        group.start_round(tensor, **options).wait()
    except allfold.AllfoldError:
        assert tensors.to_list(tensor) == [group.rank] * numel
        raise
    return tensors.to_list(tensor)[:1]


def mixed(group: allfold.Group, odd: int) -> list[float]:
    """One rank calls another collective than the others, then all call a round."""
    tensor = np.ones(8, np.float32)
    try:
        if group.rank == odd:
            group.all_reduce(tensor, "mean")
        else:
            group.start_round(tensor).wait()
    except allfold.MismatchError as error:
        assert error.details["odd_ranks"] == [odd], error.details
    else:
        raise AssertionError("no error")
    return call(group)


def complex_numbers(group: allfold.Group) -> list[Any]:
    """A round of complex numbers."""
    tensor = np.array([1 + 2j, -3j], np.complex64) * (group.rank + 1)
    group.start_round(tensor, weight=2).wait()
    return [[each.real, each.imag] for each in tensor.tolist()]


def started(group: allfold.Group, numel: int) -> list[Any]:
    """Wait for a round of ones times rank + 1; weights are rank + 1 as well, as it was called."""
    rank = group.rank
    tensor = np.full(numel, rank + 1, np.float32)
    result = group.start_round(tensor, weight=rank + 1, wire="int4", feedback="kept").wait()
    return [sorted(set(tensor.tolist())), *told(result)]


def start_with_quorum(group: allfold.Group, quorum: int, within: float) -> None:
    """Call such a round, and wait for nothing."""
    tensor = np.full(3000, group.rank + 1, np.float32)
    group.start_round(tensor, weight=group.rank + 1, quorum=quorum, within=within)


def with_quorum(
    group: allfold.Group,
    value: float,
    quorum: int,
    within: float,
    weight: float | None = None,
    **options: Any,
) -> list[Any]:
    """A round that waits only for a quorum: the value that it gives, and what is told of it."""
    tensor = np.full(3000, value, np.float32)
    result = group.start_round(
        tensor,
        weight=group.rank + 1 if weight is None else weight,
        quorum=quorum,
        within=within,
        **options,
    ).wait()
    return [sorted(set(tensor.tolist())), result.took_part, result.behind, *told(result)]
