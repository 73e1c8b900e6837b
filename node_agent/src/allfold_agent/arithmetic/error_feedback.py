"""Error feedback: what lossy encoding has cost, kept to be made up for."""

from __future__ import annotations

from collections import OrderedDict

import torch

from allfold_agent.arithmetic.codecs import Codec
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.memory import memory_limit


class Residual:
    """Error feedback: the rounding error of a series of lossy ops, added to the next one.

    Ops of one series may be in flight together, so a range is read and written at once.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.values = torch.zeros(numel, dtype=dtype)
        self._lock = make_lock("residual")

    def encode(self, start: int, values: torch.Tensor, code: torch.Tensor, codec: Codec) -> None:
        """Encode values that begin at element ``start``, with what is owed to them."""
        with self._lock:
            owed = self.values[start : start + len(values)]
            torch.add(values, owed, out=owed)
            values.copy_(owed)
            codec.encode(values, code)
            torch.sub(owed, values, out=owed)
            # A step that overflows is skipped; it must not spoil those after it.
            owed.nan_to_num_(0.0, 0.0, 0.0)

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return self.values.nbytes


class Residuals:
    """The residuals of a group's series, as long as there is room for them.

    A series that nobody goes on with cannot be told from one that rests, so the one that rests
    longest is forgotten when all of them take more than ``limit`` bytes; if it comes again, it
    begins anew. What a node has forgotten is its own affair: it rounds a little worse, and sends
    everybody the same.

    Args:
        limit: in bytes; one series alone may take more. By default a quarter of the memory
            that the process may use.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = memory_limit() // 4 if limit is None else limit
        self._kept: OrderedDict[int, Residual] = OrderedDict()

    def of(self, series: int, numel: int, dtype: torch.dtype) -> Residual:
        """That of a series, zero at its beginning and where its ops have another size now."""
        residual = self._kept.pop(series, None)
        if residual is None or len(residual.values) != numel or residual.values.dtype != dtype:
            residual = Residual(numel, dtype)
        self._kept[series] = residual
        while len(self._kept) > 1 and self.nbytes > self._limit:
            self._kept.popitem(last=False)
        return residual

    @property
    def nbytes(self) -> int:
        """The memory of all of them."""
        return sum(residual.nbytes for residual in self._kept.values())
