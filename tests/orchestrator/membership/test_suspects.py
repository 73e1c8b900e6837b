"""The sentence about a node that others suspect."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from allfold_core.survival.suspicion import SuspicionKind
from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.suspects import SuspectedLife

A, B, C = ((name, "1") for name in "abc")


@pytest.mark.parametrize(
    ("suspicions", "how"),
    [
        ({A: "refused"}, "refused connections of a, and gave no sign of life"),
        (
            {B: "silent", A: "refused", C: "silent"},
            "refused connections of a, was silent to b, c, and gave no sign of life",
        ),
        (
            {A: "stuck", B: "silent"},
            "was silent to b, did not do its part for a, and gave no sign of life",
        ),
        ({A: "stuck"}, "was stuck: it answered a, but did not do its part"),
    ],
    ids=["refused", "refused and silent", "silent and stuck", "stuck"],
)
def test_the_reason_names_for_each_suspicion_those_who_made_it(
    suspicions: Mapping[Life, SuspicionKind], how: str
) -> None:
    case = SuspectedLife(0.0, 1.0)
    for reporter, kind in suspicions.items():
        case.add(reporter, kind)
    assert case.how == how
