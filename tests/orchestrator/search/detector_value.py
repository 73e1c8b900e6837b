"""The failure detector as a value: copies, and what is equal for detectors with equal futures."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.failure_detector import FailureDetector
from allfold_orchestrator.membership.suspects import SuspectedLife

LONG_AGO = -3.0


def copy_of(detector: FailureDetector) -> FailureDetector:
    """Return an independent detector in the same state."""
    other, evidence = copy(detector), copy(detector._evidence)
    other._suspects = {each: _copy(suspect) for each, suspect in detector._suspects.items()}
    other._links = {pair: replace(link) for pair, link in detector._links.items()}
    other._extended = dict(detector._extended)
    other._evidence = evidence
    evidence._reached = set(evidence._reached)
    evidence._prompt, evidence._told = dict(evidence._prompt), dict(evidence._told)
    evidence._answered, evidence._late = dict(evidence._answered), dict(evidence._late)
    evidence._heard = {each: dict(heard) for each, heard in evidence._heard.items()}
    return other


def _copy(suspect: SuspectedLife) -> SuspectedLife:
    return replace(
        suspect, suspicions={each: set(said) for each, said in suspect.suspicions.items()}
    )


def key_of(detector: FailureDetector, now: float) -> object:
    """Times count from now; what is long over is all the same."""

    def ago(at: float) -> float:
        return max(LONG_AGO, round(at - now, 3))

    def ages(table: dict[Life, float]) -> object:
        return frozenset((each, ago(at)) for each, at in table.items())

    def facts(suspect: SuspectedLife) -> object:
        suspicions = frozenset((each, frozenset(said)) for each, said in suspect.suspicions.items())
        flags = (suspect.link_ended, suspect.dial_refused, suspect.is_asked)
        times = (ago(suspect.begun), ago(suspect.until), ago(suspect.stuck_until))
        return (*times, suspicions, flags)

    evidence = detector._evidence
    return (
        frozenset((each, facts(suspect)) for each, suspect in detector._suspects.items()),
        frozenset((p, ago(k.begun), ago(k.until), k.is_asked) for p, k in detector._links.items()),
        (ages(evidence._answered), ages(evidence._prompt), ages(evidence._told)),
        frozenset(evidence._late.items()),
        frozenset((each, ages(heard)) for each, heard in evidence._heard.items()),
        frozenset(
            (each, g.patience, g.before, ago(g.since)) for each, g in detector._extended.items()
        ),
    )
