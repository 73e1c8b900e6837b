"""The types of elements, and the formats in which they travel."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class DType(Enum):
    """One element type: its stable wire code, its size and the type its sums are kept in."""

    FLOAT32 = (1, "float32", 4)
    FLOAT64 = (2, "float64", 8)
    FLOAT16 = (3, "float16", 2)
    BFLOAT16 = (4, "bfloat16", 2)
    INT8 = (5, "int8", 1)
    INT16 = (6, "int16", 2)
    INT32 = (7, "int32", 4)
    INT64 = (8, "int64", 8)
    UINT8 = (9, "uint8", 1)
    BOOL = (10, "bool", 1)

    __hash__ = object.__hash__  # there is one object for each; Enum would hash its name, in Python

    def __init__(self, code: int, label: str, itemsize: int) -> None:
        self.code = code
        self.label = label
        self.itemsize = itemsize

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_half(self) -> bool:
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @classmethod
    def from_code(cls, code: int) -> DType:
        """The dtype of a wire code; ``ValueError`` for an unknown one."""
        try:
            return _BY_CODE[code]
        except KeyError:
            raise ValueError(f"unknown dtype code {code}") from None

    @classmethod
    def from_label(cls, label: str) -> DType:
        """The dtype named as NumPy and torch name it; ``ValueError`` lists what is supported."""
        try:
            return _BY_LABEL[label]
        except KeyError:
            supported = ", ".join(_BY_LABEL)
            raise ValueError(f"dtype {label} is not supported; supported: {supported}") from None


class Alias(NamedTuple):
    """An element type of callers that is none of Allfold's, and travels as elements of another.

    Attributes:
        name: as NumPy or torch have it; "" where the elements are what they travel as.
        width: how many elements that travel make up one of the caller's.
    """

    name: str = ""
    width: int = 1

    def label(self, dtype: DType) -> str:
        """Return the name of the caller's type, whose elements travel as ``dtype``."""
        return self.name or dtype.label

    def encode(self) -> bytes:
        """Return the name as bytes; ``ValueError`` for one that is too long."""
        name = self.name.encode()
        if len(name) > LONGEST_ALIAS:
            raise ValueError(f"the name of a dtype has at most {LONGEST_ALIAS} bytes: {self.name}")
        return name

    @classmethod
    def decode(cls, name: bytes | memoryview, width: int) -> Alias:
        """The inverse of :meth:`encode`; ``ValueError`` for what is no alias."""
        if not name and width == 1:
            return NO_ALIAS
        if not name or len(name) > LONGEST_ALIAS:
            raise ValueError(f"the name of a dtype has 1 to {LONGEST_ALIAS} bytes, got {len(name)}")
        text = bytes(name).decode()
        if not text.isprintable():
            raise ValueError(f"{text!r} is no name of a dtype")
        return cls(text, width)


NO_ALIAS = Alias()
LONGEST_ALIAS = 64

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
_BY_CODE = {dtype.code: dtype for dtype in DType}
_BY_LABEL = {dtype.label: dtype for dtype in DType}


USUAL_GRAIN = 256
"""The grain of all formats whose blocks are no longer: a multiple of each of these."""


