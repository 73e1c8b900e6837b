"""Silence while the replica itself could not hear counts against nobody."""

from __future__ import annotations

from allfold_orchestrator.membership.failure_detector import FailureDetector
from tests.orchestrator.detectors import AFTER, MEMBERS, A, B, C, D, decided


def test_what_an_reporter_said_is_dropped_when_it_can_no_longer_take_it_back() -> None:
    detector = FailureDetector()
    for kind in ("stuck", "silent"):
        detector.suspected(0.0, B, A, kind, MEMBERS)
    detector.suspected(0.0, C, D, "silent", MEMBERS)
    detector.unlinked(B)
    assert detector.lives_in_question == {C, D}
    assert decided(detector, AFTER) == {"d"}


def test_what_another_reporter_said_still_holds() -> None:
    detector = FailureDetector()
    for reporter in (B, C):
        detector.suspected(0.0, reporter, A, "silent", MEMBERS)
    detector.unlinked(B)
    assert decided(detector, AFTER) == {"a"}


def test_after_an_interruption_nothing_is_decided_before_all_could_speak_again() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "silent", MEMBERS)
    detector.suspected(0.0, B, C, "stuck", MEMBERS)
    detector.wait_until(5.0)
    assert decided(detector, 4.99) == set()
    assert decided(detector, 5.01) == {"a", "c"}


def test_an_interruption_brings_no_decision_forward() -> None:
    detector = FailureDetector()
    detector.suspected(4.9, B, A, "silent", MEMBERS)
    detector.wait_until(5.0)
    assert decided(detector, 5.01) == set()
    assert decided(detector, 4.9 + AFTER) == {"a"}
