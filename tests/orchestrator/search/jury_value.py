"""The jury as a value: copies, and what is equal for juries with equal futures."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.cases import Case
from allfold_orchestrator.membership.jury import Jury

LONG_AGO = -3.0


def copy_of(jury: Jury) -> Jury:
    """Return an independent jury in the same state."""
    other, evidence = copy(jury), copy(jury._evidence)
    other._cases = {each: _copy_case(case) for each, case in jury._cases.items()}
    other._links = {pair: replace(link) for pair, link in jury._links.items()}
    other._extended = dict(jury._extended)
    other._evidence = evidence
    evidence._reached = set(evidence._reached)
    evidence._prompt, evidence._told = dict(evidence._prompt), dict(evidence._told)
    evidence._answered, evidence._late = dict(evidence._answered), dict(evidence._late)
    evidence._heard = {each: dict(heard) for each, heard in evidence._heard.items()}
    return other


def _copy_case(case: Case) -> Case:
    return replace(case, charges={each: set(said) for each, said in case.charges.items()})


def key_of(jury: Jury, now: float) -> object:
    """Times count from now; what is long over is all the same."""

    def ago(at: float) -> float:
        return max(LONG_AGO, round(at - now, 3))

    def ages(table: dict[Life, float]) -> object:
        return frozenset((each, ago(at)) for each, at in table.items())

    def facts(case: Case) -> object:
        charges = frozenset((each, frozenset(said)) for each, said in case.charges.items())
        flags = (case.link_ended, case.dial_refused, case.is_asked)
        times = (ago(case.begun), ago(case.until), ago(case.stuck_until))
        return (*times, charges, flags)

    evidence = jury._evidence
    return (
        frozenset((each, facts(case)) for each, case in jury._cases.items()),
        frozenset((p, ago(k.begun), ago(k.until), k.is_asked) for p, k in jury._links.items()),
        (ages(evidence._answered), ages(evidence._prompt), ages(evidence._told)),
        frozenset(evidence._late.items()),
        frozenset((each, ages(heard)) for each, heard in evidence._heard.items()),
        frozenset((each, g.patience, g.before, ago(g.since)) for each, g in jury._extended.items()),
    )
