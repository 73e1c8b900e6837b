"""The codecs of a few bits: another implementation, and the bounds of docs/precision.md."""

from __future__ import annotations

from math import fsum, isfinite, isnan
from struct import unpack
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

from allfold_agent.arithmetic.codecs import codec_of
from allfold_agent.arithmetic.error_feedback import Residual
from allfold_core.dtypes import Wire
from tests.node_agent.arithmetic.cases import Floats, any_floats, encoded
from tests.support.cases import bfloat16_bits
from tests.support.wires import LOSSY

FEW_BITS = ("int4", "int2", "sign")
# What docs/precision.md promises of the greatest magnitude of a block, and from where on.
DOCUMENTED = {
    "int4": ((1 + 2**-7) / 14, 8.3e-38),
    "int2": (0.8 * (1 + 2**-7), 6e-38),
    "sign": (1.0, 0.0),
}
# Where no scale is too small for its type or, in int4, as large as it can be.
ORDINARY = (1e-30, 3e38)
SIZES = (1, 2, 3, 127, 128, 129, 255, 256, 257, 300, 511, 3 * (1 << 16) + 77)


class Block(NamedTuple):
    """What was given of a block, and what its code says.

    Attributes:
        numbers: the elements of the code, unsigned.
    """

    given: list[float]
    scales: list[float]
    numbers: list[int]
    decoded: list[float]

    @property
    def greatest(self) -> float:
        return max(map(abs, self.given))

    @property
    def is_ordinary(self) -> bool:
        return ORDINARY[0] < self.greatest < ORDINARY[1]

    def meant(self, wire: str) -> list[float]:
        """What docs/protocol.md says that the code stands for."""
        match wire:
            case "int4":
                return [(n - 16 if n > 7 else n) * self.scales[0] for n in self.numbers]
            case "int2":
                return [self.scales[n >> 1] * (-1) ** (n & 1) for n in self.numbers]
        return [self.scales[0] * (-1) ** n for n in self.numbers]

    def mean(self, number: int) -> float:
        """The mean magnitude of what is small (0) or great (1) in int2; 0 where nothing is."""
        chosen = [abs(x) for x, n in zip(self.given, self.numbers, strict=True) if n >> 1 == number]
        return fsum(chosen) / max(1, len(chosen))


