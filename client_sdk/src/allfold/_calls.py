"""What each collective asks of the agent: pure, from the tensors of a call to a :class:`Call`.

Everything that this rank alone can see to be wrong is refused here, before anything is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan, prod
from operator import index
from typing import Any

from allfold import _tensors
from allfold._tensors import TensorView
from allfold_core.codecs import Wire
from allfold_core.dtypes import DType
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint, Kind, ReduceOp

AUTO = "auto"
_LARGEST = 1 << 63
_REDUCE_OPS = {op.label: op for op in ReduceOp} | {
    "avg": ReduceOp.MEAN,
    "average": ReduceOp.MEAN,
    "prod": ReduceOp.PRODUCT,
}
# The real and the imaginary parts can be folded apart for these alone.
_OF_COMPLEX = frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PREMUL_SUM})


@dataclass(frozen=True, slots=True)
class Seat:
    """Who calls."""

    group: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as this rank calls it.

    Attributes:
        fingerprint: what the ranks must agree on.
        inputs: what this rank brings, one after the other.
        outputs: where its result goes, one after the other.
        in_place: the outputs are the inputs, and share their memory.
        result: what the caller gets in the end.
    """

    fingerprint: Fingerprint
    inputs: tuple[TensorView, ...] = ()
    outputs: tuple[TensorView, ...] = ()
    in_place: bool = False
    result: Any = None

    def with_options(
        self, strategy: str, wire: str | None, feedback: str | None, usual_wire: str
    ) -> Call:
        """The same with a strategy and a wire format; ``InvalidArgument`` for what cannot work.

        Args:
            strategy: the name of one, or "auto".
            wire: the format; ``None`` for ``usual_wire`` where it can serve.
            feedback: the name of a series of calls.
            usual_wire: the group's: for reductions of types that can travel in it.
        """
        print_ = self.fingerprint
        format_ = _wire(print_, wire, usual_wire)
        if feedback is not None and format_.effective(print_.kept_dtype) is Wire.NATIVE:
            raise InvalidArgument("feedback= is for a lossy wire=, and this one loses nothing")
        key = _feedback_key(feedback)
        return replace(
            self, fingerprint=replace(print_, strategy=strategy, wire=format_, feedback=key)
        )


def _wire(fingerprint: Fingerprint, asked: str | None, usual: str) -> Wire:
    if asked is None:
        format_ = checked_wire(usual)
        serves = fingerprint.kind.reduces and not format_.refusal(fingerprint.kept_dtype)
        return format_ if serves else Wire.NATIVE
    format_ = checked_wire(asked)
    if refusal := format_.refusal(fingerprint.kept_dtype):
        raise InvalidArgument(refusal)
    return format_


def checked_wire(name: str) -> Wire:
    """The wire format of a name; ``InvalidArgument`` lists what there is."""
    try:
        return Wire.from_label(name)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _feedback_key(name: str | None) -> int:
    if name is None:
        return 0
    if not isinstance(name, str):
        raise InvalidArgument(f"feedback= is the name of a series of calls, got {name!r}")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


# One tensor, or several in one op


@dataclass(frozen=True, slots=True)
class _Tensors:
    """One tensor, or a list that travels as one."""

    views: tuple[TensorView, ...]
    shape: tuple[int, ...]
    result: Any

    @property
    def dtype(self) -> DType:
        return self.views[0].dtype

    @property
    def is_complex(self) -> bool:
        return any(view.is_complex for view in self.views)


def _tensors_of(given: Any, *, written: bool, folded: bool) -> _Tensors:
    if not isinstance(given, list | tuple):
        view = _tensors.view(given, written=written, folded=folded)
        return _Tensors((view,), view.shape, given)
    if not given:
        raise InvalidArgument("an empty list of tensors")
    views = tuple(_tensors.view(each, written=written, folded=folded) for each in given)
    check_one_dtype(views)
    return _Tensors(views, (sum(view.numel for view in views),), given)


def check_one_dtype(views: Sequence[TensorView]) -> None:
    """Refuse tensors of several types in one op; ``InvalidArgument``."""
    labels = {view.dtype.label for view in views}
    if len(labels) > 1:
        raise InvalidArgument(
            f"the tensors of one op have one dtype, got {', '.join(sorted(labels))}; "
            "call once per dtype"
        )


def all_reduce(tensor: Any, op: str | ReduceOp, factor: float | None) -> Call:
    given = _tensors_of(tensor, written=True, folded=True)
    print_ = _reducing(Kind.ALL_REDUCE, given, op, factor, -1)
    return Call(print_, given.views, given.views, in_place=True, result=tensor)


