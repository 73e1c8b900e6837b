"""Reductions: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

from allfold import _tensors
from allfold._calls.blocks import Blocks, new_block
from allfold._calls.call import (
    AUTO,
    NO_ROOT,
    CallerSeat,
    CollectiveCall,
    TensorBatch,
    batch,
    checked_rank,
    fingerprint,
    whole_numbers,
)
from allfold_core.dtypes import DType
from allfold_core.errors import InvalidArgument
from allfold_core.group_options import checked_seconds
from allfold_core.operations import (
    ALL_RANKS,
    GREATEST_WEIGHT,
    LEAST_WEIGHT,
    Fingerprint,
    Kind,
    Quorum,
    ReduceOp,
    is_weight,
)

_REDUCE_OPS = {op.label: op for op in ReduceOp} | {
    "avg": ReduceOp.MEAN,
    "average": ReduceOp.MEAN,
    "prod": ReduceOp.PRODUCT,
}
LARGEST_QUORUM = 0xFFFF  # that a fingerprint has room for
# Of the characters of an argument in an error.
_SHOWN = 60
# The real and the imaginary parts can be folded apart for these alone.
_OF_COMPLEX = frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PREMUL_SUM})


def all_reduce(tensor: Any, op: str | ReduceOp, factor: float | None) -> CollectiveCall:
    given = batch(tensor, written=True, folded=True)
    print_ = _fingerprint(Kind.ALL_REDUCE, given, op, factor, NO_ROOT)
    views = given.views
    return CollectiveCall(print_, inputs=views, outputs=views, in_place=True, result=tensor)


def weighted_mean(
    seat: CallerSeat,
    tensors: Any,
    op: str,
    weight: float,
    quorum: int | None,
    within: float | None,
    *,
    is_elastic: bool,
) -> CollectiveCall:
    if op not in ("mean", ReduceOp.WEIGHTED_MEAN):
        raise InvalidArgument(f"a round is a weighted mean: op= is 'mean', got {op!r}")
    number = checked_weight(weight)
    given = batch(tensors, written=True, folded=True)
    if refusal := ReduceOp.WEIGHTED_MEAN.refusal(given.dtype):
        raise InvalidArgument(refusal)
    print_ = fingerprint(
        Kind.ALL_REDUCE,
        ReduceOp.WEIGHTED_MEAN,
        given.dtype,
        given.shape,
        NO_ROOT,
        AUTO,
        factor=number,
        alias=given.alias,
        quorum=checked_quorum(quorum, within, LARGEST_QUORUM if is_elastic else seat.world_size),
    )
    return CollectiveCall(
        print_,
        inputs=given.views,
        outputs=given.views,
        in_place=True,
        result=tensors,
        on_host=True,
    )


def checked_weight(weight: float) -> float:
    """Return the weight of a rank in a weighted mean; ``InvalidArgument`` where it is none."""
    number = _number(weight)
    if not is_weight(number):
        raise InvalidArgument(
            f"weight= is 0 or a number from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}, "
            f"got {_shown(weight)}"
        )
    return number


def checked_quorum(quorum: int | None, within: float | None, most: int) -> Quorum:
    """Return a quorum of ``most`` ranks or fewer; ``InvalidArgument`` where there is none.

    More than there are is all of them: in a group whose ranks come and go they may be fewer now.
    """
    if (quorum is None) != (within is None):
        raise InvalidArgument("quorum= and within= belong together: give both or neither")
    if quorum is None:
        return ALL_RANKS
    found = None if isinstance(quorum, bool) else whole_numbers([quorum])
    if found is None or not 1 <= found[0] <= most:
        raise InvalidArgument(f"quorum= is a number of ranks from 1 to {most}, got {quorum!r}")
    return Quorum(found[0], checked_seconds("within", within))


def reduce(
    seat: CallerSeat, tensor: Any, root: int, op: str | ReduceOp, factor: float | None
) -> CollectiveCall:
    is_root = seat.rank == root
    given = batch(tensor, written=is_root, folded=True)
    print_ = _fingerprint(Kind.REDUCE, given, op, factor, checked_rank(seat, root, "root"))
    outputs = given.views if is_root else ()
    return CollectiveCall(print_, inputs=given.views, outputs=outputs, in_place=True, result=tensor)


def reduce_scatter(
    seat: CallerSeat,
    inputs: Any,
    output: Any,
    op: str | ReduceOp,
    factor: float | None,
    counts: Sequence[int] | None,
) -> CollectiveCall:
    if output is None:
        output = new_block(seat, inputs, counts)
    block = _tensors.view(output, written=True, folded=True)
    blocks = Blocks.of(seat, block, inputs, counts)
    views = blocks.views(inputs, written=False, folded=True)
    given = TensorBatch((block,), blocks.shape)
    print_ = _fingerprint(Kind.REDUCE_SCATTER, given, op, factor, NO_ROOT, blocks.counts)
    return CollectiveCall(print_, inputs=views, outputs=(block,), result=output)


def _fingerprint(
    kind: Kind,
    given: TensorBatch,
    op: str | ReduceOp,
    factor: float | None,
    root: int,
    counts: tuple[int, ...] = (),
) -> Fingerprint:
    found = _reduce_op(op, given.dtype)
    multiplier = _multiplier(found, factor)
    if found not in _OF_COMPLEX and given.is_complex:
        raise InvalidArgument(
            f"{found.label} of complex numbers is not defined; there are sum, mean and premul_sum"
        )
    return fingerprint(
        kind,
        found,
        given.dtype,
        given.shape,
        root,
        AUTO,
        factor=multiplier,
        counts=counts,
        alias=given.alias,
    )


def _reduce_op(op: str | ReduceOp, dtype: DType) -> ReduceOp:
    found = op if isinstance(op, ReduceOp) else _REDUCE_OPS.get(str(op))
    if found is ReduceOp.WEIGHTED_MEAN:
        raise InvalidArgument("a weighted mean is a round: call start_round() with weight=")
    if found is None:
        known = ", ".join(each.label for each in ReduceOp if each is not ReduceOp.WEIGHTED_MEAN)
        raise InvalidArgument(f"unknown reduce operation {op!r}; there are {known}")
    if refusal := found.refusal(dtype):
        raise InvalidArgument(refusal)
    return found


def _multiplier(op: ReduceOp, factor: float | None) -> float:
    """Return the factor by which every input is multiplied."""
    if (factor is None) == (op is ReduceOp.PREMUL_SUM):
        raise InvalidArgument("op='premul_sum' and factor= belong together: give both or neither")
    return 1.0 if factor is None else finite("factor", factor)


def finite(name: str, given: float) -> float:
    """The argument of that name as a number."""
    number = _number(given)
    if not isfinite(number):
        raise InvalidArgument(f"{name}= is a finite number, got {_shown(given)}")
    return number


def _number(given: Any) -> float:
    """An argument as a number; NaN for what is none, or is too large for a float."""
    try:
        return nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        return nan


def _shown(given: Any) -> str:
    """An argument in an error. Python writes out no whole number of thousands of digits."""
    try:
        text = repr(given)
    except ValueError:
        return f"a whole number of {given.bit_length()} bits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
