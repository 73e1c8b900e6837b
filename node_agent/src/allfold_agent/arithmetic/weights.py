"""The weights of a weighted mean: each rank's own, known to all nodes once they have exchanged.

The mean is the sum of weight times input, divided by the sum of the weights. Both sums have a fixed
order, that of the ranks, and the second one is kept in float64, so every rank gets the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_core.schedules.parts import WEIGHT_ELEMENTS, End

CODE_WEIGHT = struct.Struct("<d")
"""The weight in a code, behind it."""


class Weights:
    """The weights in one attempt of an op, in the rank numbers of its epoch.

    A weight of 0 is that of a rank that takes no part: its input is not even read.

    Args:
        own: by rank, those of this node's ranks.
        world_size: of the epoch.

    Attributes:
        of_ranks: those of all ranks, once they are known.
        total: their sum.
        of_node: the sum of those of this node's ranks.
    """

    def __init__(self, own: Mapping[int, float], world_size: int) -> None:
        self._own = own
        self.of_ranks: tuple[float, ...] = ()
        self.total = 0.0
        self.of_node = sum(own.values())
        self._world_size = world_size
        if len(own) == world_size:
            self._take_in([own[rank] for rank in range(world_size)])

    def elements(self, dtype: np.dtype[np.generic]) -> Array:
        """What this node brings to the exchange: zeros for ranks of others.

        A weight is its nearest number of ``dtype``, and what that lacks: of float32, 48 bits.
        """
        brought = np.zeros((self._world_size, WEIGHT_ELEMENTS), dtype)
        for rank, weight in self._own.items():
            nearest = dtype.type(weight)
            brought[rank] = nearest, weight - float(nearest)
        return brought.reshape(-1)

    def learn(self, exchanged: Array) -> None:
        """Take in the sum of what all nodes have brought."""
        pairs = exchanged.astype(np.float64).reshape(-1, WEIGHT_ELEMENTS)
        self._take_in(pairs.sum(axis=1).tolist())

    def _take_in(self, weights: Sequence[float]) -> None:
        self.of_ranks = tuple(weights)
        self.total = 0.0
        for weight in weights:  # not sum(), which compensates from Python 3.12 on
            self.total += weight

    def taking_part(
        self, ends: Sequence[End], inputs: Sequence[Array]
    ) -> tuple[list[Array], list[float]]:
        """Return the inputs of a range that count, and their weights."""
        counted = [
            (values, self._own[end.rank])
            for end, values in zip(ends, inputs, strict=True)
            if self._own[end.rank]
        ]
        return [values for values, _ in counted], [weight for _, weight in counted]
