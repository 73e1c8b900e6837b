"""Four nodes before a failure detector, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.failure_detector import CONFIRM_SECONDS, FailureDetector
from allfold_orchestrator.membership.suspects import Evict, Instruction

A, B, C, D = ((name, "1") for name in "abcd")
MEMBERS = (A, B, C, D)
RANKS = dict.fromkeys("abcd", 1)
AFTER = CONFIRM_SECONDS + 0.01


def silent(
    detector: FailureDetector, now: float, reporter: Life, suspected: Life
) -> list[Instruction]:
    return detector.suspected(now, reporter, suspected, "silent", MEMBERS)


def evicted(instructions: Sequence[Instruction]) -> Mapping[Life, str]:
    return {
        life: how
        for each in instructions
        if isinstance(each, Evict)
        for life, how in each.lives.items()
    }


def decided(detector: FailureDetector, now: float, leaders: str = "") -> set[str]:
    """The nodes whose life is over by what is decided now, and is carried out at once."""
    lives = evicted(detector.decide(now, RANKS, leaders))
    for life in lives:
        detector.over(life)
    return {name for name, _ in lives}
