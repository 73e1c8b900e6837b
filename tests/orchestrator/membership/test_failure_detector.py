"""The failure detector: proof, silence, signs of life, and dead links between living nodes."""

from __future__ import annotations

from allfold_orchestrator.membership.failure_detector import CONFIRM_SECONDS, FailureDetector
from allfold_orchestrator.membership.suspects import (
    ASK_AHEAD_SECONDS,
    Ask,
    Cleared,
    Evict,
    Probe,
)
from tests.orchestrator.detectors import AFTER, MEMBERS, RANKS, A, B, C, D, decided, evicted, silent

# Proof


def test_a_node_that_says_it_is_gone_is_evicted_at_once() -> None:
    assert FailureDetector().gone(A, "it leaves") == [Evict({A: "it leaves"}, is_proven=True)]


def test_a_refused_dial_and_the_end_of_the_control_link_are_proof() -> None:
    detector = FailureDetector()
    detector.reached(A)
    assert detector.link_ended(0.0, A, MEMBERS) == [Probe(A, (B, C))]
    (eviction,) = detector.dial_refused(A)
    assert isinstance(eviction, Evict)
    assert eviction.is_proven
    assert detector.is_idle


def test_a_refused_dial_and_an_reporter_that_was_refused_are_proof_in_either_order() -> None:
    detector = FailureDetector()
    detector.reached(A)
    detector.suspected(0.0, B, A, "refused", MEMBERS)
    assert set(evicted(detector.dial_refused(A))) == {A}
    detector.reached(A)
    silent(detector, 0.0, C, A)
    assert detector.dial_refused(A) == [], "one path alone may be a firewall"
    assert set(evicted(detector.suspected(0.1, B, A, "refused", MEMBERS))) == {A}


def test_a_node_that_is_doubted_before_its_members_are_known_is_decided_on_when_they_are() -> None:
    detector = FailureDetector()
    detector.reached(A)
    silent(detector, 0.0, C, A)
    assert detector.dial_refused(A) == []
    detector.doubted(0.1, A)
    assert set(evicted(detector.link_ended(0.1, A, MEMBERS))) == {A}


def test_a_refused_dial_of_a_node_that_was_never_reached_says_nothing() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "refused", MEMBERS)
    assert detector.dial_refused(A) == []
    assert decided(detector, CONFIRM_SECONDS - 0.01) == set()
    assert decided(detector, AFTER) == {"a"}, "for silence"


def test_a_node_that_was_never_reached_and_refuses_all_is_more_than_silent() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "refused", MEMBERS)
    silent(detector, 0.0, B, C)
    detector.dial_refused(A)
    detector.dial_refused(C)
    assert detector.refused_lives == {A}
    assert detector.decide(AFTER, RANKS, protected={A, C}) == []
    one, other = detector.decide(AFTER, RANKS)
    assert isinstance(one, Evict)
    assert isinstance(other, Evict)
    assert (set(one.lives), one.is_refused) == ({C}, False)
    assert (set(other.lives), other.is_refused, other.is_proven) == ({A}, True, False)


def test_a_refused_dial_of_a_node_that_nobody_suspects_says_nothing() -> None:
    detector = FailureDetector()
    detector.reached(A)
    assert detector.dial_refused(A) == []


# Silence


def test_silence_counts_from_the_first_suspicion_and_not_from_the_end_of_the_control_link() -> None:
    detector = FailureDetector()
    detector.link_ended(0.0, A, MEMBERS)
    silent(detector, 0.4, B, A)
    assert decided(detector, AFTER) == set()
    assert decided(detector, 0.4 + AFTER) == {"a"}


def test_a_suspected_node_is_probed_on_every_path_and_evicted_when_nobody_hears_it() -> None:
    detector = FailureDetector()
    assert silent(detector, 0.0, B, A) == [Probe(A, (C, D))]
    assert decided(detector, CONFIRM_SECONDS - 0.01) == set()
    (eviction,) = detector.decide(AFTER, RANKS)
    assert eviction == Evict({A: "was silent to b, and gave no sign of life"}, is_proven=False)


