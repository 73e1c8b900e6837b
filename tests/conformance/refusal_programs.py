"""Programs of ranks: calls that one rank cannot make."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

import allfold
from allfold_core.errors import AllfoldError, ArenaExhausted

_LARGE = 100_000


def refused(group: allfold.Group, how: str) -> None:
    """An all-reduce that is refused on this rank, for one of the reasons that there are."""
    values = np.ones(4, np.float32)
    match how:
        case "an argument":
            values.flags.writeable = False
            group.all_reduce(values)
        case "an option":
            group.all_reduce(values, wire="int3")
        case "an option of a call that is like an earlier one":
            group.all_reduce(values, timeout=0)
        case "a call that would not be waited for":
            group.all_reduce(values, "median", async_op=True)
        case "no memory":
            _without_memory(group, np.ones(_LARGE + 1, np.float32))
        case "no memory for a call that is like an earlier one":
            _without_memory(group, np.ones(_LARGE, np.float32))
        case _:
            raise ValueError(how)


def _without_memory(group: allfold.Group, values: Any) -> None:
    with patch.object(group._channel, "_stage", side_effect=ArenaExhausted("no memory is left")):
        group.all_reduce(values)


def large(group: allfold.Group) -> float:
    """An all-reduce by the long lane."""
    return float(group.all_reduce(np.ones(_LARGE, np.float32))[-1])


def in_flight(
    group: allfold.Group, count: int, numel: int, refusing: dict[str, list[int]]
) -> tuple[list[int], dict[int, str]]:
    """Async all-reduces, of which some ranks cannot call some: the right ones, the error codes.

    Args:
        refusing: by rank, the numbers of those that it cannot call.
    """
    right, errors, works = [], {}, {}
    mine = refusing.get(str(group.rank), [])
    for number in range(count):
        values = np.full(numel, number, np.float32)
        values.flags.writeable = number not in mine
        try:
            works[number] = group.all_reduce(values, async_op=True)
        except AllfoldError as error:
            errors[number] = error.code
    for number, work in works.items():
        try:
            assert (work.wait() == number * group.world_size).all(), number
            right.append(number)
        except AllfoldError as error:
            errors[number] = error.code
    return right, errors


def broadcast(group: allfold.Group, what: dict[str, str]) -> Any:
    """A broadcast without a root.

    Args:
        what: by rank, what it brings: "a tensor", "a list", or "no time" for a tensor.
    """
    brought = {"a tensor": np.ones(3, np.float32), "a list": [1, 2], "no time": np.ones(3)}
    mine = what.get(str(group.rank), "")
    timeout = 0 if mine == "no time" else None
    return group.broadcast(brought.get(mine), timeout=timeout).tolist()
