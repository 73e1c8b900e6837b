"""The error bounds of a lossy wire, derived from what each format promises for one rounding.

One rounding: a float format errs by at most its unit roundoff u times the magnitude; int8 by half
of its scale, which is the greatest magnitude of the block divided by 127 (times 1 + 2^-15, because
it is rounded up); int4 by half of its scale, which is a seventh of it (times 1 + 2^-8, because it
is rounded to bfloat16); int2, which takes the mean of those above or below a limit that is at least
a fifth of the greatest, by four fifths of it; and sign, which takes the mean of all, by all of it.

A whole op: what travels is a partial sum of some ranks' tensors, and it is rounded once each time
that it is encoded. So an element's total error is at most the sum over all roundings of the cost of
one. The partial sums that are encoded at the same distance from the result have no rank in common;
together they are no greater than the sum of all magnitudes. So each distance costs at most one
rounding of that, and what counts is how often a contribution is encoded on its way to the result:
:func:`roundings`. What earlier roundings added to a partial sum is a factor of (1 + u) for each;
where blocks have scales, the greatest of one grows by what rounding its scale adds, at most 2^-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from allfold_core.dtypes import Wire

Floats = npt.NDArray[np.float64]

LOSSY = tuple(wire.label for wire in Wire if wire is not Wire.NATIVE and not wire.is_sparse)
"""Those whose every result has an error bound; of a sparse one only a series of results has."""
# Unit roundoffs, and the error of what is too small to be normal.
_ROUNDOFF = {
    "float32": (2**-24, 2**-150),
    "bfloat16": (2**-8, 2**-134),
    "float16": (2**-11, 2**-25),
}
# The error as a share of the greatest magnitude, and the greatest of a block that may be 0.
_BLOCK_ROUNDOFF = {
    "int8": ((1 + 2**-14) / 254, 127 * 2**-126),
    "int4": ((1 + 2**-7) / 14, 7 * 2**-126),
    "int2": (0.8 * (1 + 2**-7), 5 * 2**-126),
    "sign": (1.0, 2**-126),
}
_SCALE_ROUNDOFF = 2**-8
OF_BLOCKS = tuple(_BLOCK_ROUNDOFF)


def values(numel: int, rank: int, dtype: str = "float32") -> npt.NDArray[Any]:
    """Return a rank's input: values of all signs and of sizes that differ by some thousands."""
    dice = np.random.default_rng([numel, rank])
    drawn = dice.normal(size=numel) * 2.0 ** dice.integers(-6, 7, numel)
    return drawn.astype(dtype)


def roundings(kind: str, strategy: str, nodes: int) -> int:
    """Return how often a contribution is encoded on its way to the result, at most.

    Up a tree once per level, and a result that all get once more by who has it; along a ring at
    every step; in halving and doubling at every halving, and once more for the odd nodes, which
    give theirs to another one first. What is passed on is not encoded again.
    """
    if nodes == 1:
        return 0
    if kind not in ("all_reduce", "reduce", "reduce_scatter"):
        return 1
    result = 0 if kind == "reduce" else 1
    name, _, arity = strategy.rstrip(")").partition("(")
    match name:
        case "direct":
            return 1
        case "direct2" | "centralized":
            return 1 + result
        case "ring":
            return nodes
        case "halving_doubling":
            return ceil(log2(nodes)) + 1 + result
        case "double_tree":
            return ceil(log2(nodes)) + 1 + result
        case "tree" if arity != "1":
            return ceil(log2(nodes)) + result
    return nodes - 1 + result  # a chain, or whatever is chosen


def bound(wire: str, given: Sequence[Floats], times: int, greatest: float) -> Floats:
    """The error that so many roundings of partial sums may cost, by element.

    Args:
        greatest: the greatest magnitude that a partial sum can have.
    """
    magnitudes: Floats = np.sum(np.abs(given), 0)
    if wire in OF_BLOCKS:
        (unit, tiny), growth = _BLOCK_ROUNDOFF[wire], _SCALE_ROUNDOFF
        magnitudes[:] = greatest
    else:
        unit, tiny = _ROUNDOFF[wire]
        growth = unit
    return times * (unit * magnitudes * (1 + growth) ** times + tiny)


def arithmetic(dtype: str, given: Sequence[Floats]) -> Floats:
    """Return the error of the additions themselves, and of the last rounding of a half type."""
    kept, result = {
        "float64": (2**-53, 2**-53),
        "float32": (2**-24, 2**-24),
        "bfloat16": (2**-24, 2**-8),
        "float16": (2**-24, 2**-11),
    }[dtype]
    magnitudes: Floats = np.sum(np.abs(given), 0)
    return magnitudes * 1.1 * (kept * len(given) + result)
