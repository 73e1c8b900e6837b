"""The latest rounds of a group, from what each of its nodes says of them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from allfold_core.agent_answers import GroupStatus, RoundStatus

MAX_ROUNDS = 8

Json = dict[str, Any]


def latest_rounds(statuses: Iterable[GroupStatus]) -> list[Json]:
    """Return the latest rounds, the newest first.

    Args:
        statuses: of one group, of its nodes.
    """
    told: defaultdict[int, list[RoundStatus]] = defaultdict(list)
    for status in statuses:
        for each in status.get("rounds", ()):
            told[each["seq"]].append(each)
    return [_merged(told[seq]) for seq in sorted(told, reverse=True)[:MAX_ROUNDS]]


def _merged(parts: Sequence[RoundStatus]) -> Json:
    """Put together one round: its late ranks and its bytes each node knows of its own alone."""
    return {
        **parts[0],
        "late": sorted({rank for each in parts for rank in each["late"]}),
        "sent_bytes": sum(each["sent_bytes"] for each in parts),
        "seconds": max(each["seconds"] for each in parts),
        "ended_at": max(each["ended_at"] for each in parts),
    }
