"""The sparse codec: another implementation, and the bounds of docs/precision.md."""

from __future__ import annotations

from math import fsum, inf, nan
from struct import unpack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_agent.arithmetic.codecs import codec_of
from allfold_agent.arithmetic.error_feedback import Residual
from allfold_core.dtypes import Wire
from tests.node_agent.arithmetic.cases import Floats, any_floats, encoded
from tests.support.cases import bfloat16_bits

BLOCK, SCALES = 4096, 7
# Whose magnitudes have a mean together, of those chosen in falling order.
RANGES = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
SIZES = (1, 2, 63, 64, 65, 700, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 17 * BLOCK + 400)


def magnitude(value: float) -> int:
    """The bits of a magnitude, which are in the order of numbers."""
    return int(np.abs(np.float32(value)).view(np.uint32))


def bfloat16(value: float) -> float:
    with np.errstate(over="ignore"):
        return from_bfloat16(bfloat16_bits(np.array([value], np.float32)).tobytes())


def from_bfloat16(two: bytes) -> float:
    (value,) = unpack("<f", b"\0\0" + two)
    return float(value)


def wanted(block: list[float]) -> tuple[list[int], list[float]]:
    """The places to choose and the scales, as docs/precision.md describes them."""
    count = -(-len(block) // 64)
    places = sorted(range(len(block)), key=lambda at: (-magnitude(block[at]), at))[:count]
    chosen = [abs(block[at]) for at in places]
    parts = [chosen[first:stop] for first, stop in RANGES]
    means = [fsum(part) / len(part) if part else 0.0 for part in parts]
    return places, [bfloat16(mean) if mean >= 2.0**-125 else mean for mean in means]


def read(code: bytes, numel: int) -> list[tuple[list[float], list[int], list[int]]]:
    """Scales, places and signs of each block, bit by bit as docs/protocol.md has them."""
    blocks = -(-numel // BLOCK)
    halves = [from_bfloat16(code[at : at + 2]) for at in range(0, 2 * SCALES * blocks, 2)]
    bits = int.from_bytes(code[2 * SCALES * blocks :], "little")
    found = []
    for index in range(blocks):
        count = -(-min(BLOCK, numel - index * BLOCK) // 64)
        own = [bits >> 13 * (index * 64 + each) & 0x1FFF for each in range(count)]
        scales = halves[index * SCALES : (index + 1) * SCALES]
        found.append((scales, [each >> 1 for each in own], [each & 1 for each in own]))
    assert bits >> 13 * -(-numel // 64) == 0, "what is left of the last byte is zero"
    return found


def check(values: Floats) -> None:
    """Hold a code to the other implementation, block by block."""
    code, decoded = encoded("topk", values)
    for index, (scales, places, signs) in enumerate(read(code, len(values))):
        part = slice(index * BLOCK, (index + 1) * BLOCK)
        block = [float(value) for value in values[part]]
        if not np.isfinite(values[part]).all():
            assert np.isnan(decoded[part]).all()
            assert np.isnan(scales[: sum(first < len(places) for first, _ in RANGES)]).all()
            assert not any(places + signs)
            continue
        right, means = wanted(block)
        assert places == right
        assert signs == [int(np.signbit(block[at])) for at in places]
        for scale, mean in zip(scales, means, strict=True):
            # Too small for bfloat16's normal range: 0, or the smallest of it.
            assert scale == mean if mean >= 2.0**-125 else scale in (0.0, 2.0**-126, 2.0**-125)
        meant = np.zeros(len(block))
        shared = [scales[k] for k, (first, stop) in enumerate(RANGES) for _ in range(first, stop)]
        for at, sign, scale in zip(places, signs, shared, strict=False):
            meant[at] = -scale if sign else scale
        assert np.array_equal(decoded[part], meant)


@given(values=any_floats())
@settings(max_examples=20, derandomize=True, deadline=None)
def test_the_greatest_of_a_short_block_travel_and_all_else_becomes_zero(values: Floats) -> None:
    check(values)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
def test_blocks_of_any_length_travel_as_the_protocol_says(numel: int, wide: bool) -> None:
    dice = np.random.default_rng(numel)
    values = dice.standard_t(2, size=numel).astype(np.float32)
    check(values)
    if wide:
        assert encoded("topk", values.astype(np.float64))[0] == encoded("topk", values)[0]


@given(
    levels=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, derandomize=True, deadline=None)
def test_of_equal_magnitudes_the_first_are_chosen(levels: int, share: float, seed: int) -> None:
    """In blocks of few different numbers, of nothing but zeros, and of zeros with a few others."""
    dice = np.random.default_rng(seed)
    values = dice.integers(1, levels + 1, 2 * BLOCK + 500) * dice.choice([-1, 1], 2 * BLOCK + 500)
    check((values * (dice.random(len(values)) < share)).astype(np.float32))


def test_the_greatest_are_found_wherever_they_lie() -> None:
    """Also all in a few of the groups by which the threshold is found: place modulo 256."""
    values = np.random.default_rng(4).normal(size=3 * BLOCK).astype(np.float32)
    values[BLOCK : 2 * BLOCK].reshape(16, 256)[:, 5:10] *= 100
    values[2 * BLOCK :][100:200] *= -100
    check(values)


@pytest.mark.parametrize("odd", [inf, -inf, nan])
def test_a_block_that_is_not_finite_is_nan_and_no_other_is(odd: float) -> None:
    values = np.random.default_rng(5).normal(size=3 * BLOCK + 10).astype(np.float32)
    values[BLOCK + 17] = odd
    check(values)
    values[-1] = odd
    check(values)


def test_the_largest_numbers_stay_finite_and_what_is_too_large_for_float32_does_not() -> None:
    values = np.full(BLOCK, np.finfo(np.float32).max)
    assert np.isfinite(encoded("topk", values.astype(np.float32))[1]).all()
    assert np.isnan(encoded("topk", np.full(100, 1e300))[1]).all()


@given(values=any_floats(finite=True), seed=st.integers(0, 100))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_no_error_is_greater_than_the_greatest_and_the_squares_lost_are_as_documented(
    values: Floats, seed: int
) -> None:
    """At least a 128th of the squares is won, so that error feedback converges."""
    long = np.random.default_rng(seed).standard_t(1 + seed / 10, size=BLOCK + 100)
    for whole in (values, long.astype(np.float32)):
        decoded = encoded("topk", whole)[1]
        for start in range(0, len(whole), BLOCK):
            block = whole[start : start + BLOCK].astype(np.float64)
            lost, greatest = decoded[start : start + BLOCK] - block, np.abs(block).max()
            assert np.abs(lost).max() <= greatest
            if 1e-30 < greatest < 3e38:
                squares = (block / greatest) ** 2
                won = squares.sum() - ((lost / greatest) ** 2).sum()
                assert won >= squares.sum() / 128 * (1 - 2**-15)


def test_numbers_lose_the_documented_share() -> None:
    dice = np.random.default_rng(1)
    for values, share in ((dice.normal(size=1 << 19), 0.938), (dice.laplace(size=1 << 19), 0.886)):
        given = values.astype(np.float32)
        lost = encoded("topk", given)[1] - given
        assert np.linalg.norm(lost) / np.linalg.norm(given) == pytest.approx(share, abs=0.002)


@pytest.mark.parametrize("numel", SIZES)
def test_chunks_of_whole_blocks_have_the_code_of_the_whole(numel: int) -> None:
    values = np.random.default_rng(numel).normal(size=numel).astype(np.float32)
    code, decoded = encoded("topk", values)
    for cut in range(0, numel, 2 * BLOCK):
        parts = [encoded("topk", part) for part in (values[:cut], values[cut:])]
        assert np.array_equal(np.concatenate([part[1] for part in parts]), decoded)
        starts = [Wire.TOPK.scales_nbytes(each) for each in (cut, numel - cut)]
        scales = [part[0][:start] for part, start in zip(parts, starts, strict=True)]
        elements = [part[0][start:] for part, start in zip(parts, starts, strict=True)]
        assert b"".join(scales + elements) == code


def test_what_was_delivered_and_what_is_owed_is_exactly_what_was_given() -> None:
    """Of whole numbers, whose means in bfloat16 and all sums of these are exact in float32."""
    dice = np.random.default_rng(6)
    numel, times, codec = BLOCK + 300, 200, codec_of(Wire.TOPK)
    assert codec is not None
    residual = Residual(numel, np.dtype(np.float32))
    given, delivered = np.zeros(numel), np.zeros(numel)
    code = memoryview(bytearray(Wire.TOPK.nbytes(numel, 4)))
    for seq in range(times):
        values = dice.integers(-8, 9, numel).astype(np.float32)
        given += values
        residual.attempt(seq).encode(0, values, code, codec)
        assert 0 < np.count_nonzero(values) <= Wire.TOPK.travelling(numel)
        delivered += values
        assert np.array_equal(delivered + residual.values, given)


def test_with_error_feedback_every_element_has_its_turn() -> None:
    """So what is owed stays some times what a call brings, and the mean of all becomes exact."""
    values = np.random.default_rng(3).normal(size=BLOCK).astype(np.float32)
    codec, residual = codec_of(Wire.TOPK), Residual(BLOCK, values.dtype)
    assert codec is not None
    total, times = np.zeros(BLOCK), 600
    for seq in range(times):
        sent, code = values.copy(), memoryview(bytearray(118))
        residual.attempt(seq).encode(0, sent, code, codec)
        total += sent
    mean = np.abs(values).mean()
    assert np.abs(total / times - values).mean() <= 100 * mean / times
    assert np.abs(residual.values).max() <= 200 * mean