def blocks(wire: str, values: Floats) -> list[Block]:
    """Read the code of some values bit by bit."""
    code, decoded = encoded(wire, values)
    found = Wire.from_label(wire)
    per_block = found.scale_bytes // 2
    start = 2 * per_block * -(-len(values) // found.block)
    bits = int.from_bytes(code[start:], "little")
    scales = [_from_bfloat16(code[at : at + 2]) for at in range(0, start, 2)]
    made = []
    for index, first in enumerate(range(0, len(values), found.block)):
        places = range(first, min(first + found.block, len(values)))
        # Cut the block's bits out first: shifts of a long number take long.
        own = bits >> first * found.bits & (1 << found.block * found.bits) - 1
        numbers = [own >> k * found.bits & (1 << found.bits) - 1 for k in range(len(places))]
        made.append(
            Block(
                [float(values[at]) for at in places],
                scales[index * per_block : (index + 1) * per_block],
                numbers,
                [float(decoded[at]) for at in places],
            )
        )
    assert bits >> len(values) * found.bits == 0, "what is left of the last byte is zero"
    return made


def _from_bfloat16(two: bytes) -> float:
    (value,) = unpack("<f", b"\0\0" + two)
    return float(value)


def _bfloat16(value: float) -> float:
    return _from_bfloat16(bfloat16_bits(np.array([value], np.float32)).tobytes())


@pytest.mark.parametrize("wire", FEW_BITS)
@given(values=any_floats())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_a_code_stands_for_what_the_protocol_says(wire: str, values: Floats) -> None:
    for block in blocks(wire, values):
        if all(map(isfinite, block.given)):
            assert block.decoded == block.meant(wire)
        else:
            assert all(map(isnan, [*block.scales, *block.decoded]))
            assert not any(block.numbers)


@pytest.mark.parametrize("wire", FEW_BITS)
@given(values=any_floats(finite=True))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_no_error_is_greater_than_documented(wire: str, values: Floats) -> None:
    share, smallest = DOCUMENTED[wire]
    for block in blocks(wire, values):
        errors = [abs(x - y) for x, y in zip(block.given, block.decoded, strict=True)]
        allowed = share if block.greatest >= smallest else 1.0
        assert max(errors) <= allowed * block.greatest


@given(values=any_floats(finite=True))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_an_int4_is_the_nearest_multiple_of_a_seventh_of_the_greatest(values: Floats) -> None:
    for block in blocks("int4", values):
        if block.is_ordinary:
            [scale] = block.scales
            assert scale == _bfloat16(float(np.float32(block.greatest) / np.float32(7)))
            for x, y in zip(block.given, block.decoded, strict=True):
                assert abs(x - y) <= scale / 2 * (1 + 2**-15)


@given(values=any_floats(finite=True))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_an_int2_is_the_mean_of_the_small_or_of_the_great_with_its_sign(values: Floats) -> None:
    for block in blocks("int2", values):
        if not block.is_ordinary:
            continue
        mean = fsum(map(abs, block.given)) / len(block.given)
        limit = mean / 2 + block.greatest / 5
        for x, n in zip(block.given, block.numbers, strict=True):
            assert n & 1 == np.signbit(x)
            assert abs(x) >= limit * (1 - 1e-5) if n >> 1 else abs(x) <= limit * (1 + 1e-5)
        for number, scale in enumerate(block.scales):
            right = block.mean(number)
            assert abs(scale - right) <= right * (2**-8 + 1e-5) + 2**-126


@given(values=any_floats(finite=True))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_a_sign_is_the_mean_magnitude_with_its_sign(values: Floats) -> None:
    for block in blocks("sign", values):
        assert block.numbers == [int(np.signbit(x)) for x in block.given]
        if block.is_ordinary:
            mean = fsum(map(abs, block.given)) / len(block.given)
            assert abs(block.scales[0] - mean) <= mean * (2**-8 + 1e-5) + 2**-126


@pytest.mark.parametrize("wire", ["int2", "sign"])
@given(values=any_floats(finite=True))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_what_a_block_loses_is_less_than_what_it_is(wire: str, values: Floats) -> None:
    """By the square of its mean magnitude for each element: so error feedback converges."""
    for block in blocks(wire, values):
        if block.is_ordinary:
            scaled = np.array(block.given) / block.greatest
            lost = np.array(block.decoded) / block.greatest - scaled
            won = np.abs(scaled).sum() ** 2 / len(scaled)
            assert (lost**2).sum() <= (scaled**2).sum() - won * (1 - 2**-15) + 1e-9


@pytest.mark.parametrize(("wire", "share"), [("int4", 0.118), ("int2", 0.343), ("sign", 0.602)])
def test_normal_numbers_lose_the_documented_share(wire: str, share: float) -> None:
    values = np.random.default_rng(1).normal(size=1 << 18).astype(np.float32)
    lost = encoded(wire, values)[1] - values
    assert np.linalg.norm(lost) / np.linalg.norm(values) == pytest.approx(share, abs=0.002)


@pytest.mark.parametrize("wire", FEW_BITS)
def test_elements_of_one_magnitude_are_exact_and_one_alone_is_not_spread(wire: str) -> None:
    signs = np.where(np.random.default_rng(2).random(1000) < 0.5, -1, 1).astype(np.float32)
    # A seventh of it is a bfloat16, too.
    assert np.array_equal(encoded(wire, 3.5 * signs)[1], 3.5 * signs)
    if wire != "sign":
        alone = np.zeros(1000, np.float32)
        alone[500] = -3.5
        assert np.array_equal(encoded(wire, alone)[1], alone)


@pytest.mark.parametrize("wire", ["int8", *FEW_BITS])
@pytest.mark.parametrize("numel", SIZES)
def test_chunks_of_whole_blocks_have_the_code_of_the_whole(wire: str, numel: int) -> None:
    """So where a tensor is cut makes no difference, nor how much is encoded at a time."""
    values = np.random.default_rng(numel).normal(size=numel).astype(np.float32)
    code, decoded = encoded(wire, values)
    for cut in range(0, numel, max(256, numel // 3 // 256 * 256)):
        parts = [encoded(wire, part) for part in (values[:cut], values[cut:])]
        assert np.array_equal(np.concatenate([part[1] for part in parts]), decoded)
        starts = [Wire.from_label(wire).scales_nbytes(each) for each in (cut, numel - cut)]
        scales = [part[0][:start] for part, start in zip(parts, starts, strict=True)]
        elements = [part[0][start:] for part, start in zip(parts, starts, strict=True)]
        assert b"".join(scales + elements) == code


@pytest.mark.parametrize("wire", ["int8", *FEW_BITS])
def test_the_largest_numbers_stay_finite(wire: str) -> None:
    largest = np.finfo(np.float32).max
    for values in (
        np.full(300, -largest),
        largest * np.linspace(-1, 1, 256, dtype=np.float32),
        np.full(300, largest) * (np.arange(300) % 50 == 7),
    ):
        block = values.astype(np.float32)
        decoded = encoded(wire, block)[1].astype(np.float64)
        assert np.isfinite(decoded).all()
        assert np.abs(decoded - block).max() <= DOCUMENTED.get(wire, (1 / 250,))[0] * largest


@pytest.mark.parametrize("wire", LOSSY)
def test_with_error_feedback_the_mean_of_many_codes_becomes_exact(wire: str) -> None:
    """Of outliers late in sign: their residual has to be as great as the mean of their block."""
    values = np.random.default_rng(3).normal(size=700).astype(np.float32)
    codec, residual = codec_of(Wire.from_label(wire)), Residual(700, values.dtype)
    assert codec is not None
    once = np.abs(encoded(wire, values)[1] - values).mean()
    total, times = np.zeros(700), 300
    for seq in range(times):
        decoded, code = values.copy(), bytearray(Wire.from_label(wire).nbytes(700, 4))
        residual.attempt(seq).encode(0, decoded, memoryview(code), codec)
        total += decoded
    assert np.abs(total / times - values).mean() <= once / 30
