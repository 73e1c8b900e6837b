"""The formats of a chunk on the wire: the element type itself, or a shorter code."""

from __future__ import annotations

from enum import Enum

from allfold_core.dtypes import DType

INT8_BLOCK = 256
"""Elements that share one scale; every chunk but the last of a slice is a multiple of it."""

_SCALE_BYTES = 4


class Wire(Enum):
    """A wire format, one line each; its encoder is in the agent's ``arithmetic/codecs.py``.

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

    Attributes:
        code: its number on sockets, for good.
        label: its name.
        itemsize: bytes of an element, without its scale; 0: those of the element type itself.
        rounding: the most that one encoding costs, as a share of the greatest magnitude.
        block: elements that share a scale; 0: there are no scales.
    """

    NATIVE = (0, "native", 0, 0.0)
    FLOAT32 = (1, "float32", 4, 2.0**-24)
    BFLOAT16 = (2, "bfloat16", 2, 2.0**-8)
    FLOAT16 = (3, "float16", 2, 2.0**-11)
    INT8 = (4, "int8", 1, 1 / 254, INT8_BLOCK)

    def __init__(
        self, code: int, label: str, itemsize: int, rounding: float, block: int = 0
    ) -> None:
        self.code = code
        self.label = label
        self.itemsize = itemsize
        self.rounding = rounding
        self.block = block

    def nbytes(self, numel: int, itemsize: int) -> int:
        """The size of ``numel`` encoded elements, whose native size is ``itemsize``."""
        scales = -(-numel // self.block) if self.block else 0
        return numel * (self.itemsize or itemsize) + _SCALE_BYTES * scales

    @property
    def has_blocks(self) -> bool:
        """True if elements share a scale, so that slices with other bounds encode to other bytes.

        Results must then travel in the slices in which they were made.
        """
        return self.block > 0

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
