"""Wire formats: their names, their sizes, and for which data they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import DType, Wire

LOSSY = [wire for wire in Wire if wire is not Wire.NATIVE]
REAL = (DType.FLOAT32, DType.FLOAT64)


def test_codes_and_names_are_unique_and_read_back() -> None:
    for wire in Wire:
        assert Wire.from_code(wire.code) is Wire.from_label(wire.label) is wire
    assert Wire.NATIVE.code == 0


def test_an_unknown_format_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="unknown wire format code 77"):
        Wire.from_code(77)
    with pytest.raises(
        ValueError,
        match="unknown wire format 'int3'; there are native, float32, bfloat16, float16, int8, "
        "int4, int2, sign, topk",
    ):
        Wire.from_label("int3")


@given(numel=st.integers(0, 1 << 40), dtype=st.sampled_from(DType))
def test_elements_have_the_size_of_the_format(numel: int, dtype: DType) -> None:
    assert Wire.NATIVE.nbytes(numel, dtype.itemsize) == numel * dtype.itemsize
    assert Wire.FLOAT32.nbytes(numel, dtype.itemsize) == 4 * numel
    assert Wire.BFLOAT16.nbytes(numel, dtype.itemsize) == 2 * numel
    assert Wire.FLOAT16.nbytes(numel, dtype.itemsize) == 2 * numel


NUMELS = (0, 1, 128, 129, 255, 256, 257, 512, 513)


@pytest.mark.parametrize(
    ("wire", "sizes"),
    [
        (Wire.INT8, (0, 5, 132, 133, 259, 260, 265, 520, 525)),
        (Wire.INT4, (0, 3, 66, 69, 132, 132, 135, 264, 267)),
        (Wire.INT2, (0, 5, 36, 37, 68, 68, 73, 136, 141)),
        (Wire.SIGN, (0, 3, 18, 19, 34, 34, 37, 68, 71)),
        (Wire.TOPK, (0, 16, 18, 19, 21, 21, 23, 27, 29)),
    ],
)
def test_there_are_scales_for_every_block_begun(wire: Wire, sizes: tuple[int, ...]) -> None:
    assert tuple(wire.nbytes(numel, 4) for numel in NUMELS) == sizes
    assert tuple(wire.nbytes(numel, 8) for numel in NUMELS) == sizes


def test_of_a_sparse_format_a_64th_travels_and_at_least_one_of_a_block() -> None:
    sizes = {64: 16, 65: 18, 4095: 118, 4096: 118, 4097: 134, 8192: 236, 30_800_000: 887_312}
    assert {numel: Wire.TOPK.nbytes(numel, 4) for numel in sizes} == sizes
    assert [Wire.TOPK.travelling(numel) for numel in (0, 1, 64, 65, 4096)] == [0, 1, 1, 2, 64]
    assert 30 * 2 * 4096 / Wire.TOPK.nbytes(4096, 4) > 2000
    assert [wire for wire in Wire if wire.is_sparse] == [Wire.TOPK]


def test_chunks_end_where_blocks_and_bytes_do() -> None:
    for wire in Wire:
        assert wire.grain % (wire.block or 1) == 0
        assert wire.travelling(wire.grain) * wire.one_of == wire.grain
        assert wire.travelling(wire.grain) * wire.bits % 8 == 0
    assert {wire.grain for wire in Wire if not wire.is_sparse} == {256}


@given(st.lists(st.integers(1, 9), max_size=5), st.integers(0, 1000), st.sampled_from(Wire))
def test_chunks_of_whole_blocks_have_the_size_of_their_slice(
    blocks: list[int], rest: int, wire: Wire
) -> None:
    chunks = [count * wire.grain for count in blocks] + [rest]
    assert sum(wire.nbytes(chunk, 4) for chunk in chunks) == wire.nbytes(sum(chunks), 4)


def test_a_format_that_the_data_have_anyway_is_native() -> None:
    for wire in Wire:
        for kept in DType:
            same = wire.label == kept.label
            assert wire.effective(kept) is (Wire.NATIVE if same else wire)
    assert Wire.FLOAT32.effective(DType.FLOAT32) is Wire.NATIVE
    assert Wire.BFLOAT16.effective(DType.BFLOAT16) is Wire.NATIVE
    assert Wire.FLOAT32.effective(DType.FLOAT64) is Wire.FLOAT32


def test_real_numbers_travel_in_every_format_and_other_types_as_they_are() -> None:
    for kept in DType:
        assert Wire.NATIVE.refusal(kept) is None
        for wire in LOSSY:
            allowed = kept in REAL or wire.label == kept.label
            assert (wire.refusal(kept) is None) == allowed, (wire, kept)


def test_a_refusal_names_the_format_the_type_and_what_the_format_is_for() -> None:
    refusal = Wire.BFLOAT16.refusal(DType.INT32) or ""
    assert "wire='bfloat16' is for float32 and float64" in refusal
    assert "int32 travels as it is" in refusal
