"""A call that is like an earlier one does what a call does that is looked at anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import allfold
from allfold._calls.template import likeness
from allfold_core.errors import AllfoldError, InvalidArgument, RegisterNotFirstOperation
from tests.support.fakes.page_ranks import Ranks, ranks

SIZE = 3
ROUNDS = 4
Make = Callable[[Any], Any]


def _array(values: Any) -> Any:
    return np.array(values, np.float32)


def _tensor(values: Any) -> Any:
    return torch.tensor(np.array(values, np.float32))


def _strided(values: Any) -> Any:
    """An array that always takes the general path."""
    wide = np.zeros((*np.shape(values), 2), np.float32)
    wide[..., 0] = values
    return wide[..., 0]


def _all_kinds(group: allfold.Group, make: Make, step: int) -> list[Any]:
    rank, size = group.rank, group.world_size
    mine = [10.0 * step + rank, rank]
    whole = [[step, rank, each] for each in range(size)]
    root = step % size
    at_root = rank == root
    results = [
        group.all_reduce(make(mine)),
        group.all_reduce(make(mine), "mean"),
        group.all_reduce(make(mine), "premul_sum", factor=0.5),
        group.all_reduce(make([mine, mine]), op="max"),
        group.reduce(make(mine), root),
        group.broadcast(make(mine), root),
        group.all_gather(make(mine), make([mine] * size)),
        group.all_gather(make(mine)),
        group.all_gather(make(mine), [make(mine) for _ in range(size)]),
        group.gather(make(mine), root, make([mine] * size) if at_root else None),
        group.scatter(make([0.0] * 3), make(whole) if at_root else None, root),
        group.reduce_scatter(make(whole), make([[0.0] * 3])),
        group.reduce_scatter(make(whole)),
        group.all_to_all(make(whole), make(whole)),
        group.all_to_all([make(each) for each in whole]),
        group.all_reduce([make(mine), make([1.0])]),
    ]
    group.barrier()
    return [_plain(each) for each in results]


def _plain(result: Any) -> Any:
    if isinstance(result, list):
        return [_plain(each) for each in result]
    return None if result is None else np.asarray(result).tolist()


@pytest.mark.parametrize("make", [_array, _tensor], ids=["arrays", "torch tensors"])
def test_all_kinds_have_the_results_of_the_general_path(make: Make) -> None:
    def program(group: allfold.Group, made: Make) -> list[Any]:
        return [_all_kinds(group, made, step) for step in range(ROUNDS)]

    with ranks(SIZE) as general:
        expected = general.all_do(lambda group: program(group, _strided))
    with ranks(SIZE) as prepared:
        assert prepared.all_do(lambda group: program(group, make)) == expected
        assert prepared.groups[0]._prepared


def test_handles_of_repeated_calls_copy_the_result_out() -> None:
    def program(group: allfold.Group) -> list[float]:
        tensors = [torch.full((5,), float(each)) for each in range(6)]
        works = [group.all_reduce(each, async_op=True) for each in tensors]
        return [float(work.wait()[0]) for work in works]

    with ranks(2) as made:
        assert made.all_do(program) == [[2.0 * each for each in range(6)]] * 2


def test_what_is_different_in_anything_is_not_alike() -> None:
    def key(*given: Any, **named: Any) -> Any:
        return likeness(key, given, named)

    array = np.zeros((2, 3), np.float32)
    frozen = array.copy()
    frozen.flags.writeable = False
    tensor = torch.zeros(2, 3)
    keys = [
        key(array), key(array.astype(np.float64)), key(array.reshape(3, 2)), key(array.T),
        key(frozen), key(array, "max"), key(array, factor=1.0), key([array]), key([array] * 2),
        key(array, 1), key(array, 1.0), key(tensor), key(tensor.double()),
        key(tensor.view(-1)), key(array, wire="int8"), key((array.dtype, array.shape)),
    ]  # fmt: skip
    assert len({*keys}) == len(keys)
    assert key(array) == key(np.ones((2, 3), np.float32), timeout=3.0, async_op=True)
    assert key(array, True) is None, "it equals 1, and is no rank"
    assert key(array, "wire", "int8") != key(array, wire="int8")
    unlike = [tensor.t(), tensor.to_sparse(), tensor.to("meta"), object(), torch._neg_view(tensor)]
    assert [key(each) for each in unlike] == [None] * len(unlike)


_MISSPELT: Any = {"tiemout": 1}
REFUSED: dict[str, Callable[[allfold.Group], Any]] = {
    "a read-only array": lambda group: group.all_reduce(_frozen()),
    "an unknown operation": lambda group: group.all_reduce(_array([1.0, 2.0]), "median"),
    "an unknown argument": lambda group: group.all_reduce(_array([1.0, 2.0]), **_MISSPELT),
    "no time": lambda group: group.all_reduce(_array([1.0, 2.0]), timeout=0),
    "a boolean root": lambda group: group.broadcast(_array([1.0, 2.0]), True),
    "a list of numbers": lambda group: group.all_reduce([1.0, 2.0]),
    "an expanded tensor": lambda group: group.all_reduce(torch.ones(1).expand(2)),
    "a mean of integers": lambda group: group.all_reduce(np.array([1, 2]), "mean"),
}


def _frozen() -> Any:
    array = _array([1.0, 2.0])
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_refused_between_calls_that_are_alike(what: str) -> None:
    with ranks(1) as made:
        (group,) = made.groups
        for _ in range(2):
            group.all_reduce(_array([1.0, 2.0]))
            group.broadcast(_array([1.0, 2.0]), 0)
            with pytest.raises(InvalidArgument) as caught:
                REFUSED[what](group)
            if what != "an unknown argument":
                assert made.abandoned(0)["reason"] == caught.value.message


class _Broken:
    @property
    def __cuda_array_interface__(self) -> Any:
        raise ZeroDivisionError("a mistake of a library")


def test_an_error_that_is_none_of_ours_is_told_as_well() -> None:
    with ranks(1) as made:
        (group,) = made.groups
        with pytest.raises(ZeroDivisionError):
            group.reduce(_Broken(), 0)
        told = made.abandoned(0)
        assert told["call"] == "reduce"
        assert told["reason"] == "ZeroDivisionError('a mistake of a library')"
        assert group.all_reduce(_array([1.0])).tolist() == [1.0]


def test_of_many_calls_in_a_row_that_cannot_be_the_last_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allfold._channel.MAX_OPEN_OPS", 3)
    with ranks(1) as made:
        (group,) = made.groups
        for first in (0, 4):
            for _ in range(5):
                with pytest.raises(InvalidArgument):
                    group.all_reduce(_frozen())
            assert group.next_op == first + 3
            made.abandoned(0)
            group.all_reduce(_array([1.0]))


def test_a_function_that_was_called_wrongly_was_not_called() -> None:
    with ranks(1) as made:
        (group,) = made.groups
        wrong: Any = group.all_reduce
        for call in (wrong, lambda: wrong(_array([1.0]), "sum", 3)):
            with pytest.raises(TypeError):
                call()
        assert group.next_op == 0
        assert made.connections[0].told == []


def test_a_group_that_was_left_tells_nobody_of_a_call() -> None:
    with ranks(1) as made:
        (group,) = made.groups
        _leave(made)
        for tensor in (_frozen(), _array([1.0])):
            with pytest.raises((InvalidArgument, RegisterNotFirstOperation)):
                group.all_reduce(tensor)
        assert made.connections[0].told == []


def test_one_tensor_as_input_and_output_says_nothing_of_two() -> None:
    with ranks(1) as made:
        (group,) = made.groups
        same = _array([1.0, 2.0])
        group.all_to_all(same, same)
        source, target = _array([3.0, 4.0]), _array([0.0, 0.0])
        group.all_to_all(source, target)
        assert target.tolist() == [3.0, 4.0]


def test_a_broadcast_without_a_root_looks_for_it_each_time() -> None:
    def program(group: allfold.Group) -> list[Any]:
        found = []
        for source in (0, 1, 0):
            tensor = _array([source, 7.0]) if group.rank == source else None
            found.append(group.broadcast(tensor).tolist())
        return found

    with ranks(2) as made:
        assert made.all_do(program) == [[[0.0, 7.0], [1.0, 7.0], [0.0, 7.0]]] * 2


def _leave(made: Ranks) -> None:
    membership: Any = made.groups[0].membership
    membership.left = True
    membership.check = _refuse


def _refuse() -> None:
    raise RegisterNotFirstOperation("it was left")


def test_a_group_that_was_left_does_nothing_that_it_did_before() -> None:
    with ranks(1) as made:
        (group,) = made.groups
        group.all_reduce(_array([1.0]))
        _leave(made)
        with pytest.raises(RegisterNotFirstOperation):
            group.all_reduce(_array([1.0]))


def test_an_interrupted_call_stays_in_flight_and_its_slot_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks(1) as made:
        (group,) = made.groups
        group.all_reduce(_array([1.0]))
        lane = made.lane(0)
        with monkeypatch.context() as patched:
            patched.setattr(type(lane), "finish_at_once", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                group.all_reduce(_array([1.0]))
        assert len(group._channel.in_flight()) == 1
        assert group.quiesce(5.0)
        for _ in range(2 * made.page.layout.slots):
            group.all_reduce(_array([1.0]))


def _interrupt(*_: Any) -> bool:
    raise KeyboardInterrupt


def test_tensors_of_torch_may_have_other_memory_at_every_call() -> None:
    with ranks(1) as made:
        (group,) = made.groups
        kept = [torch.full((4,), float(each)) for each in range(300)]
        for each, tensor in enumerate(kept):
            assert group.all_reduce(tensor) is tensor
            assert tensor.tolist() == [float(each)] * 4


def test_errors_of_repeated_calls_are_those_of_the_op() -> None:
    with ranks(2) as made:
        made.all_do(lambda group: group.all_reduce(_array([1.0])))
        with pytest.raises(AllfoldError, match="still in flight"):
            made.groups[0].all_reduce(_array([1.0]), async_op=True).wait(0.1)
