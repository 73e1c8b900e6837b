"""The jury: proof, silence, signs of life, and links that are dead while both ends live."""

from __future__ import annotations

from allfold_orchestrator.membership.cases import ASK_AHEAD_SECONDS, Charge
from allfold_orchestrator.membership.jury import (
    CONFIRM_SECONDS,
    Ask,
    Cleared,
    Evict,
    Jury,
    Probe,
)
from tests.orchestrator.juries import AFTER, MEMBERS, RANKS, A, B, C, D, decided, evicted, silent

# Proof


def test_a_node_that_says_it_is_gone_is_evicted_at_once() -> None:
    assert Jury().gone(A, "it leaves") == [Evict({A: "it leaves"}, is_proven=True)]


def test_a_refused_dial_and_the_end_of_the_control_link_are_proof() -> None:
    jury = Jury()
    jury.reached(A)
    assert jury.link_ended(0.0, A, MEMBERS) == [Probe(A, (B, C))]
    (verdict,) = jury.dial_refused(A)
    assert isinstance(verdict, Evict)
    assert verdict.is_proven
    assert jury.is_idle


def test_a_refused_dial_and_an_accuser_that_was_refused_are_proof_in_either_order() -> None:
    jury = Jury()
    jury.reached(A)
    jury.accused(0.0, B, A, Charge.REFUSED, MEMBERS)
    assert set(evicted(jury.dial_refused(A))) == {A}
    jury.reached(A)
    silent(jury, 0.0, C, A)
    assert jury.dial_refused(A) == [], "one path alone may be a firewall"
    assert set(evicted(jury.accused(0.1, B, A, Charge.REFUSED, MEMBERS))) == {A}


def test_a_node_that_is_doubted_before_its_members_are_known_is_judged_when_they_are() -> None:
    jury = Jury()
    jury.reached(A)
    silent(jury, 0.0, C, A)
    assert jury.dial_refused(A) == []
    jury.doubted(0.1, A)
    assert set(evicted(jury.link_ended(0.1, A, MEMBERS))) == {A}


def test_a_refused_dial_of_a_node_that_was_never_reached_says_nothing() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.REFUSED, MEMBERS)
    assert jury.dial_refused(A) == []
    assert decided(jury, CONFIRM_SECONDS - 0.01) == set()
    assert decided(jury, AFTER) == {"a"}, "for silence"


def test_a_node_that_was_never_reached_and_refuses_all_is_more_than_silent() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.REFUSED, MEMBERS)
    silent(jury, 0.0, B, C)
    jury.dial_refused(A)
    jury.dial_refused(C)
    assert jury.refused_lives == {A}
    assert jury.decide(AFTER, RANKS, protected={A, C}) == []
    one, other = jury.decide(AFTER, RANKS)
    assert isinstance(one, Evict)
    assert isinstance(other, Evict)
    assert (set(one.lives), one.is_refused) == ({C}, False)
    assert (set(other.lives), other.is_refused, other.is_proven) == ({A}, True, False)


def test_a_refused_dial_of_a_node_that_nobody_accuses_says_nothing() -> None:
    jury = Jury()
    jury.reached(A)
    assert jury.dial_refused(A) == []


# Silence


def test_silence_counts_from_the_first_accusation_and_not_from_the_end_of_the_control_link() -> (
    None
):
    jury = Jury()
    jury.link_ended(0.0, A, MEMBERS)
    silent(jury, 0.4, B, A)
    assert decided(jury, AFTER) == set()
    assert decided(jury, 0.4 + AFTER) == {"a"}


def test_an_accused_node_is_probed_on_every_path_and_evicted_when_nobody_hears_it() -> None:
    jury = Jury()
    assert silent(jury, 0.0, B, A) == [Probe(A, (C, D))]
    assert decided(jury, CONFIRM_SECONDS - 0.01) == set()
    (verdict,) = jury.decide(AFTER, RANKS)
    assert verdict == Evict({A: "was silent to b, and gave no sign of life"}, is_proven=False)