def reduce(seat: Seat, tensor: Any, root: int, op: str | ReduceOp, factor: float | None) -> Call:
    given = _tensors_of(tensor, written=seat.rank == root, folded=True)
    print_ = _reducing(Kind.REDUCE, given, op, factor, _checked_root(seat, root))
    outputs = given.views if seat.rank == root else ()
    return Call(print_, given.views, outputs, in_place=True, result=tensor)


def broadcast(seat: Seat, tensor: Any, root: int, wire: str | None) -> Call:
    rounded = wire not in (None, Wire.NATIVE.label)
    is_root = seat.rank == root
    given = _tensors_of(tensor, written=not is_root or rounded, folded=False)
    print_ = Fingerprint(
        Kind.BROADCAST, None, given.dtype, given.shape, _checked_root(seat, root), AUTO
    )
    inputs = given.views if is_root else ()
    outputs = () if is_root and not rounded else given.views
    return Call(print_, inputs, outputs, in_place=True, result=tensor)


def barrier() -> Call:
    return Call(Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, AUTO))


def _reducing(
    kind: Kind, given: _Tensors, op: str | ReduceOp, factor: float | None, root: int
) -> Fingerprint:
    found, multiplier = _reduce_op(op, factor, given.views[0])
    if given.is_complex and found not in _OF_COMPLEX:
        raise InvalidArgument(
            f"{found.label} of complex numbers is not defined; there are sum, mean and premul_sum"
        )
    return Fingerprint(kind, found, given.dtype, given.shape, root, AUTO, factor=multiplier)


def _reduce_op(
    op: str | ReduceOp, factor: float | None, view: TensorView
) -> tuple[ReduceOp, float]:
    found = op if isinstance(op, ReduceOp) else _REDUCE_OPS.get(str(op))
    if found is None:
        known = ", ".join(each.label for each in ReduceOp)
        raise InvalidArgument(f"unknown reduce operation {op!r}; there are {known}")
    if refusal := found.refusal(view.dtype):
        raise InvalidArgument(refusal)
    if (factor is None) == (found is ReduceOp.PREMUL_SUM):
        raise InvalidArgument("op='premul_sum' and factor= belong together: give both or neither")
    return found, 1.0 if factor is None else _finite(factor)


def _finite(factor: float) -> float:
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = nan
    if not isfinite(number):
        raise InvalidArgument(f"factor= is a finite number, got {factor!r}")
    return number


def _checked_root(seat: Seat, root: int) -> int:
    return checked_rank(seat, root, "root")


def _whole_numbers(given: Any) -> tuple[int, ...] | None:
    """The integers of a sequence, whatever library they are of; ``None`` where it has others."""
    try:
        return tuple(index(each) for each in given)
    except TypeError:
        return None


def checked_rank(seat: Seat, rank: int, what: str) -> int:
    """The rank, if it is one of the group; ``InvalidArgument`` otherwise."""
    found = None if isinstance(rank, bool) else _whole_numbers([rank])
    if found is None or not 0 <= found[0] < seat.world_size:
        raise InvalidArgument(
            f"{what} {rank!r} is not a rank of group '{seat.group}': "
            f"its ranks are 0 to {seat.world_size - 1}"
        )
    return found[0]


# One block per rank


def all_gather(seat: Seat, tensor: Any, output: Any, counts: Sequence[int] | None) -> Call:
    block = _tensors.view(tensor, written=False, folded=False)
    shape, rows = _blocks_of(seat, block, output, counts)
    if output is None:
        output = _new_whole(seat, block, rows)
    views = _whole(seat, output, shape, rows, written=True, folded=False)
    print_ = Fingerprint(Kind.ALL_GATHER, None, block.dtype, shape, -1, AUTO, counts=rows)
    return Call(print_, (block,), views, result=output)


def gather(seat: Seat, tensor: Any, root: int, output: Any, counts: Sequence[int] | None) -> Call:
    block = _tensors.view(tensor, written=False, folded=False)
    _checked_root(seat, root)
    is_root = seat.rank == root
    if output is not None and not is_root:
        raise InvalidArgument(f"only the root, rank {root}, gets what is gathered: pass no output")
    shape, rows = _blocks_of(seat, block, output, counts)
    if is_root and output is None:
        output = _new_whole(seat, block, rows)
    views = _whole(seat, output, shape, rows, written=True, folded=False) if is_root else ()
    print_ = Fingerprint(Kind.GATHER, None, block.dtype, shape, root, AUTO, counts=rows)
    return Call(print_, (block,), views, result=output)


