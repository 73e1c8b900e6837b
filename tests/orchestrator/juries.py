"""Four nodes before a jury, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allfold_orchestrator.membership.cases import Charge
from allfold_orchestrator.membership.group_state import Life
from allfold_orchestrator.membership.jury import (
    CONFIRM_SECONDS,
    Evict,
    Instruction,
    Jury,
)

A, B, C, D = ((name, "1") for name in "abcd")
MEMBERS = (A, B, C, D)
RANKS = dict.fromkeys("abcd", 1)
AFTER = CONFIRM_SECONDS + 0.01


def silent(jury: Jury, now: float, accuser: Life, accused: Life) -> list[Instruction]:
    return jury.accused(now, accuser, accused, Charge.SILENT, MEMBERS)


def evicted(instructions: Sequence[Instruction]) -> Mapping[Life, str]:
    return {
        life: how
        for each in instructions
        if isinstance(each, Evict)
        for life, how in each.lives.items()
    }


def decided(jury: Jury, now: float, leaders: str = "") -> set[str]:
    """The nodes whose life is over by what is decided now, and is carried out at once."""
    lives = evicted(jury.decide(now, RANKS, leaders))
    for life in lives:
        jury.over(life)
    return {name for name, _ in lives}