def test_what_could_not_be_carried_out_is_decided_again_by_what_is_known_then() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    silent(jury, 0.0, A, C)
    silent(jury, 0.3, A, D)
    assert set(evicted(jury.decide(AFTER, RANKS))) == {A, C}
    jury.over(C)
    assert jury.answered(2 * AFTER, A, 0.3) == [Cleared(B, A, 0.8)], "it lives after all"
    assert set(evicted(jury.decide(2 * AFTER, RANKS))) == {D}, "and its own charge still stands"


def test_an_answer_clears_the_node_and_its_accusers_are_twice_as_patient_for_a_while() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    silent(jury, 0.1, C, A)
    assert jury.answered(0.2, A, 0.3) == [Cleared(B, A, 0.8), Cleared(C, A, 0.8)]
    assert decided(jury, AFTER) == set()
    assert jury.patience(A, 30.0) == 0.8
    assert jury.patience(A, 31.0) == 0.4
    silent(jury, 1.0, B, A)
    assert decided(jury, 1.0 + AFTER) == set(), "confirm is not shorter than the node's patience"
    assert decided(jury, 1.0 + 0.81) == {"a"}


def test_patience_has_an_end() -> None:
    jury = Jury()
    for number in range(10):
        now = 3.0 * number
        silent(jury, now, B, A)
        (cleared,) = jury.answered(now, A, 0.3)
    assert isinstance(cleared, Cleared)
    assert cleared.patience == 3.0


def test_those_who_accuse_a_node_one_after_the_other_wait_as_long_as_each_other() -> None:
    jury = Jury()
    for now, accuser in ((0.0, B), (0.1, C), (0.2, D)):
        silent(jury, now, accuser, A)
        assert jury.answered(now, A, 0.3) == [Cleared(accuser, A, 0.8)]
    silent(jury, 0.3, B, A)
    assert decided(jury, 0.3 + AFTER) == {"a"}, "the patience is for the next time"


def test_an_accuser_is_asked_before_its_charge_is_decided() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    jury.answered(0.0, A, 0.0)
    asked = CONFIRM_SECONDS - ASK_AHEAD_SECONDS
    assert not jury.is_due(asked - 0.01)
    assert jury.is_due(asked)
    assert jury.decide(asked, RANKS) == []
    assert jury.questions(asked) == [Ask(B, A)]
    assert not jury.is_due(asked), "once"


def test_a_member_that_hears_the_node_after_the_accusation_clears_it() -> None:
    jury = Jury()
    silent(jury, 1.0, B, A)
    assert jury.told(1.2, C, {A: 0.3}) == [], "that was before"
    assert jury.told(1.3, C, {A: 0.1, B: 0.1}) == [Cleared(B, A, 0.8)]
    assert decided(jury, 1.0 + AFTER) == set()


def test_a_jury_that_was_late_itself_waits_longer() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    jury.lagged(2.0)
    assert decided(jury, AFTER) == set()
    assert decided(jury, 2.0 + AFTER) == {"a"}


def test_a_node_that_may_not_be_evicted_now_stays_accused_until_it_may_or_is_heard() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    silent(jury, 0.0, C, D)
    assert jury.accused_lives == {A, D}
    assert not jury.is_due(CONFIRM_SECONDS - ASK_AHEAD_SECONDS - 0.01)
    assert jury.is_due(AFTER, {A})
    assert set(evicted(jury.decide(AFTER, RANKS, protected={A}))) == {D}
    jury.over(D)
    assert not jury.is_due(AFTER, {A})
    assert jury.is_due(AFTER)
    assert not jury.is_idle
    assert decided(jury, 2 * AFTER) == {"a"}
    silent(jury, 5.0, B, A)
    assert jury.decide(5.0 + AFTER, RANKS, protected={A}) == []
    assert jury.answered(5.0 + 2 * AFTER, A, 0.3) == [Cleared(B, A, 0.8)]


