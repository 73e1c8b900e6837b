"""Values of a JSON message, checked: what comes from a peer may be anything.

Each function returns the value, or raises ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from allfold_core.errors import from_json

_Value = TypeVar("_Value")


def read_number(value: Any, least: int = 0) -> int:
    """A whole number from ``least`` on, below 2**64."""
    if type(value) is not int or not least <= value < 2**64:
        raise ValueError(f"{value!r} is no number from {least} on")
    return value


def read_seq(value: Any) -> int:
    """The number of an op."""
    if read_number(value) >= 2**63:
        raise ValueError(f"{value!r} is no op")
    return int(value)


def read_floor(value: Any) -> int:
    """The number of an op, or -1 for "none yet"."""
    return read_number(value, least=-1)


def read_seconds(value: Any) -> float:
    """A duration: finite, and not negative."""
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no duration")
    return float(value)


def read_rate(value: Any) -> float:
    """Bytes per second or seconds per byte: positive."""
    if not read_seconds(value):
        raise ValueError("a link on which nothing moves")
    return float(value)


def read_text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value


def read_list(value: Any) -> list[Any]:
    """A list of whatever."""
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return value


def read_mapping(value: Any, read: Callable[[Any], _Value]) -> dict[str, _Value]:
    """An object whose values ``read`` returns."""
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} in place of an object")
    return {read_text(key): read(each) for key, each in value.items()}


def read_error(value: Any) -> str:
    """An error as JSON text, or ``""`` for none."""
    if read_text(value):
        from_json(value)
    return str(value)
