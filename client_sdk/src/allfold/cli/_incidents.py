"""Incidents in lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from allfold_core.incident import Incident

SHOWN_ENDED = 3
"""So many of those that are over are shown."""


def lines(incidents: Iterable[Incident], now: float) -> list[str]:
    """Return a line for each open incident, and for the latest ones that are over.

    Args:
        now: seconds since 1970.
    """
    all_of_them = list(incidents)
    shown = [line(each, now) for each in all_of_them if each.is_open]
    ended = [each for each in all_of_them if not each.is_open]
    return shown + [line(each, now) for each in ended[:SHOWN_ENDED]]


def line(incident: Incident, now: float) -> str:
    """``hang, for 12 s: rank 3 on node b ...`` or ``slow, until 40 s ago: ...``."""
    when = f"for {duration(now - incident.began)}"
    if incident.ended is not None:
        when = f"until {duration(now - incident.ended)} ago"
    return f"{incident.effect.value}, {when}: {incident.sentence}"


def duration(seconds: float) -> str:
    """``3.4 s``, ``12 min``, ``5.1 h``; a clock that is behind makes it 0."""
    if seconds < 100:
        return f"{max(seconds, 0.0):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