def test_a_refusal_before_a_sign_of_life_proves_nothing_of_what_comes_after_it() -> None:
    jury = Jury()
    jury.reached(A)
    jury.accused(0.0, B, A, Charge.STUCK, MEMBERS)
    assert jury.dial_refused(A) == []
    jury.answered(0.1, A, 0.0)
    assert jury.link_ended(0.2, A, MEMBERS) == [Probe(A, (B, C))]
    assert set(evicted(jury.dial_refused(A))) == {A}


def test_a_sign_of_life_is_waited_for_from_when_all_replicas_were_asked_for_it() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    jury.asked(5.0, A)
    silent(jury, 5.4, C, A)
    jury.asked(5.4, A)
    jury.asked(5.4, D)
    assert decided(jury, 5.0 + CONFIRM_SECONDS - 0.01) == set()
    assert decided(jury, 5.0 + AFTER) == {"a"}, "from the first time"


def test_nothing_is_kept_of_lives_that_are_over() -> None:
    jury = Jury()
    for life in MEMBERS:
        jury.reached(life)
        jury.answered(0.0, life, 0.0)
        jury.told(0.0, life, dict.fromkeys(MEMBERS, 0.1))
        silent(jury, 0.1, life, A)
        jury.answered(0.2, A, 0.3)
    for life in MEMBERS:
        jury.over(life)
    assert jury._evidence.lives == set()
    assert (jury.is_idle, jury._extended) == (True, {})


def test_an_accused_node_is_waited_for_longer_if_its_accuser_is_late_itself() -> None:
    jury = Jury()
    jury.accused(0.0, B, A, Charge.SILENT, MEMBERS, lag=0.3)
    assert decided(jury, AFTER) == set()
    assert decided(jury, 0.3 + AFTER) == {"a"}


def test_a_node_whose_accuser_is_gone_is_no_longer_accused() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    silent(jury, 0.0, A, C)
    jury.told(0.1, D, {A: 0.0, B: 0.0})
    jury.forget(B)
    jury.forget(A)
    assert jury.is_idle


def test_another_life_of_a_node_starts_without_a_charge() -> None:
    jury = Jury()
    silent(jury, 0.0, B, A)
    jury.answered(0.1, ("a", "2"), 0.0)
    assert decided(jury, AFTER) == {"a"}
    assert jury.patience(("a", "2"), 0.2) == 0.4


# The orchestrator's own silence


def test_the_end_of_the_control_link_alone_evicts_nobody_whom_a_member_hears() -> None:
    jury = Jury()
    jury.link_ended(0.0, A, MEMBERS)
    jury.told(0.1, B, {A: 0.5})
    assert decided(jury, AFTER) == set()
    assert jury.is_idle


def test_nor_does_it_where_nobody_could_hear_the_node() -> None:
    jury = Jury()
    jury.link_ended(0.0, A, ())
    jury.told(0.1, B, {C: 5.0})
    assert decided(jury, AFTER) == set()


def test_it_does_where_all_members_miss_the_node() -> None:
    jury = Jury()
    jury.link_ended(2.0, A, MEMBERS)
    jury.told(2.1, B, {A: 0.9})
    assert decided(jury, 2.0 + AFTER) == {"a"}


def test_a_node_that_links_anew_is_cleared() -> None:
    jury = Jury()
    assert jury.linked(0.0, A) == []
    jury.reached(A)
    jury.link_ended(0.0, A, MEMBERS)
    assert jury.linked(0.1, A) == []
    assert jury.is_idle
    jury.accused(0.2, B, A, Charge.STUCK, MEMBERS)
    jury.link_ended(0.3, A, MEMBERS)
    assert jury.linked(0.4, A) == []
    assert jury.dial_refused(A) == [], "the link is there again, so that is no second path"
    jury.forget(B)
    assert jury.is_idle


def test_a_search_for_a_life_that_may_not_be_evicted_ends_nevertheless() -> None:
    """Nobody accuses it: it is looked for again when its lease is over."""
    jury = Jury()
    jury.link_ended(0.0, A, MEMBERS)
    jury.told(0.0, B, {A: 60.0})
    assert jury.is_due(AFTER, protected=[A])
    assert jury.decide(AFTER, RANKS, protected=[A]) == []
    assert jury.is_idle