def test_what_could_not_be_carried_out_is_decided_again_by_what_is_known_then() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    silent(detector, 0.0, A, C)
    silent(detector, 0.3, A, D)
    assert set(evicted(detector.decide(AFTER, RANKS))) == {A, C}
    detector.over(C)
    assert detector.answered(2 * AFTER, A, 0.3) == [Cleared(B, A, 0.8)], "it lives after all"
    assert set(evicted(detector.decide(2 * AFTER, RANKS))) == {D}, (
        "and its own suspicion still stands"
    )


def test_an_answer_clears_the_node_and_its_reporters_are_twice_as_patient_for_a_while() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    silent(detector, 0.1, C, A)
    assert detector.answered(0.2, A, 0.3) == [Cleared(B, A, 0.8), Cleared(C, A, 0.8)]
    assert decided(detector, AFTER) == set()
    assert detector.patience(A, 30.0) == 0.8
    assert detector.patience(A, 31.0) == 0.4
    silent(detector, 1.0, B, A)
    assert decided(detector, 1.0 + AFTER) == set(), (
        "confirm is not shorter than the node's patience"
    )
    assert decided(detector, 1.0 + 0.81) == {"a"}


def test_patience_has_an_end() -> None:
    detector = FailureDetector()
    for number in range(10):
        now = 3.0 * number
        silent(detector, now, B, A)
        (cleared,) = detector.answered(now, A, 0.3)
    assert isinstance(cleared, Cleared)
    assert cleared.patience == 3.0


def test_those_who_suspect_a_node_one_after_the_other_wait_as_long_as_each_other() -> None:
    detector = FailureDetector()
    for now, reporter in ((0.0, B), (0.1, C), (0.2, D)):
        silent(detector, now, reporter, A)
        assert detector.answered(now, A, 0.3) == [Cleared(reporter, A, 0.8)]
    silent(detector, 0.3, B, A)
    assert decided(detector, 0.3 + AFTER) == {"a"}, "the patience is for the next time"


def test_an_reporter_is_asked_before_its_suspicion_is_decided() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    detector.answered(0.0, A, 0.0)
    asked = CONFIRM_SECONDS - ASK_AHEAD_SECONDS
    assert not detector.is_due(asked - 0.01)
    assert detector.is_due(asked)
    assert detector.decide(asked, RANKS) == []
    assert detector.questions(asked) == [Ask(B, A)]
    assert not detector.is_due(asked), "once"


def test_a_member_that_hears_the_node_after_the_suspicion_clears_it() -> None:
    detector = FailureDetector()
    silent(detector, 1.0, B, A)
    assert detector.told(1.2, C, {A: 0.3}) == [], "that was before"
    assert detector.told(1.3, C, {A: 0.1, B: 0.1}) == [Cleared(B, A, 0.8)]
    assert decided(detector, 1.0 + AFTER) == set()


def test_a_detector_that_was_late_itself_waits_longer() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    detector.lagged(2.0)
    assert decided(detector, AFTER) == set()
    assert decided(detector, 2.0 + AFTER) == {"a"}


def test_a_node_that_may_not_be_evicted_now_stays_suspected_until_it_may_or_is_heard() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    silent(detector, 0.0, C, D)
    assert detector.suspected_lives == {A, D}
    assert not detector.is_due(CONFIRM_SECONDS - ASK_AHEAD_SECONDS - 0.01)
    assert detector.is_due(AFTER, {A})
    assert set(evicted(detector.decide(AFTER, RANKS, protected={A}))) == {D}
    detector.over(D)
    assert not detector.is_due(AFTER, {A})
    assert detector.is_due(AFTER)
    assert not detector.is_idle
    assert decided(detector, 2 * AFTER) == {"a"}
    silent(detector, 5.0, B, A)
    assert detector.decide(5.0 + AFTER, RANKS, protected={A}) == []
    assert detector.answered(5.0 + 2 * AFTER, A, 0.3) == [Cleared(B, A, 0.8)]


