"""Means of integers, which agents do not compute: the sum, divided where it arrives.

As with NCCL, the quotient is truncated towards zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch

from allfold._tensors import unseen
from allfold_core.operations import ReduceOp


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
