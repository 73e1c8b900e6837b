"""The element types of callers: what ranks must agree on, however the elements travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from allfold._calls import movement, reductions
from allfold._calls.call import CallerSeat
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint

SEAT = CallerSeat("g", 0, 2)
FIELDS = np.dtype([("a", np.int32), ("b", np.float32)])
LONG = np.dtype([(f"a_field_with_a_long_name_{number}", np.int32) for number in range(4)])
LONGER = np.dtype([(f"a_field_with_a_long_name_{number}", np.float32) for number in range(4)])
# All of the same size, 16 bytes a row of four: what travels has the same bytes.
ALIKE: list[Any] = [
    np.zeros((2, 4), np.float32),
    np.zeros((2, 2), np.complex64),
    np.zeros((2, 1), np.complex128),
    np.zeros((2, 8), np.uint16),
    np.zeros((2, 4), np.uint32),
    np.zeros((2, 2), "M8[s]"),
    np.zeros((2, 2), "M8[us]"),
    np.zeros((2, 16), np.uint8),
    np.zeros((2, 2), FIELDS),
    np.zeros((2, 2), np.dtype([("a", np.int32), ("b", np.int32)])),
    np.zeros((2, 1), LONG),
    np.zeros((2, 1), LONGER),
    np.zeros((2, 16), "V1"),
    torch.zeros((2, 16), dtype=torch.float8_e4m3fn),
    torch.zeros((2, 16), dtype=torch.float8_e5m2),
    torch.empty((2, 8), dtype=torch.bits16),
    torch.zeros((2, 16), dtype=torch.bool),
]


def broadcast(tensor: Any) -> Fingerprint:
    return movement.broadcast(SEAT, tensor, 0, None).fingerprint


def test_tensors_of_different_types_are_different_calls_whatever_bytes_travel() -> None:
    moved = [movement.all_gather(SEAT, tensor, None, None).fingerprint for tensor in ALIKE]
    uneven = [movement.all_gather(SEAT, tensor, None, [2, 1]).fingerprint for tensor in ALIKE[:-1]]
    for calls in ([broadcast(tensor) for tensor in ALIKE], moved, uneven):
        assert len({call.pack() for call in calls}) == len(calls)
        for call in calls:
            assert Fingerprint.unpack(call.pack()) == call


def test_a_message_says_the_type_and_the_shape_of_the_caller() -> None:
    shown = {broadcast(tensor).describe().removesuffix(", root=0)") for tensor in ALIKE}
    assert {
        "broadcast(complex64[2, 2]",
        "broadcast(uint16[2, 8]",
        "broadcast(datetime64[us][2, 2]",
        "broadcast([('a', '<i4'), ('b', '<f4')][2, 2]",
        "broadcast(float8_e5m2[2, 16]",
        "broadcast(bits16[2, 8]",
    } <= shown
    folded = reductions.all_reduce(np.zeros((3,), np.complex64), "sum", None).fingerprint
    assert folded.describe() == "all_reduce(sum, complex64[3])"
    assert folded.numel == 6


def test_libraries_that_have_a_type_of_one_name_can_be_in_one_op() -> None:
    for name in ("complex64", "uint16", "int32", "bool", "float64"):
        array, tensor = np.zeros(3, name), torch.zeros(3, dtype=getattr(torch, name))
        assert broadcast(array).pack() == broadcast(tensor).pack()


def test_a_list_counts_the_elements_of_the_caller() -> None:
    listed = [np.zeros(3, np.uint16), np.zeros((), np.uint16)]
    assert broadcast(listed).describe() == "broadcast(uint16[4], root=0)"
    sizes = [np.zeros(3, np.uint16), np.zeros(1, np.uint16)]
    gathered = movement.all_gather(SEAT, listed[0], sizes, None).fingerprint
    assert gathered.describe() == "all_gather(uint16[*], rows (3, 1))"
    exchanged = movement.all_to_all(SEAT, sizes, sizes[::-1], None, None).fingerprint
    assert exchanged.describe() == "all_to_all(uint16[*], sends (3, 1) and receives (1, 3))"
    assert exchanged.numel == 2


def test_an_element_of_no_bytes_is_moved() -> None:
    nothing = broadcast(np.zeros(3, "V0"))
    assert nothing.numel == 0
    assert nothing.describe() == "broadcast(void[3], root=0)"
    assert Fingerprint.unpack(nothing.pack()) == nothing


def test_a_size_that_does_not_fit_is_told_in_the_elements_of_the_caller() -> None:
    with pytest.raises(InvalidArgument, match=r"have 6 elements together, .* has 5"):
        movement.all_gather(SEAT, np.zeros(3, np.uint16), np.zeros(5, np.uint16), None)


def test_a_message_carries_the_type_of_the_caller() -> None:
    (view,) = movement.send(SEAT, np.zeros(3, np.uint16), 1, 0).inputs
    assert (view.element.label, view.element.alias.width) == ("uint16", 2)
