"""Incidents in lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from allfold.cli._units import age
from allfold_core.incident import Incident

SHOWN_ENDED = 3
"""So many of those that are over are shown."""


def lines(incidents: Iterable[Incident], now: float) -> list[str]:
    """Return a line for each open incident, and for the latest ones that are over for good.

    Args:
        now: seconds since 1970.
    """
    all_of_them = list(incidents)
    shown = [line(each, now) for each in all_of_them if each.is_open]
    again = {_matter(each) for each in all_of_them if each.is_open}
    ended = [each for each in all_of_them if not each.is_open and _matter(each) not in again]
    return shown + [line(each, now) for each in ended[:SHOWN_ENDED]]


def line(incident: Incident, now: float) -> str:
    """``hang, for 12 s: rank 3 on node b ...`` or ``slow, until 40 s ago: ...``."""
    when = f"for {age(now - incident.began)}"
    if incident.ended is not None:
        when = f"until {age(now - incident.ended)} ago"
    return f"{incident.effect.value}, {when}: {incident.sentence}"


def _matter(incident: Incident) -> tuple[object, ...]:
    """Return the key by which repetitions of one incident are recognised."""
    return incident.cause, incident.culprit, incident.group, incident.opening
