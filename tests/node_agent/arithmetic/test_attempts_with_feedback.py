"""The residual of a series when ops of it are given up, or done again."""

import numpy as np

from allfold_agent.arithmetic.codecs import codec_of
from allfold_agent.arithmetic.error_feedback import Residual, ResidualAttempt
from allfold_core.dtypes import Wire

FLOAT32 = np.dtype(np.float32)
VALUES = np.linspace(-1, 1, 256, dtype=FLOAT32)


def encode(attempt: ResidualAttempt, start: int = 0) -> bytes:
    codec = codec_of(Wire.INT8)
    assert codec is not None
    code = bytearray(Wire.INT8.nbytes(len(VALUES), 4))
    attempt.encode(start, VALUES * np.float32(attempt.seq + 1), memoryview(code), codec)
    return bytes(code)


def test_an_attempt_that_was_given_up_was_never_made() -> None:
    residual, plain = Residual(512, FLOAT32), Residual(512, FLOAT32)
    encode(residual.attempt(0))
    encode(plain.attempt(0))
    cancelled = residual.attempt(1)
    encode(cancelled, 256)
    encode(cancelled)
    assert not np.array_equal(residual.values, plain.values)
    cancelled.give_up()
    assert np.array_equal(residual.values, plain.values)
    assert encode(residual.attempt(1)) == encode(plain.attempt(1))


def test_attempts_that_are_given_up_oldest_first_are_undone_newest_first() -> None:
    residual = Residual(256, FLOAT32)
    attempts = [residual.attempt(seq) for seq in range(3)]
    for each in attempts:
        encode(each)
    for each in attempts:
        each.give_up()
    assert not residual.values.any()


def test_what_a_later_op_was_made_from_is_not_undone() -> None:
    residual = Residual(256, FLOAT32)
    first, second = residual.attempt(0), residual.attempt(1)
    encode(first)
    encode(second)
    after = residual.values.copy()
    first.give_up()
    assert np.array_equal(residual.values, after)


def test_an_attempt_changes_nothing_after_it_was_given_up() -> None:
    residual = Residual(256, FLOAT32)
    late = residual.attempt(0)
    late.give_up()
    encode(late)
    assert not residual.values.any()


def test_ops_that_are_final_everywhere_are_remembered_no_more() -> None:
    residual = Residual(256, FLOAT32)
    done = residual.attempt(0)
    encode(done)
    after = residual.values.copy()
    residual.settle(0)
    done.give_up()
    assert np.array_equal(residual.values, after)
