"""Silence while the replica itself could not hear counts against nobody."""

from __future__ import annotations

from allfold_orchestrator.membership.cases import Charge
from allfold_orchestrator.membership.jury import Jury
from tests.orchestrator.juries import AFTER, MEMBERS, A, B, C, D, decided


def test_what_an_accuser_said_is_dropped_when_it_can_no_longer_take_it_back() -> None:
    jury = Jury()
    for charge in (Charge.STUCK, Charge.SILENT):
        jury.accused(0.0, B, A, charge, MEMBERS)
    jury.accused(0.0, C, D, Charge.SILENT, MEMBERS)
    jury.unlinked(B)
    assert jury.lives_in_question == {C, D}
    assert decided(jury, AFTER) == {"d"}


def test_what_another_accuser_said_still_holds() -> None:
    jury = Jury()
    for accuser in (B, C):
        jury.accused(0.0, accuser, A, Charge.SILENT, MEMBERS)
    jury.unlinked(B)
    assert decided(jury, AFTER) == {"a"}


def test_after_an_interruption_nothing_is_decided_before_all_could_speak_again() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.SILENT, MEMBERS)
    jury.accused(0.0, B, C, Charge.STUCK, MEMBERS)
    jury.wait_until(5.0)
    assert decided(jury, 4.99) == set()
    assert decided(jury, 5.01) == {"a", "c"}


def test_an_interruption_brings_no_decision_forward() -> None:
    jury = Jury()
    jury.accused(4.9, B, A, Charge.SILENT, MEMBERS)
    jury.wait_until(5.0)
    assert decided(jury, 5.01) == set()
    assert decided(jury, 4.9 + AFTER) == {"a"}
