"""Calls that move data as it is: broadcast, gathers, scatter, all_to_all, send and recv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allfold import _tensors
from allfold._calls.blocks import Blocks, even_share
from allfold._calls.call import (
    AUTO,
    LARGEST,
    NO_ROOT,
    CallerSeat,
    CollectiveCall,
    P2PCall,
    batch,
    checked_counts,
    checked_rank,
    fingerprint,
    whole_numbers,
)
from allfold._tensors import TensorView
from allfold_core.codecs import Wire
from allfold_core.dtypes import DType
from allfold_core.errors import InvalidArgument
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.operations import Fingerprint, Kind
from allfold_core.verdict import counted
from allfold_core.wire.local_wire import Message


def barrier() -> CollectiveCall:
    """Return the call of a barrier, which moves no data."""
    return CollectiveCall(fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), NO_ROOT, AUTO))


def broadcast(seat: CallerSeat, tensor: Any, root: int, wire: str | None) -> CollectiveCall:
    rounded = wire not in (None, Wire.NATIVE.label)
    is_root = seat.rank == root
    given = batch(tensor, written=not is_root or rounded, folded=False)
    root = checked_rank(seat, root, "root")
    print_ = fingerprint(
        Kind.BROADCAST, None, given.dtype, given.shape, root, AUTO, alias=given.alias
    )
    inputs = given.views if is_root else ()
    outputs = () if is_root and not rounded else given.views
    return CollectiveCall(print_, inputs=inputs, outputs=outputs, in_place=True, result=tensor)


# One block per rank


def all_gather(
    seat: CallerSeat, tensor: Any, output: Any, counts: Sequence[int] | None
) -> CollectiveCall:
    block = _tensors.view(tensor, written=False, folded=False)
    blocks = Blocks.of(seat, block, output, counts)
    if output is None:
        output = blocks.new_whole(block)
    views = blocks.views(output, written=True, folded=False)
    print_ = _fingerprint(Kind.ALL_GATHER, block, blocks.shape, blocks.counts, NO_ROOT)
    return CollectiveCall(print_, inputs=(block,), outputs=views, result=output)


def gather(
    seat: CallerSeat, tensor: Any, root: int, output: Any, counts: Sequence[int] | None
) -> CollectiveCall:
    block = _tensors.view(tensor, written=False, folded=False)
    root = checked_rank(seat, root, "root")
    is_root = seat.rank == root
    if output is not None and not is_root:
        raise InvalidArgument(f"only the root, rank {root}, gets what is gathered: pass no output")
    blocks = Blocks.of(seat, block, output, counts)
    if is_root and output is None:
        output = blocks.new_whole(block)
    views = blocks.views(output, written=True, folded=False) if is_root else ()
    print_ = _fingerprint(Kind.GATHER, block, blocks.shape, blocks.counts, root)
    return CollectiveCall(print_, inputs=(block,), outputs=views, result=output)


def scatter(
    seat: CallerSeat, output: Any, inputs: Any, root: int, counts: Sequence[int] | None
) -> CollectiveCall:
    block = _tensors.view(output, written=True, folded=False)
    root = checked_rank(seat, root, "root")
    is_root = seat.rank == root
    if is_root == (inputs is None):
        raise InvalidArgument(
            f"the root, rank {root}, passes what is scattered, and only the root: "
            f"rank {seat.rank} passed {'none' if inputs is None else 'some'}"
        )
    blocks = Blocks.of(seat, block, inputs, counts)
    views = blocks.views(inputs, written=False, folded=False) if is_root else ()
    print_ = _fingerprint(Kind.SCATTER, block, blocks.shape, blocks.counts, root)
    return CollectiveCall(print_, inputs=views, outputs=(block,), result=output)


def _fingerprint(
    kind: Kind, view: TensorView, shape: tuple[int, ...], counts: tuple[int, ...], root: int
) -> Fingerprint:
    alias = view.element.alias
    return fingerprint(kind, None, view.dtype, shape, root, AUTO, counts=counts, alias=alias)


# One block per pair of ranks


def all_to_all(
    seat: CallerSeat,
    inputs: Any,
    output: Any,
    send_counts: Sequence[int] | None,
    receive_counts: Sequence[int] | None,
) -> CollectiveCall:
    if isinstance(inputs, list | tuple):
        if send_counts is not None or receive_counts is not None:
            raise InvalidArgument("lists of tensors say their sizes themselves: pass no counts")
        return _listed_all_to_all(seat, inputs, output)
    source = _tensors.view(inputs, written=False, folded=False)
    sent = _split(seat, source, send_counts, "send_counts")
    if output is None:
        expected = sent if receive_counts is None else receive_counts
        rows = sum(checked_counts(seat, expected, "receive_counts"))
        output = _tensors.like(inputs, (rows, *tuple(source.tensor.shape)[1:]))
    target = _tensors.view(output, written=True, folded=False)
    received = _split(seat, target, receive_counts, "receive_counts")
    if source.row_shape != target.row_shape:
        raise InvalidArgument(
            f"the rows of the input are {list(source.row_shape)}, those of the output "
            f"{list(target.row_shape)}: they must be equal"
        )
    print_ = _fingerprint(Kind.ALL_TO_ALL, source, source.row_shape, sent + received, NO_ROOT)
    return CollectiveCall(print_, inputs=(source,), outputs=(target,), result=output)


def _listed_all_to_all(seat: CallerSeat, inputs: Sequence[Any], output: Any) -> CollectiveCall:
    """From a list to a list, of tensors of any sizes: a row is one element."""
    sources = tuple(_tensors.view(each, written=False, folded=False) for each in inputs)
    if output is None:
        output = [_tensors.like(view.tensor, tuple(view.tensor.shape)) for view in sources]
    if not isinstance(output, list | tuple) or not len(inputs) == len(output) == seat.world_size:
        raise InvalidArgument(
            f"an all-to-all of lists has {counted(seat.world_size, 'tensor')} in and as many out, "
            f"got {len(inputs)} and "
            f"{len(output) if isinstance(output, list | tuple) else 'a tensor'}"
        )
    targets = tuple(_tensors.view(each, written=True, folded=False) for each in output)
    counts = tuple(view.given_numel for view in sources + targets)
    print_ = _fingerprint(Kind.ALL_TO_ALL, sources[0], (), counts, NO_ROOT)
    return CollectiveCall(print_, inputs=sources, outputs=targets, result=output)


def _split(
    seat: CallerSeat, view: TensorView, counts: Sequence[int] | None, name: str
) -> tuple[int, ...]:
    """Return the number of rows of a tensor that belong to each rank."""
    if counts is None:
        share = even_share(seat, view.rows, f"say with {name}= how many belong to each")
        return (share,) * seat.world_size
    checked = checked_counts(seat, counts, name)
    if sum(checked) != view.rows:
        raise InvalidArgument(
            f"{name} adds up to {counted(sum(checked), 'row')}, the tensor has {view.rows}"
        )
    return checked


def send(seat: CallerSeat, tensor: Any, to: int, tag: int) -> P2PCall:
    peer = _checked_peer(seat, to, "to")
    view = _tensors.view(tensor, written=False, folded=False)
    return P2PCall(Message.SEND, peer, _checked_tag(tag), inputs=(view,))


def recv(seat: CallerSeat, tensor: Any, source: int | None, tag: int) -> P2PCall:
    peer = ANY_SOURCE if source is None else _checked_peer(seat, source, "source")
    view = _tensors.view(tensor, written=True, folded=False)
    return P2PCall(Message.RECV, peer, _checked_tag(tag), outputs=(view,))


def _checked_peer(seat: CallerSeat, rank: int, what: str) -> int:
    peer = checked_rank(seat, rank, what)
    if peer == seat.rank:
        raise InvalidArgument(f"rank {rank} cannot exchange a message with itself")
    return peer


def _checked_tag(tag: int) -> int:
    found = None if isinstance(tag, bool) else whole_numbers([tag])
    if found is None or not -LARGEST <= found[0] < LARGEST:
        raise InvalidArgument(f"a tag is a whole number of 64 bits with its sign, got {tag!r}")
    return found[0]
