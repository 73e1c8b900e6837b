"""Error feedback: the rounding errors of lossy encodings, kept to be added to later ops."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.codecs import Codec
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.machine import memory_limit
from allfold_core.schedules.parts import Part


class Residual:
    """Error feedback: the rounding error of a series of lossy ops, added to the next one.

    In weighted means it is kept per unit of the weight that was in what was rounded, and added by
    the weight that is in what it is added to. So it moves the mean by as much as was missing in it,
    whatever the weights of the two ops are.

    Ops of one series may be in flight together, so a range is read and written at once. What an
    attempt of an op has changed is undone when the op is given up or done again.

    Args:
        blocks: whose block lies where among the values; none if they are one tensor.

    Attributes:
        values: what rounding has cost.
        late: what ranks of this node brought too late, per unit of the weight of the node: it was
            in no sum of several nodes, as what was rounded there. ``None`` while there is nothing.
    """

    def __init__(self, numel: int, dtype: np.dtype[Any], blocks: tuple[Part, ...] = ()) -> None:
        self.values = np.zeros(numel, dtype)
        self.late: Array | None = None
        self._blocks = blocks
        self._lock = make_lock("residual")
        self._attempts: list[ResidualAttempt] = []
        # Of a settled attempt, by length: memory that is new takes several times as long.
        self._spare: dict[int, list[Array]] = {}

    def attempt(self, seq: int, weight: float = 1.0) -> ResidualAttempt:
        """The residual for one attempt of an op, in which the node's ranks have a weight."""
        begun = ResidualAttempt(self, seq, weight)
        with self._lock:
            self._attempts.append(begun)
        return begun

    def settle(self, floor: int) -> None:
        """No op up to this one will be given up any more."""
        with self._lock:
            settled = [each for each in self._attempts if each.seq <= floor]
            self._attempts = [each for each in self._attempts if each.seq > floor]
            if settled:
                self._spare = {}
                for _, before in settled[-1].changed:
                    self._spare.setdefault(len(before), []).append(before)
            if self.late is not None and not self._attempts and not self.late.any():
                self.late = None

    def give_up(self, attempt: ResidualAttempt) -> None:
        """Undo what an attempt has changed, after the later ones that were given up too.

        If a later one was not given up, its error contains this one's, and nothing can be undone:
        one rounding error is lost then, and everybody still has the same bits.
        """
        with self._lock:
            attempt.given_up = True
            for start, taken in attempt.taken:  # which no later one has counted in
                if self.late is not None:
                    self.late[start : start + len(taken)] += taken
            attempt.taken = []
            while self._attempts and self._attempts[-1].given_up:
                for start, before in reversed(self._attempts.pop().changed):
                    self.values[start : start + len(before)] = before

    def add(self, brought: Array) -> None:
        """Owe what came too late to the next op that the node has a weight in."""
        with self._lock:
            self.late = brought if self.late is None else self.late + brought

    def encode(
        self,
        attempt: ResidualAttempt,
        start: int,
        values: Array,
        code: memoryview,
        codec: Codec,
        weight: float = 1.0,
    ) -> None:
        """Encode values that begin at element ``start``, with what is owed to them.

        Args:
            weight: in the values. Where it is 0, what is owed waits for an op with a weight.
        """
        with self._lock:
            if attempt.given_up:  # its code goes nowhere
                return
            if not weight:
                codec.encode(values, code)
                return
            self._add_late(attempt, start, values)
            owed = self.values[start : start + len(values)]
            spare = self._spare.get(len(owed))
            before = spare.pop() if spare else np.empty_like(owed)
            before[...] = owed
            attempt.changed.append((start, before))
            if weight == 1.0:
                codec.encode(values, code, owed)
                return
            owed *= weight
            codec.encode(values, code, owed)
            owed /= weight

    def _add_late(self, attempt: ResidualAttempt, start: int, values: Array) -> None:
        """Add what came too late to values that this node's ranks have a part in."""
        if self.late is None or not attempt.weight:
            return
        late = self.late[start : start + len(values)]
        attempt.taken.append((start, late.copy()))
        values += late * late.dtype.type(attempt.weight)
        late.fill(0)

    def suits(self, numel: int, dtype: np.dtype[Any], blocks: tuple[Part, ...]) -> bool:
        """Return True if each value of such an op is what the value at its place was before."""
        same = len(self.values) == numel and self.values.dtype == dtype
        return same and self._blocks == blocks

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return self.values.nbytes + (0 if self.late is None else self.late.nbytes)


class ResidualAttempt:
    """The residual of a series, as one attempt of an op uses it.

    Attributes:
        seq: of the op.
        weight: of the node's ranks in it.
        changed: the ranges that it has changed, with what was there before.
        taken: the ranges of what came too late that it has added, with what was there.
        given_up: what it encodes is sent to nobody any more.
    """

    def __init__(self, residual: Residual, seq: int, weight: float = 1.0) -> None:
        self.seq = seq
        self.weight = weight
        self.taken: list[tuple[int, Array]] = []
        self.changed: list[tuple[int, Array]] = []
        self.given_up = False
        self._residual = residual

    def encode(
        self, start: int, values: Array, code: memoryview, codec: Codec, weight: float = 1.0
    ) -> None:
        """Encode values that begin at element ``start``, with what is owed to them."""
        self._residual.encode(self, start, values, code, codec, weight)

    def give_up(self) -> None:
        """The attempt is over without a result: it was never made."""
        self._residual.give_up(self)


class Residuals:
    """The residuals of a group's series, as long as there is room for them.

    A series that has ended cannot be told from one that pauses. So when all series together take
    more than ``limit`` bytes, the one that was not used for the longest time is forgotten; if it
    comes again, it starts from zero. Nodes may forget different series: the node then rounds a
    little worse, but it still sends the same bytes to all others.

    Args:
        limit: in bytes; one series alone may take more. By default a quarter of the memory
            that the process may use.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._given_limit = limit
        self._kept: OrderedDict[int, Residual] = OrderedDict()

    @cached_property
    def _limit(self) -> int:
        """Read when it first matters: most groups never compress, and should open fast."""
        return memory_limit() // 4 if self._given_limit is None else self._given_limit

    def of(
        self, series: int, numel: int, dtype: np.dtype[Any], blocks: tuple[Part, ...] = ()
    ) -> Residual:
        """The residual of a series: zero at its start, and when the layout of its ops has changed.

        Blocks lie in the order of the nodes, which changes where a slow link is avoided.
        """
        residual = self._kept.pop(series, None)
        if residual is None or not residual.suits(numel, dtype, blocks):
            residual = Residual(numel, dtype, blocks)
        self._kept[series] = residual
        while len(self._kept) > 1 and self.nbytes > self._limit:
            self._kept.popitem(last=False)
        return residual

    def settle(self, floor: int) -> None:
        """No op up to this one will be given up any more."""
        if not self._kept:
            return
        for residual in list(self._kept.values()):
            residual.settle(floor)

    @property
    def nbytes(self) -> int:
        """The memory of all of them."""
        return sum(residual.nbytes for residual in self._kept.values())
