"""The bounds and the forms of fields in messages, said where the fields are.

``allfold_control`` makes readers and writers of messages from annotated dataclasses, with pydantic.
Pydantic asks each annotation for its schema, a plain dict, by a method of a fixed name, so that
these need nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

_Handler = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Within:
    """The bounds of a number: from ``least`` on, below ``end``; no NaN."""

    least: float
    end: float

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        return {**handler(source), "ge": self.least, "lt": self.end}


@dataclass(frozen=True)
class Form:
    """The form of a field that is not that of its parts.

    Attributes:
        read: returns the value; ``KeyError``, ``TypeError`` or ``ValueError`` where it is none.
        write: the inverse.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        return {
            "type": "function-plain",
            "function": {"type": "no-info", "function": self.read},
            "serialization": {"type": "function-plain", "function": self.write},
        }


@dataclass(frozen=True)
class Matching:
    """The bounds of a text: the pattern that all of it matches, and what else is asked of it.

    Attributes:
        check: returns the text; ``ValueError`` where it is none.
    """

    pattern: str
    check: Callable[[str], str] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> dict[str, Any]:
        text = {**handler(source), "pattern": self.pattern}
        if self.check is None:
            return text
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": text}


NAME_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"
_HOST = r"(\[[^\s/\[\]]{2,64}\]|[^\s/:@?#\[\]]{1,253})"
ADDRESS_PATTERN = rf"^{_HOST}:[0-9]{{1,5}}$"
URL_PATTERN = rf"^https?://{_HOST}(:[0-9]{{1,5}})?$"
MAX_PORT = 65_535
MAX_WORLD_SIZE = 100_000
# Agents count epochs in 32 bits. A report may name the lower half, so that no report uses up all.
MAX_EPOCH = 2**31 - 1
# Ops are numbered in 64 bits with a sign.
MAX_SEQ = 2**63 - 1
MAX_GENERATION = 2**12 - 1


def _has_a_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"the port is above {MAX_PORT}")
    return address


def _can_be_read(url: str) -> str:
    _ = urlsplit(url).port  # complains of one that is too large, and of brackets around no address
    return url


Name = Annotated[str, Matching(NAME_PATTERN)]
Address = Annotated[str, Matching(ADDRESS_PATTERN, _has_a_port)]
ControlUrl = Annotated[str, Matching(URL_PATTERN, _can_be_read)]
Rank = Annotated[int, Within(0, MAX_WORLD_SIZE)]
EpochNumber = Annotated[int, Within(0, MAX_EPOCH + 1)]
Generation = Annotated[int, Within(0, MAX_GENERATION + 1)]
Number = Annotated[int, Within(0, 2**64)]
Seq = Annotated[int, Within(0, MAX_SEQ + 1)]
"""The number of an op."""
LastSeq = Annotated[int, Within(-1, MAX_SEQ + 1)]
"""The number of an op; -1 for none yet."""
Seconds = Annotated[float, Within(0, float("inf"))]
Rate = Annotated[float, Within(5e-324, float("inf"))]
"""Bytes per second or seconds per byte: above 0."""
