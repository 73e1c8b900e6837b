"""The wire forms of tensors: shapes, digests and ranges of bytes."""

import hashlib

import numpy as np
import pytest

from allfold_agent.tensors.spec import (
    TensorSpec,
    byte_view,
    digest_header,
    parse_digest,
    parse_range,
)
from allfold_core.errors import InvalidArgument, LocalError


def test_a_scalar_has_an_empty_shape() -> None:
    spec = TensorSpec.parse("float64", "")
    assert (spec.shape, spec.nbytes, spec.shape_text) == ((), 8, "")


@pytest.mark.parametrize("shape", ["2,3", "0", "", "1,2,3,4"])
def test_a_shape_survives_its_wire_form(shape: str) -> None:
    spec = TensorSpec.parse("bfloat16", shape)
    assert TensorSpec.parse("bfloat16", spec.shape_text) == spec


@pytest.mark.parametrize(
    "shape", ["-1", "2,", ",", "a", "2.0", " 2", "9" * 20, "1," * 32 + "1", "²"]
)
def test_other_shapes_are_invalid(shape: str) -> None:
    with pytest.raises(InvalidArgument, match="shape"):
        TensorSpec.parse("float32", shape)


def test_an_unknown_dtype_is_invalid() -> None:
    with pytest.raises(InvalidArgument, match="complex64"):
        TensorSpec.of("complex64", (1,))


def test_a_digest_survives_its_header() -> None:
    digest = hashlib.sha256(b"x").digest()
    assert parse_digest(digest_header(digest)) == digest
    assert parse_digest(f"sha-512=:AAAA:, {digest_header(digest)};q=1") == digest


@pytest.mark.parametrize("value", ["", "sha-512=:AAAA:", "unknown=1"])
def test_a_digest_of_another_kind_is_no_digest(value: str) -> None:
    assert parse_digest(value) is None


@pytest.mark.parametrize("value", ["sha-256=:AAAA:", "sha-256=abc", "sha-256", "sha-256=:A:"])
def test_a_broken_digest_is_invalid(value: str) -> None:
    with pytest.raises(InvalidArgument, match="SHA-256"):
        parse_digest(value)


@pytest.mark.parametrize(
    ("value", "span"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=9-", (9, 10)),
        ("bytes=2-4", (2, 5)),
        ("bytes=2-99", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=-", None),
        ("bytes=4-2", None),
        ("bytes=0-1,3-4", None),
        ("lines=1-2", None),
        ("nonsense", None),
    ],
)
def test_ranges_are_read_as_http_reads_them(value: str, span: tuple[int, int] | None) -> None:
    assert parse_range(value, 10) == span


@pytest.mark.parametrize(("value", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_a_range_without_bytes_cannot_be_satisfied(value: str, size: int) -> None:
    with pytest.raises(LocalError) as caught:
        parse_range(value, size)
    assert caught.value.details["http_status"] == 416


def test_a_view_of_bytes_is_flat_whatever_the_shape() -> None:
    assert byte_view(np.zeros((2, 3), np.int16)).shape == (12,)
