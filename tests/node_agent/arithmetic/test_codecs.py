"""The codecs: what a format promises of every element, whatever its bits are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from allfold_agent.arithmetic.codecs import codec_of
from allfold_core.dtypes import Wire
from tests.node_agent.arithmetic.cases import QUIET_AND_LOUD, Floats, any_floats, encoded
from tests.support.cases import bfloat16_bits
from tests.support.wires import LOSSY, OF_BLOCKS

CASTS_IN_16_BITS = ("bfloat16", "float16")
# What docs/precision.md promises, and from where to where: a share of each magnitude, of int8 of
# the block's greatest. In int8 rounding the scale up costs up to 2^-15 of half of it, and the
# arithmetic with 127 of it about as much.
DOCUMENTED = {
    "bfloat16": (2.0**-8, 1.2e-38, 3.39e38),
    "float16": (2.0**-11, 6.2e-5, 65504.0),
    "int8": ((1 + 2.0**-14) / 254, 1.5e-36, float(np.finfo(np.float32).max)),
}
# A scale is the block's greatest magnitude by 127, in units of 2^-149 rounded up to a multiple of
# 2^8; less than 2^23 of them, the smallest normal number, are 0. So that is what becomes of what
# rounds to at most 2^23 - 2^8 units.
GREATEST_LOST = 127 * (2.0**23 - 2**8 + 0.5) * 2.0**-149
# 127 times the largest scale of 16 bits of which that is a float32.
GREATEST_KEPT = 127 * (2.0**121 * (1 + 2.0**-7 + 2.0**-14))


def test_the_native_format_has_no_codec() -> None:
    assert codec_of(Wire.NATIVE) is None


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("wire", [wire for wire in LOSSY if wire != "int2"])
@given(values=any_floats())
@settings(max_examples=120, derandomize=True, deadline=None)
def test_what_was_decoded_encodes_to_the_same_bytes_again(
    wire: str, wide: bool, values: Floats
) -> None:
    """But for int2: which elements are great depends on the greatest, which becomes a mean."""
    with np.errstate(invalid="ignore"):
        given = values.astype(np.float64) if wide else values
    code, decoded = encoded(wire, given)
    again = encoded(wire, decoded)[0]
    if wire == "float16":  # torch does not keep the bits of its NaNs
        number = ~np.isnan(decoded)
        codes = [np.frombuffer(each, np.uint16)[number].tobytes() for each in (code, again)]
        assert codes[0] == codes[1]
    else:
        assert again == code


@given(values=any_floats())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_bfloat16_and_float16_round_to_nearest_and_ties_to_even(values: Floats) -> None:
    """As another implementation does it, bit for bit where it is a number."""
    number = ~np.isnan(values)
    for wire, right in (
        ("bfloat16", (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)),
        ("float16", _as_float16(values)),
    ):
        decoded = encoded(wire, values)[1]
        assert decoded[number].tobytes() == right[number].tobytes()
        assert np.isnan(decoded[~number]).all()


def _as_float16(values: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("wire", "roundoff", "tiny"), [("bfloat16", 2**-8, 2**-134), ("float16", 2**-11, 2**-25)]
)
@given(values=any_floats(finite=True))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_the_error_of_a_cast_is_at_most_what_is_promised(
    wire: str, roundoff: float, tiny: float, values: Floats
) -> None:
    decoded = encoded(wire, values)[1].astype(np.float64)
    fits = np.isfinite(decoded)
    error = np.abs(decoded - values)[fits]
    assert (error <= np.maximum(roundoff * np.abs(values, dtype=np.float64)[fits], tiny)).all()
    greatest = 65504.0 if wire == "float16" else float(np.finfo(np.float32).max) * (1 - 2**-9)
    assert (np.abs(values[~fits]) > greatest).all(), "only what does not fit becomes infinite"
    assert (np.signbit(decoded[~fits]) == np.signbit(values[~fits])).all()


def test_a_wider_type_is_rounded_to_float32() -> None:
    values = np.array([1 + 2**-30, 1 / 3, 1e300, -1e300, np.nan, 0.1])
    decoded = encoded("float32", values)[1]
    with np.errstate(over="ignore"):
        assert decoded.tobytes() == values.astype(np.float32).astype(np.float64).tobytes()


@pytest.mark.parametrize("wire", CASTS_IN_16_BITS)
def test_the_error_of_a_cast_is_as_documented_to_the_ends_of_the_range(wire: str) -> None:
    roundoff, smallest, greatest = DOCUMENTED[wire]
    for first, last in ((smallest, 2 * smallest), (greatest / 2, greatest)):
        values = np.linspace(first, last, 1000).astype(np.float32)
        error = np.abs(encoded(wire, values)[1].astype(np.float64) - values)
        assert (error <= roundoff * values.astype(np.float64)).all()


def check_int8(values: Floats) -> None:
    """Hold every block to what is promised: about half of its scale, or 0 if it is too small."""
    roundoff, _, greatest_promised = DOCUMENTED["int8"]
    decoded = encoded("int8", values)[1]
    for start in range(0, len(values), Wire.INT8.block):
        block = values[start : start + Wire.INT8.block].astype(np.float64)
        got = decoded[start : start + Wire.INT8.block].astype(np.float64)
        greatest = np.abs(block).max()
        if greatest <= GREATEST_LOST:
            assert not got.any()
        elif greatest <= greatest_promised:
            assert np.abs(got - block).max() <= roundoff * greatest
            kept = min(greatest, GREATEST_KEPT) * (1 - 2**-23)
            assert kept <= np.abs(got).max() <= greatest * (1 + 2**-14)


@given(values=any_floats(finite=True))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_error_of_int8_is_at_most_half_of_its_scale(values: Floats) -> None:
    """The scale is the greatest magnitude of the block by 127; a block of next to nothing is 0."""
    check_int8(values)


def test_an_int8_block_is_zero_up_to_the_threshold_and_exact_enough_above_it() -> None:
    """The two thresholds are neighbours among the float32 numbers."""
    lost = np.float32(GREATEST_LOST)
    if float(lost) > GREATEST_LOST:
        lost = np.nextafter(lost, np.float32(0))
    kept = np.nextafter(lost, np.float32(1))
    levels = np.linspace(-1, 1, 2 * Wire.INT8.block, dtype=np.float32)
    code, decoded = encoded("int8", lost * levels)
    assert not decoded.any()
    assert not any(code)
    decoded = encoded("int8", kept * levels)[1]
    assert decoded[0] == -decoded[-1] == -127 * 2.0**-126
    check_int8(kept * levels)
    assert float(kept) < DOCUMENTED["int8"][1], "so what is documented is not lost"


def test_the_largest_numbers_stay_finite_in_int8_and_encode_to_the_same_bytes_again() -> None:
    largest = np.float32(np.finfo(np.float32).max)
    values = largest * np.linspace(-1, 1, Wire.INT8.block, dtype=np.float32)
    check_int8(values)
    code, decoded = encoded("int8", values)
    assert np.isfinite(decoded).all()
    assert encoded("int8", decoded)[0] == code


@pytest.mark.parametrize("greatest", [1.5e-36, 1.0, 3.4e38])
def test_the_error_of_int8_is_as_documented_between_two_levels_too(greatest: float) -> None:
    """Values halfway between two levels, at scales that are rounded up by much and by little."""
    for step in range(300):
        scale = np.float32(greatest / 127 * (1 - step * 2.0**-16))
        levels = np.arange(0.5, 126.5)
        between = np.float32(scale * (1 + 2.0**-15)) * levels
        near = [np.float32(between * (1 + unit * 2.0**-24)) for unit in range(-3, 4)]
        for each in near:
            check_int8(np.append(each, np.float32(127) * scale))
    check_int8(np.array([127.90306, 127.40336], np.float32))  # it is off by m / 254 * (1 + 2^-14.4)


@pytest.mark.parametrize("wire", OF_BLOCKS)
@given(values=any_floats())
@settings(max_examples=120, derandomize=True, deadline=None)
def test_a_block_with_an_infinity_or_a_nan_is_nan_and_no_other_block_is(
    wire: str, values: Floats
) -> None:
    """Whatever the bits of the NaN are."""
    decoded, size = encoded(wire, values)[1], Wire.from_label(wire).block
    for start in range(0, len(values), size):
        block, got = values[start : start + size], decoded[start : start + size]
        if np.isfinite(block).all():
            assert np.isfinite(got).all()
        else:
            assert np.isnan(got).all()


@pytest.mark.parametrize("bits", QUIET_AND_LOUD)
@pytest.mark.parametrize("place", [0, 255, 256, 299])
def test_no_nan_is_lost_in_a_scale(bits: int, place: int) -> None:
    values = np.ones(300, np.float32)
    values.view(np.uint32)[place] = bits
    for wire in LOSSY:
        decoded = encoded(wire, values)[1]
        assert np.isnan(decoded[place])


def test_a_block_of_zeros_is_zero_and_its_code_too() -> None:
    for wire in LOSSY:
        code, decoded = encoded(wire, np.zeros(300, np.float32))
        assert not decoded.any()
        assert not any(code)


@pytest.mark.parametrize("wire", LOSSY)
def test_no_elements_have_no_code(wire: str) -> None:
    assert encoded(wire, np.empty(0, np.float32))[0] == b""


def test_the_greatest_of_a_block_is_kept_to_sixteen_bits() -> None:
    """It is 127 times the scale, which is rounded up to 16 significant bits."""
    for greatest in (1.0, 3.14159, 1e-30, 2.5e38, 127.0):
        values = np.linspace(-greatest, greatest, 256, dtype=np.float32)
        decoded = encoded("int8", values)[1]
        assert values[-1] <= decoded[-1] <= values[-1] * (1 + 2**-14)
        assert decoded[0] == -decoded[-1]