class Wire(Enum):
    """A wire format, one line each; its encoder is in the agent's ``arithmetic/codecs.py``.

    Every format but ``NATIVE`` is lossy. Who has encoded its own content goes on with what the
    others decode, and whoever passes data on passes the bytes that it has received, so all have the
    same bits. Formats without scales are also *idempotent*: what was decoded encodes to the same
    bytes again, in whatever slices.

    * ``FLOAT32``, ``BFLOAT16``, ``FLOAT16``: each element is rounded to nearest, ties to even; a
      relative error of at most 2^-24, 2^-8 and 2^-11 in the normal range of the type. What is
      beyond that range becomes infinite.
    * ``INT8``, ``INT4``: the elements of a block share a scale s, the greatest magnitude divided by
      127 or 7 (rounded up to 16 significant bits, or to the nearest bfloat16), and each is the
      nearest multiple of s: an absolute error of at most s/2, by up to 2^-15 of it more where
      float32 rounds.
    * ``INT2``: a block has two magnitudes, the means of its small elements and of its great ones.
    * ``SIGN``: a block has one magnitude, the mean of all.
    * ``TOPK``: a 64th of a block travels, rounded up: the elements of the greatest magnitudes, of
      equal ones the first. They fall into ranges of 1, 1, 2, 4, 8, 16 and 32 by their order, which
      have the mean magnitude of theirs. All others become 0.

    A block with an infinity or a NaN is NaN everywhere.

    Attributes:
        code: its number on sockets, for good.
        label: its name.
        bits: of an element, without its scale; 0: those of the element type itself.
        rounding: the most that one encoding costs, as a share of the greatest magnitude.
        block: elements that share a scale; 0: there are no scales.
        scale_bytes: the size of the scales of a block.
        one_of: of so many elements one travels, and its place with it; 1: all travel.
    """

    NATIVE = (0, "native", 0, 0.0)
    FLOAT32 = (1, "float32", 32, 2.0**-24)
    BFLOAT16 = (2, "bfloat16", 16, 2.0**-8)
    FLOAT16 = (3, "float16", 16, 2.0**-11)
    INT8 = (4, "int8", 8, 1 / 254, 256, 4)
    INT4 = (5, "int4", 4, (1 + 2.0**-7) / 14, 128, 2)
    INT2 = (6, "int2", 2, 0.8 * (1 + 2.0**-7), 256, 4)
    SIGN = (7, "sign", 1, 1.0, 256, 2)
    TOPK = (8, "topk", 13, 1.0, 4096, 14, 64)

    def __init__(
        self,
        code: int,
        label: str,
        bits: int,
        rounding: float,
        block: int = 0,
        scale_bytes: int = 0,
        one_of: int = 1,
    ) -> None:
        self.code = code
        self.label = label
        self.bits = bits
        self.rounding = rounding
        self.block = block
        self.scale_bytes = scale_bytes
        self.one_of = one_of

    def nbytes(self, numel: int, itemsize: int) -> int:
        """The size of ``numel`` encoded elements, whose native size is ``itemsize``."""
        elements = self.elements_nbytes(numel) if self.bits else numel * itemsize
        return elements + self.scales_nbytes(numel)

    def elements_nbytes(self, numel: int) -> int:
        """Return the bytes of encoded elements without their scales; of a lossy format."""
        return -(-self.travelling(numel) * self.bits // 8)

    def travelling(self, numel: int) -> int:
        """Return the number of elements that travel, of ``numel``; all but in a sparse format."""
        return -(-numel // self.one_of)

    def scales_nbytes(self, numel: int) -> int:
        """Return the bytes of the scales, which come before the elements."""
        return -(-numel // self.block) * self.scale_bytes if self.block else 0

    @property
    def has_blocks(self) -> bool:
        """True if elements share a scale, so that slices with other bounds encode to other bytes.

        Results must then travel in the slices in which they were made.
        """
        return self.block > 0

    @property
    def grain(self) -> int:
        """Elements of which every chunk but the last of a slice has a multiple: whole blocks."""
        return max(self.block, USUAL_GRAIN)

    @property
    def is_sparse(self) -> bool:
        """True if most elements do not travel, but wait for a later op of their series."""
        return self.one_of > 1

    def effective(self, kept: DType) -> Wire:
        """``NATIVE`` where the format is that of the accumulation type anyway."""
        return Wire.NATIVE if self.label == kept.label else self

    def refusal(self, kept: DType) -> str | None:
        """Return why data kept as ``kept`` cannot travel in this format; ``None`` if they can."""
        if self.effective(kept) is Wire.NATIVE or kept in (DType.FLOAT32, DType.FLOAT64):
            return None
        return (
            f"wire={self.label!r} is for float32 and float64, and for reductions of half types, "
            f"which are kept in float32; {kept.label} travels as it is"
        )

    @classmethod
    def from_code(cls, code: int) -> Wire:
        """The format of a code; ``ValueError`` for an unknown one."""
        if code not in _WIRE_BY_CODE:
            raise ValueError(f"unknown wire format code {code}")
        return _WIRE_BY_CODE[code]

    @classmethod
    def from_label(cls, label: str) -> Wire:
        """The format of a name; ``ValueError`` lists what there is."""
        if label not in _WIRE_BY_LABEL:
            raise ValueError(
                f"unknown wire format {label!r}; there are {', '.join(_WIRE_BY_LABEL)}"
            )
        return _WIRE_BY_LABEL[label]


_WIRE_BY_CODE = {wire.code: wire for wire in Wire}
_WIRE_BY_LABEL = {wire.label: wire for wire in Wire}