def scatter(seat: Seat, output: Any, inputs: Any, root: int, counts: Sequence[int] | None) -> Call:
    block = _tensors.view(output, written=True, folded=False)
    _checked_root(seat, root)
    is_root = seat.rank == root
    if is_root == (inputs is None):
        raise InvalidArgument(
            f"the root, rank {root}, passes what is scattered, and only the root: "
            f"rank {seat.rank} passed {'none' if inputs is None else 'some'}"
        )
    shape, rows = _blocks_of(seat, block, inputs, counts)
    views = _whole(seat, inputs, shape, rows, written=False, folded=False) if is_root else ()
    print_ = Fingerprint(Kind.SCATTER, None, block.dtype, shape, root, AUTO, counts=rows)
    return Call(print_, views, (block,), result=output)


def reduce_scatter(
    seat: Seat,
    inputs: Any,
    output: Any,
    op: str | ReduceOp,
    factor: float | None,
    counts: Sequence[int] | None,
) -> Call:
    if output is None:
        output = _new_block(seat, inputs, counts)
    block = _tensors.view(output, written=True, folded=True)
    shape, rows = _blocks_of(seat, block, inputs, counts)
    views = _whole(seat, inputs, shape, rows, written=False, folded=True)
    given = _Tensors((block,), shape, output)
    print_ = _reducing(Kind.REDUCE_SCATTER, given, op, factor, -1)
    return Call(replace(print_, counts=rows), views, (block,), result=output)


def _blocks_of(
    seat: Seat, block: TensorView, whole: Any, counts: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, counts) of a fingerprint, from this rank's block and what is said of the others."""
    if counts is not None:
        checked = _checked_counts(seat, counts, "counts")
        if block.rows != checked[seat.rank]:
            raise InvalidArgument(
                f"the block of rank {seat.rank} has {block.rows} rows, but counts says "
                f"{checked[seat.rank]}"
            )
        uneven = len(set(checked)) > 1
        return (block.row_shape, checked) if uneven else (block.shape, ())
    if isinstance(whole, list | tuple):
        _check_list(seat, whole)
        numels = tuple(_tensors.view(each, written=False, folded=False).numel for each in whole)
        if len(set(numels)) > 1:
            _check_listed(seat.rank, block.numel, numels[seat.rank])
            return (), numels
    return block.shape, ()


def _check_list(seat: Seat, given: Sequence[Any]) -> None:
    if len(given) != seat.world_size:
        raise InvalidArgument(
            f"a list of blocks has one tensor for each of the {seat.world_size} ranks, "
            f"got {len(given)}"
        )


def _check_listed(rank: int, size: int, numel: int) -> None:
    if numel != size:
        raise InvalidArgument(
            f"the block of rank {rank} has {size} elements, but its tensor in the list has {numel}"
        )


def _checked_counts(seat: Seat, counts: Sequence[int], name: str) -> tuple[int, ...]:
    checked = _whole_numbers(counts)
    if (
        checked is None
        or len(checked) != seat.world_size
        or any(not 0 <= count < _LARGEST for count in checked)
    ):
        raise InvalidArgument(
            f"{name} has one whole number of rows, at least 0, for each of the {seat.world_size} "
            f"ranks of group '{seat.group}', got {counts!r}"
        )
    return checked


def _whole(
    seat: Seat,
    given: Any,
    shape: tuple[int, ...],
    counts: tuple[int, ...],
    *,
    written: bool,
    folded: bool,
) -> tuple[TensorView, ...]:
    """The views of the whole, checked to be one block per rank."""
    sizes = [prod(shape) * count for count in counts or (1,) * seat.world_size]
    if not isinstance(given, list | tuple):
        view = _tensors.view(given, written=written, folded=folded)
        if view.numel != sum(sizes):
            raise InvalidArgument(
                f"the blocks of {seat.world_size} ranks have {sum(sizes)} elements together, "
                f"but the tensor of all of them has {view.numel}"
            )
        return (view,)
    _check_list(seat, given)
    views = tuple(_tensors.view(each, written=written, folded=folded) for each in given)
    for rank, (view, size) in enumerate(zip(views, sizes, strict=True)):
        _check_listed(rank, size, view.numel)
    return views


def _new_whole(seat: Seat, block: TensorView, counts: tuple[int, ...]) -> Any:
    shape = tuple(block.tensor.shape)
    rows = sum(counts) if counts else seat.world_size * (shape[0] if shape else 1)
    return _tensors.like(block.tensor, (rows, *shape[1:]))


