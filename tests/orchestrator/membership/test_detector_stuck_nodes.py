"""Nodes that live and answer, but do not do their part: no answer saves them."""

from __future__ import annotations

import pytest

from allfold_orchestrator.membership.failure_detector import CONFIRM_SECONDS, FailureDetector
from allfold_orchestrator.membership.suspects import Cleared
from tests.orchestrator.detectors import AFTER, MEMBERS, RANKS, A, B, C, D, decided, evicted, silent


def test_a_stuck_node_is_not_saved_by_its_answers() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    assert detector.answered(0.1, A, 0.0) == []
    assert detector.told(0.2, C, {A: 0.0}) == []
    assert decided(detector, AFTER) == {"a"}


def test_a_node_that_lives_is_silent_no_more_but_stuck_as_long_as_its_reporter_says_so() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    silent(detector, 0.1, B, A)
    silent(detector, 0.1, C, A)
    assert detector.answered(0.2, A, 0.3) == [Cleared(B, A, 0.8), Cleared(C, A, 0.8)]
    assert detector.answered(0.3, A, 0.3) == []
    (eviction,) = detector.decide(AFTER, RANKS)
    assert eviction.lives == {A: "was stuck: it answered b, but did not do its part"}


def test_a_node_is_suspected_of_being_stuck_for_as_long_whatever_it_was_suspected_of_before() -> (
    None
):
    detector = FailureDetector()
    silent(detector, 0.0, C, A)
    detector.suspected(0.4, B, A, "stuck", MEMBERS)
    detector.answered(0.45, A, 0.0)
    assert decided(detector, AFTER) == set()
    assert decided(detector, 0.4 + AFTER) == {"a"}


@pytest.mark.parametrize("was_silent", [False, True])
def test_a_node_is_waited_for_as_long_if_it_was_suspected_of_being_stuck_before(
    was_silent: bool,
) -> None:
    detector = FailureDetector()
    detector.suspected(0.0, C, A, "stuck", MEMBERS)
    detector.asked(0.0, A)
    if was_silent:
        silent(detector, 0.1, D, A)
        assert detector.answered(0.2, A, 0.0)
        detector.told(0.3, D, {A: 0.0})
    silent(detector, 0.49, B, A)
    detector.asked(0.6, A)
    detector.withdrawn(C, A, "stuck")
    assert not detector.is_due(AFTER, ())
    assert decided(detector, 0.6 + CONFIRM_SECONDS - 0.01) == set(), "from when it was asked"
    assert decided(detector, 0.6 + 2 * AFTER) == {"a"}


def test_our_own_doubt_waits_as_long_if_the_node_was_suspected_of_being_stuck_before() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    detector.link_ended(0.49, A, MEMBERS)
    detector.withdrawn(B, A, "stuck")
    detector.told(0.5, B, {A: 0.9})
    assert decided(detector, AFTER) == set()
    assert decided(detector, 0.49 + AFTER) == {"a"}


def test_silence_that_is_disproved_over_and_over_does_not_save_a_stuck_node() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, C, A, "stuck", MEMBERS)
    for now in (0.2, 0.4):
        silent(detector, now, B, A)
        detector.answered(now + 0.05, A, 0.0)
    silent(detector, 0.49, B, A)
    assert decided(detector, AFTER) == {"a"}


def test_a_detector_that_was_late_itself_waits_longer_for_a_stuck_node() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    detector.lagged(2.0)
    assert decided(detector, AFTER) == set()
    assert decided(detector, 2.0 + AFTER) == {"a"}


def test_a_stuck_node_is_cleared_when_all_who_suspected_it_take_that_back() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    detector.suspected(0.0, C, A, "stuck", MEMBERS)
    detector.withdrawn(B, A, "stuck")
    detector.withdrawn(D, A, "stuck")
    assert detector.suspected_lives == {A}, "one of them has not"
    detector.withdrawn(C, A, "stuck")
    assert detector.is_idle
    assert decided(detector, AFTER) == set()


def test_a_suspicion_is_taken_back_alone() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    detector.suspected(0.1, B, A, "stuck", MEMBERS)
    detector.withdrawn(B, A, "silent")
    assert set(evicted(detector.decide(0.1 + AFTER, RANKS))) == {A}, "it is stuck"
    silent(detector, 1.0, B, A)
    detector.withdrawn(B, A, "stuck")
    detector.answered(1.1, A, 0.0)
    detector.told(1.0 + AFTER, B, {A: 5.0})
    assert len(detector.decide(1.0 + AFTER, RANKS)) == 1, "nothing passes on the link"
    detector.withdrawn(B, A, "silent")
    assert detector.is_idle


def test_a_suspicion_that_was_taken_back_does_not_end_our_own_doubt() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    detector.link_ended(0.0, A, MEMBERS)
    detector.withdrawn(B, A, "stuck")
    assert detector.suspected_lives == {A}
