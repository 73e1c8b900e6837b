"""Traffic that yields: the classes of groups, and the caps on what agents send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from allfold_core.errors import InvalidArgument

TrafficClass = Literal["background", "normal", "high"]
"""A group's priority on a line: background yields to all others, normal yields to high."""

LEVELS: tuple[TrafficClass, ...] = ("high", "normal", "background")
"""The classes in the order in which they go."""

LEAST_RATE = 64 * 1024
_CHUNK = "64 KiB"
_MOST_RATE = 10**15
_LONGEST_NAME = 128
_UNITS = {
    "": 1.0,
    **{f"{prefix}b": 10.0**power for prefix, power in (("", 0), ("k", 3), ("m", 6), ("g", 9))},
    **{f"{prefix}bit": 10.0**power / 8 for prefix, power in (("k", 3), ("m", 6), ("g", 9))},
}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
NO_LIMIT = "none"


def parse_rate(text: str, source: str = "a limit") -> int:
    """Return the bytes per second of a cap such as ``200Mbit``, ``25MB`` or ``25000000``.

    Raises:
        InvalidArgument: it is none, or less than one chunk per second; names the source.
    """
    found = _RATE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise InvalidArgument(
            f"{source} is a rate such as 200Mbit, 25MB or 25000000 (bytes per second); got {text!r}"
        )
    return checked_rate(round(float(found[1]) * _UNITS[found[2]]), source)


def checked_rate(rate: int, source: str = "a limit") -> int:
    """Return a cap in bytes per second; ``InvalidArgument`` where no traffic can keep to it."""
    if rate < LEAST_RATE:
        raise InvalidArgument(
            f"{source} of {rate} bytes per second is less than one chunk ({_CHUNK}) per second: an "
            f"op would seem to stand still; the least is {LEAST_RATE} (0.53Mbit)"
        )
    if rate > _MOST_RATE:
        raise InvalidArgument(
            f"{source} of {rate} bytes per second is more than any line carries; leave it out"
        )
    return rate


def rate_in_words(rate: float) -> str:
    """Return a rate as operators write it: ``200 Mbit/s``."""
    bits = 8 * rate
    unit, size = next(
        (each for each in (("Gbit", 1e9), ("Mbit", 1e6)) if bits >= each[1]), ("kbit", 1e3)
    )
    return f"{bits / size:.4g} {unit}/s"


@dataclass(frozen=True, slots=True, order=True)
class Cap:
    """A cap on what an agent sends to other machines: each agent keeps to it by itself.

    At most one of the first three is given; without any, it is on all that each agent sends.

    Attributes:
        node: of this agent alone.
        group: for this group.
        zones: between these two zones, in either direction; sorted.
        rate: bytes per second.
    """

    node: str = ""
    group: str = ""
    zones: tuple[str, ...] = ()
    rate: int = LEAST_RATE

    def __post_init__(self) -> None:
        if sum(map(bool, (self.node, self.group, self.zones))) > 1:
            raise InvalidArgument(
                "a limit is for one node, for one group, or between two zones: give one of them"
            )
        if len(self.zones) not in (0, 2) or any(len(each) > _LONGEST_NAME for each in self.zones):
            raise InvalidArgument(
                f"a limit between zones names two of them, got {list(self.zones)}"
            )
        object.__setattr__(self, "zones", tuple(sorted(self.zones)))
        checked_rate(self.rate)

    @property
    def scope(self) -> str:
        """What the cap applies to, in words. No two caps of an orchestrator have the same scope."""
        if self.node:
            return f"node {self.node}"
        if self.group:
            return f"group {self.group}"
        if self.zones:
            return f"zones {' and '.join(each or '(none)' for each in self.zones)}"
        return "each agent"

    def __str__(self) -> str:
        return f"{self.scope}: at most {rate_in_words(self.rate)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "node": self.node,
            "group": self.group,
            "zones": list(self.zones),
            "rate": self.rate,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the inverse of :meth:`to_dict`; ``InvalidArgument`` where it is none."""
        return cls(
            data.get("node", ""),
            data.get("group", ""),
            tuple(data.get("zones", ())),
            data["rate"],
        )


def level_of(traffic: TrafficClass) -> int:
    """Return the place of a class among those that wait to send: 0 goes first."""
    return LEVELS.index(traffic)