def _new_block(seat: Seat, inputs: Any, counts: Sequence[int] | None) -> Any:
    if isinstance(inputs, list | tuple):
        _check_list(seat, inputs)
        mine = inputs[seat.rank]
        return _tensors.like(mine, tuple(_tensors.view(mine, written=False).tensor.shape))
    shape = tuple(_tensors.view(inputs, written=False).tensor.shape)
    rows = shape[0] if shape else 1
    if counts is None and rows % seat.world_size:
        raise InvalidArgument(
            f"{rows} rows cannot be split evenly over {seat.world_size} ranks; "
            "say with counts= how many rows belong to each"
        )
    own = rows // seat.world_size
    if counts is not None:
        own = _checked_counts(seat, counts, "counts")[seat.rank]
    return _tensors.like(inputs, (own, *shape[1:]))


# One block per pair of ranks


def all_to_all(
    seat: Seat,
    inputs: Any,
    output: Any,
    send_counts: Sequence[int] | None,
    receive_counts: Sequence[int] | None,
) -> Call:
    if isinstance(inputs, list | tuple):
        return _listed_all_to_all(seat, inputs, output, send_counts, receive_counts)
    source = _tensors.view(inputs, written=False, folded=False)
    sent = _split(seat, source, send_counts, "send_counts")
    if output is None:
        expected = sent if receive_counts is None else receive_counts
        rows = sum(_checked_counts(seat, expected, "receive_counts"))
        output = _tensors.like(inputs, (rows, *tuple(source.tensor.shape)[1:]))
    target = _tensors.view(output, written=True, folded=False)
    received = _split(seat, target, receive_counts, "receive_counts")
    if source.row_shape != target.row_shape:
        raise InvalidArgument(
            f"the rows of the input are {list(source.row_shape)}, those of the output "
            f"{list(target.row_shape)}: they must be equal"
        )
    print_ = Fingerprint(
        Kind.ALL_TO_ALL, None, source.dtype, source.row_shape, -1, AUTO, counts=sent + received
    )
    return Call(print_, (source,), (target,), result=output)


def _listed_all_to_all(
    seat: Seat,
    inputs: Sequence[Any],
    output: Any,
    send_counts: Sequence[int] | None,
    receive_counts: Sequence[int] | None,
) -> Call:
    if send_counts is not None or receive_counts is not None:
        raise InvalidArgument("lists of tensors say their sizes themselves: pass no counts")
    sources = tuple(_tensors.view(each, written=False, folded=False) for each in inputs)
    if output is None:
        output = [_tensors.like(view.tensor, tuple(view.tensor.shape)) for view in sources]
    if not isinstance(output, list | tuple) or not len(inputs) == len(output) == seat.world_size:
        raise InvalidArgument(
            f"an all-to-all of lists has {seat.world_size} tensors in and as many out, got "
            f"{len(inputs)} and {len(output) if isinstance(output, list | tuple) else 'a tensor'}"
        )
    targets = tuple(_tensors.view(each, written=True, folded=False) for each in output)
    counts = tuple(view.numel for view in sources + targets)
    print_ = Fingerprint(Kind.ALL_TO_ALL, None, sources[0].dtype, (), -1, AUTO, counts=counts)
    return Call(print_, sources, targets, result=output)


def _split(
    seat: Seat, view: TensorView, counts: Sequence[int] | None, name: str
) -> tuple[int, ...]:
    rows = view.rows
    if counts is None:
        if rows % seat.world_size:
            raise InvalidArgument(
                f"{rows} rows cannot be split evenly over {seat.world_size} ranks; "
                f"say with {name}= how many belong to each"
            )
        return (rows // seat.world_size,) * seat.world_size
    checked = _checked_counts(seat, counts, name)
    if sum(checked) != rows:
        raise InvalidArgument(f"{name} adds up to {sum(checked)} rows, the tensor has {rows}")
    return checked


# Between two ranks


def send(tensor: Any) -> Call:
    view = _tensors.view(tensor, written=False, folded=False)
    return Call(_message(view), inputs=(view,))


def recv(tensor: Any) -> Call:
    view = _tensors.view(tensor, written=True, folded=False)
    return Call(_message(view), outputs=(view,))


def _message(view: TensorView) -> Fingerprint:
    return Fingerprint(Kind.BROADCAST, None, view.dtype, view.shape, -1, AUTO)


def checked_peer(seat: Seat, rank: int, what: str) -> int:
    """Another rank of the group; ``InvalidArgument`` otherwise."""
    peer = checked_rank(seat, rank, what)
    if peer == seat.rank:
        raise InvalidArgument(f"rank {rank} cannot exchange a message with itself")
    return peer


def checked_tag(tag: int) -> int:
    """A tag; ``InvalidArgument`` for what is none."""
    found = None if isinstance(tag, bool) else _whole_numbers([tag])
    if found is None or not -_LARGEST <= found[0] < _LARGEST:
        raise InvalidArgument(f"a tag is a whole number of 64 bits with its sign, got {tag!r}")
    return found[0]