def test_a_refusal_before_a_sign_of_life_proves_nothing_of_what_comes_after_it() -> None:
    detector = FailureDetector()
    detector.reached(A)
    detector.suspected(0.0, B, A, "stuck", MEMBERS)
    assert detector.dial_refused(A) == []
    detector.answered(0.1, A, 0.0)
    assert detector.link_ended(0.2, A, MEMBERS) == [Probe(A, (B, C))]
    assert set(evicted(detector.dial_refused(A))) == {A}


def test_a_sign_of_life_is_waited_for_from_when_all_replicas_were_asked_for_it() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    detector.asked(5.0, A)
    silent(detector, 5.4, C, A)
    detector.asked(5.4, A)
    detector.asked(5.4, D)
    assert decided(detector, 5.0 + CONFIRM_SECONDS - 0.01) == set()
    assert decided(detector, 5.0 + AFTER) == {"a"}, "from the first time"


def test_nothing_is_kept_of_lives_that_are_over() -> None:
    detector = FailureDetector()
    for life in MEMBERS:
        detector.reached(life)
        detector.answered(0.0, life, 0.0)
        detector.told(0.0, life, dict.fromkeys(MEMBERS, 0.1))
        silent(detector, 0.1, life, A)
        detector.answered(0.2, A, 0.3)
    for life in MEMBERS:
        detector.over(life)
    assert detector._evidence.lives == set()
    assert (detector.is_idle, detector._extended) == (True, {})


def test_a_suspected_node_is_waited_for_longer_if_its_reporter_is_late_itself() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, B, A, "silent", MEMBERS, lag=0.3)
    assert decided(detector, AFTER) == set()
    assert decided(detector, 0.3 + AFTER) == {"a"}


def test_a_node_whose_reporter_is_gone_is_no_longer_suspected() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    silent(detector, 0.0, A, C)
    detector.told(0.1, D, {A: 0.0, B: 0.0})
    detector.forget(B)
    detector.forget(A)
    assert detector.is_idle


def test_another_life_of_a_node_starts_without_a_suspicion() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, B, A)
    detector.answered(0.1, ("a", "2"), 0.0)
    assert decided(detector, AFTER) == {"a"}
    assert detector.patience(("a", "2"), 0.2) == 0.4


# The orchestrator's own silence


def test_the_end_of_the_control_link_alone_evicts_nobody_whom_a_member_hears() -> None:
    detector = FailureDetector()
    detector.link_ended(0.0, A, MEMBERS)
    detector.told(0.1, B, {A: 0.5})
    assert decided(detector, AFTER) == set()
    assert detector.is_idle


def test_nor_does_it_where_nobody_could_hear_the_node() -> None:
    detector = FailureDetector()
    detector.link_ended(0.0, A, ())
    detector.told(0.1, B, {C: 5.0})
    assert decided(detector, AFTER) == set()


def test_it_does_where_all_members_miss_the_node() -> None:
    detector = FailureDetector()
    detector.link_ended(2.0, A, MEMBERS)
    detector.told(2.1, B, {A: 0.9})
    assert decided(detector, 2.0 + AFTER) == {"a"}


def test_a_node_that_links_anew_is_cleared() -> None:
    detector = FailureDetector()
    assert detector.linked(0.0, A) == []
    detector.reached(A)
    detector.link_ended(0.0, A, MEMBERS)
    assert detector.linked(0.1, A) == []
    assert detector.is_idle
    detector.suspected(0.2, B, A, "stuck", MEMBERS)
    detector.link_ended(0.3, A, MEMBERS)
    assert detector.linked(0.4, A) == []
    assert detector.dial_refused(A) == [], "the link is there again, so that is no second path"
    detector.forget(B)
    assert detector.is_idle


def test_a_search_for_a_life_that_may_not_be_evicted_ends_nevertheless() -> None:
    """Nobody suspects it: it is looked for again when its lease is over."""
    detector = FailureDetector()
    detector.link_ended(0.0, A, MEMBERS)
    detector.told(0.0, B, {A: 60.0})
    assert detector.is_due(AFTER, protected=[A])
    assert detector.decide(AFTER, RANKS, protected=[A]) == []
    assert detector.is_idle
