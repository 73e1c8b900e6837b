"""Programs of ranks: the wire format of a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

import allfold
from tests.support import wires
from tests.support.processes import rank_worker

Array = np.ndarray[Any, Any]

_FORMATS = ("native", *(wire for wire in wires.LOSSY if wire != "float32"))
_NUMEL = 1200
_ROOT = 1


def open_group(environment: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """``allfold.init`` where the environment says something."""
    with patch.dict(os.environ, environment):
        return rank_worker.open_group(**options)


def found(group: allfold.Group) -> dict[str, Any]:
    """Return a group's behaviour if a call does not say in which format its data travels.

    Per kind of reduction, the formats that give the same bits if they are asked for; and by name,
    whether all that must not be rounded is exact.
    """
    return {
        "wire": group.wire,
        "reductions": {kind: _formats_like_none(group, kind) for kind in _REDUCTIONS},
        "moves": {
            kind: bool((_moved(group, kind) == _given(group, kind)).all()) for kind in _MOVES
        },
        "integers": {dtype: _is_sum_exact(group, dtype) for dtype in ("int8", "int64")},
        "max of float16": _is_max_exact(group),
    }


def right_for(wire: str) -> dict[str, Any]:
    """Return the right result of :func:`found` on several nodes."""
    return {
        "wire": wire,
        "reductions": {kind: [wire] for kind in _REDUCTIONS},
        "moves": dict.fromkeys(_MOVES, True),
        "integers": {"int8": True, "int64": True},
        "max of float16": True,
    }


def found_in_child(
    group: allfold.Group,
    members: Sequence[int],
    environment: Mapping[str, str],
    generations: int = 1,
    **options: Any,
) -> dict[str, Any] | None:
    """The same of a group of some ranks; or of the group of all ranks of it, and so on."""
    made: allfold.Group | None = group
    opened = []
    with patch.dict(os.environ, environment):
        for generation in range(generations):
            assert made is not None
            made = allfold.new_group(
                range(made.world_size) if generation else members,
                group=made,
                **({} if generation else options),
            )
            if made is None:
                return None
            opened.append(made)
    assert made is not None
    result = found(made)
    for each in reversed(opened):
        allfold.shutdown(each)
    return result


def is_rounded_if_asked(group: allfold.Group, kind: str, wire: str) -> bool:
    """Tell if this rank gets something else than what was moved."""
    return bool((_moved(group, kind, wire=wire) != _given(group, kind)).any())


def _all_reduced(group: allfold.Group, **options: Any) -> Array:
    result: Array = group.all_reduce(wires.values(_NUMEL, group.rank), **options)
    return result


def _reduced(group: allfold.Group, **options: Any) -> Array:
    """Return this rank's result as the root, after each rank has been the root once."""
    tensors = [wires.values(_NUMEL, group.rank) for _ in range(group.world_size)]
    for root, tensor in enumerate(tensors):
        group.reduce(tensor, root, **options)
    return tensors[group.rank]


def _reduce_scattered(group: allfold.Group, **options: Any) -> Array:
    numel = _NUMEL // group.world_size * group.world_size
    result: Array = group.reduce_scatter(wires.values(numel, group.rank), **options)
    return result


_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "all_reduce": _all_reduced,
    "reduce": _reduced,
    "reduce_scatter": _reduce_scattered,
}
_MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")


def _formats_like_none(group: allfold.Group, kind: str) -> list[str]:
    reduced = _REDUCTIONS[kind]
    usual = reduced(group).tobytes()
    return [wire for wire in _FORMATS if reduced(group, wire=wire).tobytes() == usual]


def _moved(group: allfold.Group, kind: str, **options: Any) -> Array:
    """Return this rank's result of a move of as many elements from rank to rank."""
    own, block = wires.values(_NUMEL, group.rank), np.empty(_NUMEL, np.float32)
    result: Array
    match kind:
        case "broadcast":
            result = group.broadcast(own, _ROOT, **options)
        case "all_gather":
            result = group.all_gather(own, **options)
        case "gather":
            whole = group.gather(own, _ROOT, **options)
            result = own if whole is None else whole
        case "scatter":
            inputs = np.tile(own, group.world_size) if group.rank == _ROOT else None
            result = group.scatter(block, inputs, _ROOT, **options)
        case _:
            result = group.all_to_all(np.tile(own, group.world_size), **options)
    return result


def _given(group: allfold.Group, kind: str) -> Array:
    """Return the right result of :func:`_moved`."""
    if kind in ("broadcast", "scatter"):
        return wires.values(_NUMEL, _ROOT)
    if kind == "gather" and group.rank != _ROOT:
        return wires.values(_NUMEL, group.rank)
    return np.concatenate([wires.values(_NUMEL, rank) for rank in range(group.world_size)])


def _is_sum_exact(group: allfold.Group, dtype: str) -> bool:
    """Of integers that no short format holds, where the type has such."""
    numbers = np.arange(_NUMEL) * 1009
    right = sum((numbers + rank).astype(dtype) for rank in range(group.world_size))
    result = group.all_reduce((numbers + group.rank).astype(dtype))
    return bool((result == right).all())


def _is_max_exact(group: allfold.Group) -> bool:
    """It is kept in float16, which has no shorter format."""
    brought = [wires.values(_NUMEL, rank, "float16") for rank in range(group.world_size)]
    result = group.all_reduce(brought[group.rank].copy(), "max")
    return bool((result == np.max(brought, 0)).all())
