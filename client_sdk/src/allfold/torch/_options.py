"""Translation of torch's options of a collective into those of Allfold."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from allfold_core.errors import InvalidArgument
from allfold_core.operations import ReduceOp

_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "PRODUCT": ReduceOp.PRODUCT,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
    "PREMUL_SUM": ReduceOp.PREMUL_SUM,
}

# Those without a factor, by the objects that options have: to ask one for its name takes 1 us.
_PLAIN = {
    dist.ReduceOp(getattr(dist.ReduceOp, name)): op
    for name, op in _OPS.items()
    if op is not ReduceOp.PREMUL_SUM and hasattr(dist.ReduceOp, name)
}
_NONE = timedelta(0)


def reduction(opts: Any) -> tuple[ReduceOp, float | None]:
    """Return the reduce operation of options (or of a bare torch ``ReduceOp``), and its factor.

    Without options it is a sum, as everywhere in torch.

    Raises:
        InvalidArgument: torch has added an operation, or does not show its factor.
    """
    if opts is None:
        return ReduceOp.SUM, None
    given = getattr(opts, "reduceOp", opts)
    if (plain := _PLAIN.get(given)) is not None:
        return plain, None
    name = getattr(given, "op", given).name
    if name not in _OPS:
        raise InvalidArgument(f"torch's reduce operation {name} is unknown here")
    found = _OPS[name]
    if found is not ReduceOp.PREMUL_SUM:
        return found, None
    if not hasattr(given, "factor"):
        raise InvalidArgument(
            f"torch {torch.__version__} does not tell the factor of PREMUL_SUM; torch 2.13 does"
        )
    return found, float(given.factor)


def seconds(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; zero and less mean that none was set."""
    if timeout is None or timeout <= _NONE:
        return None
    return timeout.total_seconds()


def timeout_of(opts: Any) -> float | None:
    """Return the timeout of options in seconds, if one was set."""
    return seconds(getattr(opts, "timeout", None))
