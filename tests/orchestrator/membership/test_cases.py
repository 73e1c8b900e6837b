"""The sentence about a node that others accuse."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from allfold_orchestrator.membership.cases import Case, Charge
from allfold_orchestrator.membership.group_state import Life

A, B, C = ((name, "1") for name in "abc")


@pytest.mark.parametrize(
    ("charges", "how"),
    [
        ({A: Charge.REFUSED}, "refused connections of a, and gave no sign of life"),
        (
            {B: Charge.SILENT, A: Charge.REFUSED, C: Charge.SILENT},
            "refused connections of a, was silent to b, c, and gave no sign of life",
        ),
        (
            {A: Charge.STUCK, B: Charge.SILENT},
            "was silent to b, did not do its part for a, and gave no sign of life",
        ),
        ({A: Charge.STUCK}, "was stuck: it answered a, but did not do its part"),
    ],
    ids=["refused", "refused and silent", "silent and stuck", "stuck"],
)
def test_the_reason_names_for_each_charge_those_who_made_it(
    charges: Mapping[Life, Charge], how: str
) -> None:
    case = Case(0.0, 1.0)
    for accuser, charge in charges.items():
        case.charge(accuser, charge)
    assert case.how == how
