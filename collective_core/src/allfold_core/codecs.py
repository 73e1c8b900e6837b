"""The formats of a chunk on the wire: the element type itself, or a shorter code."""

from __future__ import annotations

from enum import Enum

from allfold_core.dtypes import DType

INT8_BLOCK = 256
"""Elements that share one scale; every chunk but the last of a slice is a multiple of it."""

_SCALE_BYTES = 4


class Wire(Enum):
    """A wire format, with its stable code.

    Every format but ``NATIVE`` is lossy, and *idempotent*: what was decoded encodes to the same
    bytes again. So a node that has rounded its own content to what the others decode has the same
    bits as they do, and whoever passes data on passes the same bytes.

    * ``FLOAT32``, ``BFLOAT16``, ``FLOAT16``: each element is rounded to nearest, ties to even; a
      relative error of at most 2^-24, 2^-8 and 2^-11 in the normal range of the type. What is
      beyond that range becomes infinite.
    * ``INT8``: blocks of 256 elements share a float32 scale s, the greatest magnitude divided by
      127 (rounded up to 16 significant bits), and each element is the nearest multiple of s: an
      absolute error of at most s/2, by up to 2^-15 of it more where float32 rounds. A block with an
      infinity or a NaN is NaN everywhere.
    """

    NATIVE = (0, "native")
    FLOAT32 = (1, "float32")
    BFLOAT16 = (2, "bfloat16")
    FLOAT16 = (3, "float16")
    INT8 = (4, "int8")

    def __init__(self, code: int, label: str) -> None:
        self.code = code
        self.label = label

    def nbytes(self, numel: int, itemsize: int) -> int:
        """The size of ``numel`` encoded elements, whose native size is ``itemsize``."""
        match self:
            case Wire.NATIVE:
                return numel * itemsize
            case Wire.INT8:
                return numel + _SCALE_BYTES * -(-numel // INT8_BLOCK)
        return numel * DType.from_label(self.label).itemsize

    @property
    def has_blocks(self) -> bool:
        """True if elements share a scale, so that slices with other bounds encode to other bytes.

        Results must then travel in the slices in which they were made.
        """
        return self is Wire.INT8

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
        if code not in _BY_CODE:
            raise ValueError(f"unknown wire format code {code}")
        return _BY_CODE[code]

    @classmethod
    def from_label(cls, label: str) -> Wire:
        """The format of a name; ``ValueError`` lists what there is."""
        if label not in _BY_LABEL:
            raise ValueError(f"unknown wire format {label!r}; there are {', '.join(_BY_LABEL)}")
        return _BY_LABEL[label]


_BY_CODE = {wire.code: wire for wire in Wire}
_BY_LABEL = {wire.label: wire for wire in Wire}
