"""The weight of a rank in a round: a number within limits, or it is refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from allfold._calls.call import CallerSeat
from allfold._calls.options import agreed
from allfold._calls.reductions import weighted_mean
from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import AUTO, GREATEST_WEIGHT, LEAST_WEIGHT, Fingerprint

SEAT = CallerSeat("group", 0, 2)


def call_of(weight: Any) -> Fingerprint:
    tensor = np.zeros(2, np.float32)
    return weighted_mean(SEAT, tensor, "mean", weight, None, None, is_elastic=False).fingerprint


def factor(weight: Any) -> float:
    return call_of(weight).factor


@pytest.mark.parametrize("weight", [0, -0.0, LEAST_WEIGHT, 1, np.float32(2), GREATEST_WEIGHT])
def test_a_weight_is_0_or_within_the_limits(weight: Any) -> None:
    assert factor(weight) == float(weight)


@pytest.mark.parametrize(
    ("weight", "shown"),
    [
        (-1, "-1"),
        (0.9e-12, "9e-13"),
        (1.1e15, "1100000000000000.0"),
        (5e-324, "5e-324"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "None"),
        ("2", "'2'"),
        (10**400, f"1{'0' * 59}..."),
        (10**5000, "a whole number of 16610 bits"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_anything_else_is_refused(weight: Any, shown: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        factor(weight)
    right = f"weight= is 0 or a number from 1e-12 to 1e+15, got {shown}"
    assert caught.value.message == right


def test_a_wire_without_room_for_weights_is_refused_and_not_used_where_it_is_the_groups() -> None:
    call = call_of(1.0)
    with pytest.raises(InvalidArgument, match=r"'float16' is not for weighted means.*bfloat16"):
        agreed(call, AUTO, "float16", None, "native")
    assert Fingerprint.unpack(agreed(call, AUTO, None, None, "float16")).wire is Wire.NATIVE
    assert Fingerprint.unpack(agreed(call, AUTO, None, None, "bfloat16")).wire is Wire.BFLOAT16
