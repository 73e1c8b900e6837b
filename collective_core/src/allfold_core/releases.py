"""The releases of Allfold whose services work together. Pure.

Patch releases keep the wire. Before 1.0 minor releases may change it, from 1.0 on major ones.
"""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def series(version: str) -> str:
    """Return the series of a release, ``"0.2"`` or ``"1"``; empty where it has no such number."""
    found = _NUMBERS.match(version)
    if found is None:
        return ""
    major, minor = found.groups()
    return f"{major}.{minor}" if major == "0" else major


def work_together(one: str, other: str) -> bool:
    """Return True unless two releases are known to be of different series."""
    return not (series(one) and series(other)) or series(one) == series(other)
