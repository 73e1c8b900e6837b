"""Translation of torch's options of a collective into those of Allfold; means of integers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from allfold._tensors import unseen
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


def is_integer_mean(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Return whether a reduction of such tensors is a mean that has to be divided here."""
    if op is not ReduceOp.MEAN:
        return False
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def op_of_agents(op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
    """Return what agents have to reduce with."""
    return ReduceOp.SUM if is_integer_mean(op, dtype) else op


class Quotients:
    """Sums of integers that are to be divided, once they have arrived.

    Args:
        sums: the tensors, divided in place.
        divisor: the number of ranks.
    """

    def __init__(self, sums: Sequence[torch.Tensor], divisor: int) -> None:
        self._sums = list(sums)
        self._divisor = divisor
        self._lock = Lock()
        self._divided = False
        self._ready: list[tuple[torch.device, Any]] = []

    def divide(self) -> None:
        """Divide at the first call; have the current streams wait for that at every other.

        The modes of the thread that comes first do not matter: tensors of inference mode are
        divided in any thread, and no mode of torch sees it.
        """
        with self._lock, unseen():
            if self._divided:
                for device, event in self._ready:
                    event.wait(torch.cuda.current_stream(device))
                return
            for tensor in self._sums:
                tensor.div_(self._divisor, rounding_mode="trunc")
            self._ready = [
                (device, torch.cuda.current_stream(device).record_event())
                for device in {tensor.device for tensor in self._sums if tensor.is_cuda}
            ]
            self._divided = True
