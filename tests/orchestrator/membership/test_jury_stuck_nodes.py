"""Nodes that live and answer, but do not do their part: no answer saves them."""

from __future__ import annotations

import pytest

from allfold_orchestrator.membership.cases import Charge
from allfold_orchestrator.membership.jury import (
    CONFIRM_SECONDS,
    Cleared,
    Jury,
)
from tests.orchestrator.juries import AFTER, MEMBERS, RANKS, A, B, C, D, decided, evicted, silent


def test_a_stuck_node_is_not_saved_by_its_answers() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    assert jury.answered(0.1, A, 0.0) == []
    assert jury.told(0.2, C, {A: 0.0}) == []
    assert decided(jury, AFTER) == {"a"}


def test_a_node_that_lives_is_silent_no_more_but_stuck_as_long_as_its_accuser_says_so() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    silent(jury, 0.1, B, A)
    silent(jury, 0.1, C, A)
    assert jury.answered(0.2, A, 0.3) == [Cleared(B, A, 0.8), Cleared(C, A, 0.8)]
    assert jury.answered(0.3, A, 0.3) == []
    (verdict,) = jury.decide(AFTER, RANKS)
    assert verdict.lives == {A: "was stuck: it answered b, but did not do its part"}


def test_a_node_is_accused_of_being_stuck_for_as_long_whatever_it_was_accused_of_before() -> None:
    jury = Jury()
    silent(jury, 0.0, C, A)
    jury.accused(0.4, B, A, Charge.STUCK, MEMBERS)
    jury.answered(0.45, A, 0.0)
    assert decided(jury, AFTER) == set()
    assert decided(jury, 0.4 + AFTER) == {"a"}


@pytest.mark.parametrize("was_silent", [False, True])
def test_a_node_is_waited_for_as_long_if_it_was_accused_of_being_stuck_before(
    was_silent: bool,
) -> None:
    jury = Jury()
    jury.accused(0.0, C, A, Charge.STUCK, MEMBERS)
    jury.asked(0.0, A)
    if was_silent:
        silent(jury, 0.1, D, A)
        assert jury.answered(0.2, A, 0.0)
        jury.told(0.3, D, {A: 0.0})
    silent(jury, 0.49, B, A)
    jury.asked(0.6, A)
    jury.withdrawn(C, A, Charge.STUCK)
    assert not jury.is_due(AFTER, ())
    assert decided(jury, 0.6 + CONFIRM_SECONDS - 0.01) == set(), "from when it was asked"
    assert decided(jury, 0.6 + 2 * AFTER) == {"a"}


def test_our_own_doubt_waits_as_long_if_the_node_was_accused_of_being_stuck_before() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    jury.link_ended(0.49, A, MEMBERS)
    jury.withdrawn(B, A, Charge.STUCK)
    jury.told(0.5, B, {A: 0.9})
    assert decided(jury, AFTER) == set()
    assert decided(jury, 0.49 + AFTER) == {"a"}


def test_silence_that_is_disproved_over_and_over_does_not_save_a_stuck_node() -> None:
    jury = Jury()
    jury.accused(0.0, C, A, Charge.STUCK, MEMBERS)
    for now in (0.2, 0.4):
        silent(jury, now, B, A)
        jury.answered(now + 0.05, A, 0.0)
    silent(jury, 0.49, B, A)
    assert decided(jury, AFTER) == {"a"}


def test_a_jury_that_was_late_itself_waits_longer_for_a_stuck_node() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    jury.lagged(2.0)
    assert decided(jury, AFTER) == set()
    assert decided(jury, 2.0 + AFTER) == {"a"}


def test_a_stuck_node_is_acquitted_when_all_who_accused_it_take_that_back() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    jury.accused(0.0, C, A, Charge.STUCK, MEMBERS)
    jury.withdrawn(B, A, Charge.STUCK)
    jury.withdrawn(D, A, Charge.STUCK)
    assert jury.accused_lives == {A}, "one of them has not"
    jury.withdrawn(C, A, Charge.STUCK)
    assert jury.is_idle
    assert decided(jury, AFTER) == set()


def test_a_charge_is_taken_back_alone() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    jury.accused(0.1, B, A, Charge.STUCK, MEMBERS)
    jury.withdrawn(B, A, Charge.SILENT)
    assert set(evicted(jury.decide(0.1 + AFTER, RANKS))) == {A}, "it is stuck"
    silent(jury, 1.0, B, A)
    jury.withdrawn(B, A, Charge.STUCK)
    jury.answered(1.1, A, 0.0)
    jury.told(1.0 + AFTER, B, {A: 5.0})
    assert len(jury.decide(1.0 + AFTER, RANKS)) == 1, "nothing passes on the link"
    jury.withdrawn(B, A, Charge.SILENT)
    assert jury.is_idle


def test_a_charge_that_was_taken_back_does_not_end_our_own_doubt() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    jury.link_ended(0.0, A, MEMBERS)
    jury.withdrawn(B, A, Charge.STUCK)
    assert jury.accused_lives == {A}
