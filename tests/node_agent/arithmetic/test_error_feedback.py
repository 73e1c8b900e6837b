"""The lifetime of the encoding errors that an agent keeps for a series of ops."""

from __future__ import annotations

import numpy as np

from allfold_agent.arithmetic.codecs import codec_of
from allfold_agent.arithmetic.error_feedback import Residual, ResidualAttempt, Residuals
from allfold_core.dtypes import Wire
from allfold_core.operations import Kind
from allfold_core.schedules.parts import layout

NUMEL = 256
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
NBYTES = 4 * NUMEL


def test_what_is_owed_to_one_block_is_not_paid_to_the_one_that_lies_there_now() -> None:
    one, other = (
        layout(Kind.REDUCE_SCATTER, (4, 4, 4), -1, placement, 2).parts
        for placement in (((0,), (1,), (2,)), ((1,), (0,), (2,)))
    )
    residuals = Residuals()
    kept = residuals.of(1, 12, FLOAT32, one)
    assert residuals.of(1, 12, FLOAT32, one) is kept
    assert residuals.of(1, 12, FLOAT32, other) is not kept


def test_a_series_keeps_its_residual() -> None:
    residuals = Residuals()
    kept = residuals.of(1, NUMEL, FLOAT32)
    assert kept.values.tolist() == [0.0] * NUMEL
    assert residuals.of(2, NUMEL, FLOAT32) is not kept
    assert residuals.of(1, NUMEL, FLOAT32) is kept


def test_a_series_of_another_size_or_type_begins_anew_and_the_old_memory_is_freed() -> None:
    residuals = Residuals()
    residuals.of(1, NUMEL, FLOAT32)
    assert len(residuals.of(1, 2 * NUMEL, FLOAT32).values) == 2 * NUMEL
    assert residuals.of(1, NUMEL, FLOAT64).values.dtype == FLOAT64
    assert residuals.nbytes == 2 * NBYTES


def test_the_series_that_rests_longest_is_forgotten_where_memory_ends() -> None:
    residuals = Residuals(limit=3 * NBYTES)
    first, second, third = (residuals.of(series, NUMEL, FLOAT32) for series in (1, 2, 3))
    assert residuals.of(1, NUMEL, FLOAT32) is first
    residuals.of(4, NUMEL, FLOAT32)
    assert residuals.nbytes == 3 * NBYTES
    assert residuals.of(1, NUMEL, FLOAT32) is first
    assert residuals.of(3, NUMEL, FLOAT32) is third
    assert residuals.of(2, NUMEL, FLOAT32) is not second


def test_names_without_end_take_memory_with_an_end() -> None:
    residuals = Residuals(limit=3 * NBYTES)
    for series in range(100):
        residuals.of(series, NUMEL, FLOAT32)
        assert residuals.nbytes <= 3 * NBYTES


def test_one_series_may_take_more_than_the_limit() -> None:
    residuals = Residuals(limit=NBYTES)
    kept = residuals.of(1, 2 * NUMEL, FLOAT32)
    assert residuals.of(1, 2 * NUMEL, FLOAT32) is kept


def sent(attempt: ResidualAttempt, value: float, weight: float) -> float:
    """What one number is sent as, in units of the weight in it; 1.0 is the mean beside it."""
    codec, values = codec_of(Wire.SIGN), np.array([value, 1.0], np.float32) * np.float32(weight)
    assert codec is not None
    attempt.encode(0, values, memoryview(bytearray(Wire.SIGN.nbytes(2, 4))), codec, weight)
    return float(values[0]) / weight if weight else float(values[0])


def test_what_rounding_has_cost_comes_back_by_the_weight_of_the_op_that_it_is_added_to() -> None:
    residual = Residual(2, FLOAT32)
    assert sent(residual.attempt(0, 2.0**20), 3.0, 2.0**20) == 2.0
    assert residual.values.tolist() == [1.0, -1.0]
    assert sent(residual.attempt(1, 0.0), 0.0, 0.0) == 0.0
    assert residual.values.tolist() == [1.0, -1.0]
    assert sent(residual.attempt(2, 4.0), 3.0, 4.0) == 2.0
    assert residual.values.tolist() == [2.0, -2.0]


def test_what_came_too_late_comes_back_by_the_weight_of_the_node_in_whatever_it_is_in() -> None:
    residual = Residual(2, FLOAT32)
    residual.add(np.array([6.0, 6.0], np.float32))
    assert residual.nbytes == 2 * residual.values.nbytes
    assert sent(residual.attempt(0, 0.0), 1.0, 8.0) == 1.0
    assert sent(residual.attempt(1, 2.0), 1.0, 8.0) == 1.0 + 6.0 * 2 / 8
    assert sent(residual.attempt(2, 2.0), 1.0, 8.0) == 1.0
    residual.settle(2)
    assert residual.nbytes == residual.values.nbytes


def test_what_came_too_late_waits_on_where_an_attempt_is_given_up() -> None:
    residual = Residual(2, FLOAT32)
    residual.add(np.array([6.0, 6.0], np.float32))
    first, second = residual.attempt(0, 1.0), residual.attempt(1, 1.0)
    assert sent(first, 1.0, 1.0) == 7.0
    assert sent(second, 1.0, 1.0) == 1.0
    residual.add(np.array([1.0, 1.0], np.float32))
    first.give_up()
    assert sent(residual.attempt(2, 1.0), 1.0, 1.0) == 8.0
