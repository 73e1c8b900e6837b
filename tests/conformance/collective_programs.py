"""Programs of ranks: all collectives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from tests.support import reference, tensors
from tests.support.cases import digest
from tests.support.processes.rank_worker import GROUPS
from tests.support.reference import Collective

_SHOWN = 24
_BACKGROUND = 0x5A

Shape = Sequence[int]


def run(
    group: allfold.Group, rows: Sequence[dict[str, Any]], members: Sequence[int] | None = None
) -> list[list[str]] | None:
    """Per case, the digest of what the rank has in the end, and its first bytes for people.

    With ``members``, in a sub-group of these ranks; ``None`` for a rank that is not one of them.
    """
    if members is not None:
        sub_group = _sub_group(group, members)
        if sub_group is None:
            return None
        group = sub_group
    return [_one(group, Collective(**row)) for row in rows]


def _sub_group(group: allfold.Group, members: Sequence[int]) -> allfold.Group | None:
    """The sub-group of these ranks, made by the first call and kept for later ones."""
    key = f"{group.name} {members}"
    if key not in GROUPS and (made := allfold.new_group(members, group=group)) is not None:
        GROUPS[key] = made
    return GROUPS.get(key)


def _one(group: allfold.Group, case: Collective) -> list[str]:
    call = CollectiveCall(group, case)
    got = getattr(call, case.kind)()
    call.check_surroundings()
    data = b"".join(tensors.to_bytes(each) for each in got)
    return [digest(data), data[:_SHOWN].hex()]


class CollectiveCall:
    """The tensors of one call of this rank, and the call itself."""

    def __init__(self, group: allfold.Group, case: Collective) -> None:
        self._group = group
        self._case = case
        self._rank, self._world = group.rank, group.world_size
        self._data = reference.brought(case, self._rank, self._world)
        self._inputs: list[Any] = []
        self._bases: list[tuple[Any, Any]] = []
        self._options: dict[str, Any] = {"strategy": case.strategy}
        if case.kind in reference.ROOTED:
            self._options["root"] = case.root
        if case.folds:
            self._options["op"] = case.op
            if case.op == "premul_sum":
                self._options["factor"] = case.factor

    # One tensor, or a list of them

    def all_reduce(self) -> list[Any]:
        return self._in_place(self._data)

    def reduce(self) -> list[Any]:
        return self._in_place(self._data)

    def broadcast(self) -> list[Any]:
        return self._in_place(self._data or bytes(self._case.nbytes(sum(self._case.rows))))

    def _in_place(self, data: bytes) -> list[Any]:
        case = self._case
        if case.form == "list":
            given = self._made_list(case.split(data, case.rows), case.rows)
        else:
            given = self._made(data, (sum(case.rows), *case.row))
        assert getattr(self._group, case.kind)(given, **self._options) is given
        return _listed(given)

    # One block per rank

    def all_gather(self) -> list[Any]:
        return self._gathered(self._empty_whole())

    def gather(self) -> list[Any]:
        is_root = self._rank == self._case.root
        return self._gathered(self._empty_whole() if is_root else None)

    def _gathered(self, output: Any) -> list[Any]:
        case = self._case
        block = self._input(self._data, self._block_shape())
        call = getattr(self._group, case.kind)
        got = call(block, output=output, **self._options, **self._counts())
        if case.kind == "gather" and self._rank != case.root:
            assert got is None
            return []
        assert output is None or got is output
        if output is None:
            self._check_new(got, (sum(case.rows), *case.row))
        return _listed(got)

    def scatter(self) -> list[Any]:
        case = self._case
        is_root = self._rank == case.root
        inputs = self._input_whole() if is_root else None
        output = self._output(self._block_shape())
        assert self._group.scatter(output, inputs, **self._options, **self._counts()) is output
        return [output]

    def reduce_scatter(self) -> list[Any]:
        is_new = self._case.form == "new"
        inputs = self._input_whole()
        output = None if is_new else self._output(self._block_shape())
        got = self._group.reduce_scatter(inputs, output, **self._options, **self._counts())
        if is_new:
            self._check_new(got, self._block_shape())
        assert is_new or got is output
        return [got]

    def _counts(self) -> dict[str, Any]:
        case = self._case
        uneven = len(set(case.rows)) > 1
        # A list says its sizes itself, but not to those that have none.
        silent = case.form == "list" and case.kind in ("all_gather", "reduce_scatter")
        return {"counts": case.rows} if case.counts or (uneven and not silent) else {}

    def _block_shape(self) -> Shape:
        return (self._case.rows[self._rank], *self._case.row)

    def _whole_shape(self) -> Shape:
        case = self._case
        if case.form == "stacked" and len(set(case.rows)) == 1:
            return (self._world, case.rows[0], *case.row)
        return (sum(case.rows), *case.row)

    def _empty_whole(self) -> Any:
        case = self._case
        if case.form == "new":
            return None
        if case.form == "list":
            return [self._output((rows, *case.row)) for rows in case.rows]
        return self._output(self._whole_shape())

    def _input_whole(self) -> Any:
        case = self._case
        if case.form == "list":
            return self._input_list(case.split(self._data, case.rows), case.rows)
        return self._input(self._data, self._whole_shape())

    # One block per pair

    def all_to_all(self) -> list[Any]:
        case = self._case
        sent = case.rows_from(self._rank, self._world)
        received = case.rows_to(self._rank, self._world)
        is_new = case.form == "new"
        if case.form == "list":
            inputs = self._input_list(case.split(self._data, sent), sent)
            output: Any = [self._output((rows, *case.row)) for rows in received]
            got = self._group.all_to_all(inputs, output, **self._options)
            assert got is output
            return _listed(got)
        said = case.counts or len({*sent}) > 1 or len({*received}) > 1
        inputs = self._input(self._data, (sum(sent), *case.row))
        output = None if is_new else self._output((sum(received), *case.row))
        got = self._group.all_to_all(
            inputs,
            output,
            send_counts=sent if said else None,
            receive_counts=received if said else None,
            **self._options,
        )
        assert is_new or got is output
        if is_new:
            self._check_new(got, (sum(received), *case.row))
        return [got]

    # Tensors

    def _input_list(self, blocks: Sequence[bytes], rows: Sequence[int]) -> list[Any]:
        made = self._made_list(blocks, rows)
        self._inputs += made
        return made

    def _input(self, data: bytes, shape: Shape) -> Any:
        tensor = self._made(data, shape)
        self._inputs.append(tensor)
        return tensor

    def _output(self, shape: Shape) -> Any:
        """Full of something that a result is not."""
        nbytes = prod(shape) * reference.itemsize(self._case.dtype)
        return self._made(bytes([_BACKGROUND & 1]) * nbytes, shape)

    def _made_list(self, blocks: Sequence[bytes], rows: Sequence[int]) -> list[Any]:
        return [
            self._made(data, (count, *self._case.row))
            for data, count in zip(blocks, rows, strict=True)
        ]

    def _made(self, data: bytes, shape: Shape) -> Any:
        case = self._case
        fresh = tensors.from_bytes(data, shape, case.dtype, torch=case.torch)
        if case.place == "arena":
            return tensors.in_arena(fresh, self._group)
        if case.place == "strided":
            base, view = tensors.strided(fresh)
            self._bases.append((base, tensors.to_bytes(base[..., 1::2])))
            return view
        return fresh

    def _check_new(self, got: Any, shape: Shape) -> None:
        """A result that the caller did not give is like the input."""
        mine = _listed(self._inputs)[0]
        assert type(got) is type(mine)
        assert got.dtype == mine.dtype
        assert tuple(got.shape) == tuple(shape)

    def check_surroundings(self) -> None:
        """Check that inputs are unchanged, and the memory between the elements of results too."""
        given = b"".join(tensors.to_bytes(each) for each in self._inputs)
        assert not self._inputs or given == self._data, "an input has changed"
        for base, between in self._bases:
            assert tensors.to_bytes(base[..., 1::2]) == between, "the surroundings have changed"


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


# Results that overwrite their inputs


def in_place(
    group: allfold.Group, kind: str, counts: Sequence[int], torch: bool, arena: bool
) -> list[float]:
    """A collective whose input is a part of its output, or the other way round; the whole.

    Element k of the whole of rank r is 100 r + k.
    """
    rank, offsets = group.rank, list(accumulate(counts, initial=0))
    values = np.arange(offsets[-1], dtype=np.int64) + 100 * rank
    whole = tensors.from_integers(values, "float32", torch=torch)
    if arena:
        whole = tensors.in_arena(whole, group)
    mine = whole[offsets[rank] : offsets[rank + 1]]
    match kind:
        case "all_gather":
            assert group.all_gather(mine, whole, counts=counts) is whole
        case "gather":
            group.gather(mine, 1, whole if rank == 1 else None, counts=counts)
        case "scatter":
            assert group.scatter(mine, whole if rank == 1 else None, 1, counts=counts) is mine
        case "reduce_scatter":
            assert group.reduce_scatter(whole, mine, counts=counts) is mine
        case "all_to_all":
            assert group.all_to_all(whole, whole) is whole
    return tensors.to_list(whole)


def of_scalars(group: allfold.Group, torch: bool) -> dict[str, Any]:
    """The collectives with blocks on tensors without dimensions: shapes and values."""

    def made(values: Any) -> Any:
        return tensors.from_integers(np.array(values, np.int64), "float32", torch=torch)

    world, rank = group.world_size, group.rank
    block, whole = made(0), made(range(world))
    group.scatter(block, whole if rank == 0 else None, 0)
    listed = [made(0) for _ in range(world)]
    group.all_gather(made(rank), listed)
    found = {
        "all_gather": group.all_gather(made(rank)),
        "all_gather of a list": [float(each) for each in listed],
        "reduce_scatter": group.reduce_scatter(whole, made(0)),
        "scatter": block,
        "all_to_all": group.all_to_all(whole),
    }
    return {
        name: each if isinstance(each, list) else [list(each.shape), tensors.to_list(each)]
        for name, each in found.items()
    }


# Tensors of shapes alone


def shaped(
    group: allfold.Group, kind: str, tensors_of: dict[str, Any], **options: Any
) -> list[Any] | None:
    """A collective on tensors full of rank + 1; the elements of what it returns.

    ``tensors_of`` has by argument ``None``, a shape, or a list of shapes. Where the call fails the
    tensors must be as they were.
    """
    made = {name: _of_shapes(group, each) for name, each in tensors_of.items()}
    flat = [tensor for each in made.values() if each is not None for tensor in _listed(each)]
    try:
        got = getattr(group, kind)(**made, **options)
    except AllfoldError:
        assert all((tensor == group.rank + 1).all() for tensor in flat), "a failed op has changed"
        raise
    return None if got is None else [tensors.to_list(each) for each in _listed(got)]


def _of_shapes(group: allfold.Group, shapes: Any) -> Any:
    if shapes is None:
        return None
    if shapes and isinstance(shapes[0], list):
        return [_of_shapes(group, each) for each in shapes]
    return np.full(tuple(shapes), group.rank + 1, np.float32)


def reduce_scatter_and_all_gather(
    group: allfold.Group, numels: Sequence[int], strategies: Sequence[str]
) -> list[list[str]]:
    """Per size and strategy, the digests of an all-reduce in one step and in two.

    Of whole numbers in float32: their sums do not depend on the order.
    """
    found = []
    for numel in numels:
        values = np.random.default_rng([numel, group.rank]).integers(-999, 999, numel)
        padded = -(-numel // group.world_size) * group.world_size
        for strategy in strategies:
            tensor = values.astype(np.float32)
            whole = np.zeros(padded, np.float32)
            whole[:numel] = tensor
            gathered = group.all_gather(
                group.reduce_scatter(whole, strategy=strategy), strategy=strategy
            )
            group.all_reduce(tensor)
            found.append([digest(tensor.tobytes()), digest(gathered[:numel].tobytes())])
    return found
