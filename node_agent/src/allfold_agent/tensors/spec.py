"""A tensor over HTTP: its id, type and shape, its bytes, their digest and ranges."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np

from allfold_core.dtypes import DType
from allfold_core.errors import (
    InvalidArgument,
    LocalError,
    PeerSentIncoherentTensor,
)

GIB = 1 << 30
# Bytes received at a time: what is hashed meanwhile should still be in the cache.
CHUNK = 1 << 20
# Ids name session, op, phase and slice. Clients tidy the path segments "." and ".." away.
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]{1,256}")
_DIGEST = re.compile(r"\s*sha-256\s*=\s*:([A-Za-z0-9+/=]*):\s*(?:;.*)?")
_RANGE = re.compile(r"bytes=\s*([0-9]{0,19})-([0-9]{0,19})\s*")
_MAX_DIMS = 32
BytesLike = bytes | bytearray | memoryview | mmap | np.ndarray[Any, Any]


def check_id(tensor_id: str) -> str:
    """The id, or :class:`InvalidArgument`."""
    if not _ID.fullmatch(tensor_id):
        raise InvalidArgument(
            f"tensor id {tensor_id[:300]!r}: expected 1 to 256 of A-Z a-z 0-9 . _ : -"
        )
    return tensor_id


def byte_view(data: BytesLike) -> memoryview:
    """The bytes of contiguous memory, without a copy."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise InvalidArgument("a tensor's memory must be contiguous, this one has strides")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def digest_header(digest: bytes) -> str:
    """A SHA-256 as a value of ``Content-Digest`` or ``Repr-Digest`` (RFC 9530)."""
    return f"sha-256=:{base64.b64encode(digest).decode()}:"


def parse_digest(value: str) -> bytes | None:
    """The SHA-256 of a digest header; ``None`` where it has only digests of other kinds."""
    for member in value.split(","):
        if match := _DIGEST.fullmatch(member):
            try:
                digest = base64.b64decode(match[1], validate=True)
            except binascii.Error:
                digest = b""
            if len(digest) == 32:
                return digest
        if member.strip().startswith("sha-256"):
            raise InvalidArgument(f"{member.strip()[:100]!r} is not a SHA-256 of RFC 9530")
    return None


def parse_range(value: str, size: int) -> tuple[int, int] | None:
    """Start and stop of a ``Range`` header; ``None`` (all) for one that HTTP lets us ignore.

    Raises with status 416 where none of the bytes exist.
    """
    match = _RANGE.fullmatch(value)
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise LocalError(f"no bytes {value[6:]} in {size}", http_status=416, size=size)
    return start, stop


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The meaning of a tensor's bytes."""

    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """The spec of a dtype's label and a shape; :class:`InvalidArgument` where it has none."""
        try:
            known = DType.from_label(dtype)
        except ValueError as error:
            raise InvalidArgument(str(error), dtype=dtype) from None
        dims = tuple(int(dim) for dim in shape)
        if len(dims) > _MAX_DIMS or any(not 0 <= dim < 2**63 for dim in dims):
            raise InvalidArgument(f"shape {dims}: expected up to {_MAX_DIMS} sizes from 0")
        return cls(known, dims)

    @classmethod
    def parse(cls, dtype: str, shape: str) -> TensorSpec:
        """The spec of its wire form, such as ``float32`` and ``2,3``; a scalar has no sizes."""
        sizes = shape.split(",") if shape else []
        if not all(size.isascii() and size.isdigit() and len(size) < 20 for size in sizes):
            raise InvalidArgument(f"shape {shape[:100]!r}: expected sizes with commas between")
        return cls.of(dtype, [int(size) for size in sizes])

    @property
    def shape_text(self) -> str:
        return ",".join(map(str, self.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.label}[{self.shape_text}]"


def check_digest(tensor_id: str, expected: bytes, got: bytes, **details: Any) -> None:
    """Raise :class:`PeerSentIncoherentTensor` where the digests differ."""
    if expected != got:
        raise PeerSentIncoherentTensor(
            f"tensor {tensor_id}: expected the digest {digest_header(expected)},"
            f" got {digest_header(got)}",
            tensor=tensor_id,
            expected=digest_header(expected),
            got=digest_header(got),
            **details,
        )
