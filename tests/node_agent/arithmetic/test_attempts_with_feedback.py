"""The residual of a series when ops of it are given up, or done again."""

import torch

from allfold_agent.arithmetic.codecs import codec_of
from allfold_agent.arithmetic.error_feedback import Residual, ResidualAttempt
from allfold_core.dtypes import Wire

VALUES = torch.linspace(-1, 1, 256, dtype=torch.float32)


def encode(attempt: ResidualAttempt, start: int = 0) -> torch.Tensor:
    codec = codec_of(Wire.INT8)
    assert codec is not None
    code = torch.empty(Wire.INT8.nbytes(len(VALUES), 4), dtype=torch.uint8)
    attempt.encode(start, VALUES * (attempt.seq + 1), code, codec)
    return code


def test_an_attempt_that_was_given_up_was_never_made() -> None:
    residual, plain = Residual(512, torch.float32), Residual(512, torch.float32)
    encode(residual.attempt(0))
    encode(plain.attempt(0))
    cancelled = residual.attempt(1)
    encode(cancelled, 256)
    encode(cancelled)
    assert not torch.equal(residual.values, plain.values)
    cancelled.give_up()
    assert torch.equal(residual.values, plain.values)
    assert torch.equal(encode(residual.attempt(1)), encode(plain.attempt(1)))


def test_attempts_that_are_given_up_oldest_first_are_undone_newest_first() -> None:
    residual = Residual(256, torch.float32)
    attempts = [residual.attempt(seq) for seq in range(3)]
    for each in attempts:
        encode(each)
    for each in attempts:
        each.give_up()
    assert not residual.values.any()


def test_what_a_later_op_was_made_from_is_not_undone() -> None:
    residual = Residual(256, torch.float32)
    first, second = residual.attempt(0), residual.attempt(1)
    encode(first)
    encode(second)
    after = residual.values.clone()
    first.give_up()
    assert torch.equal(residual.values, after)


def test_an_attempt_changes_nothing_after_it_was_given_up() -> None:
    residual = Residual(256, torch.float32)
    late = residual.attempt(0)
    late.give_up()
    encode(late)
    assert not residual.values.any()


def test_ops_that_are_final_everywhere_are_remembered_no_more() -> None:
    residual = Residual(256, torch.float32)
    done = residual.attempt(0)
    encode(done)
    after = residual.values.clone()
    residual.settle(0)
    done.give_up()
    assert torch.equal(residual.values, after)
