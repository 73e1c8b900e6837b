"""The element types that Allfold moves and folds."""

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
