"""The failure detector on links that are dead while both ends live."""

from __future__ import annotations

from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.failure_detector import FailureDetector
from allfold_orchestrator.membership.suspects import Evict
from tests.orchestrator.detectors import (
    AFTER,
    MEMBERS,
    RANKS,
    A,
    B,
    C,
    D,
    decided,
    evicted,
    silent,
)


def cut(
    detector: FailureDetector, now: float, *pairs: tuple[Life, Life], leaders: str = ""
) -> set[str]:
    """Each end suspects the other one; all live, and nothing comes back on these links."""
    for one, other in pairs:
        silent(detector, now, one, other)
        silent(detector, now, other, one)
    for life in {life for pair in pairs for life in pair}:
        detector.answered(now + 0.01, life, 0.0)
        detector.told(now + 0.01, life, {})
    assert decided(detector, now + AFTER) == set(), "not before the reporters have said it again"
    for life in {life for pair in pairs for life in pair}:
        detector.told(now + AFTER, life, {peer: 1.0 for pair in pairs for peer in pair})
    return decided(detector, now + AFTER, leaders)


def test_of_a_dead_link_one_end_goes_and_the_leader_stays() -> None:
    assert cut(FailureDetector(), 5.0, (A, B), leaders="a") == {"b"}
    assert cut(FailureDetector(), 5.0, (A, B), leaders="b") == {"a"}


def test_the_reason_names_the_other_ends_of_the_dead_links() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    detector.told(AFTER, A, {B: 2.0})
    assert detector.decide(AFTER, RANKS, "a") == [
        Evict({B: "has no connection with a, although both ends live"}, is_proven=False)
    ]


def test_a_node_cut_off_from_all_others_goes_alone() -> None:
    assert cut(FailureDetector(), 5.0, (A, B), (A, C), (A, D), leaders="a") == {"a"}


def test_a_dead_link_of_a_node_that_may_not_be_evicted_now_waits() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    detector.told(AFTER, A, {B: 2.0})
    assert evicted(detector.decide(AFTER, RANKS, "a", {B})) == {}
    assert decided(detector, AFTER, "a") == {"b"}


def test_nobody_waits_longer_for_a_node_for_what_one_behind_dead_links_said_of_it() -> None:
    detector = FailureDetector()
    assert cut(detector, 5.0, (A, B), (A, C), leaders="b") == {"a"}
    assert detector.patience(B, 6.0) == detector.patience(C, 6.0) == 0.4


def test_a_link_that_came_back_is_not_dead() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    detector.told(AFTER, A, {B: 0.1})
    assert decided(detector, AFTER) == set()
    assert detector.is_idle


def test_a_node_that_is_too_slow_to_read_its_links_does_not_make_them_dead() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.2)
    detector.told(AFTER, A, {B: 2.0})
    assert decided(detector, AFTER) == set()
    assert detector.is_idle


def test_an_reporter_that_is_silent_itself_makes_no_link_dead() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    assert decided(detector, AFTER) == set()
    assert detector.is_idle


def test_a_node_that_a_member_hears_lives_too() -> None:
    detector = FailureDetector()
    silent(detector, 1.0, A, B)
    detector.told(1.2, C, {B: 0.1})
    detector.told(1.0 + AFTER, A, {B: 2.0})
    assert decided(detector, 1.0 + AFTER) in ({"a"}, {"b"})


def test_no_link_of_a_node_is_dead_while_a_sign_of_its_life_is_waited_for() -> None:
    detector = FailureDetector()
    detector.told(0.9, C, {B: 0.0})
    silent(detector, 1.0, A, B)
    detector.asked(1.4, B)
    detector.told(1.0 + AFTER, A, {B: 0.6})
    detector.told(1.0 + AFTER, C, {B: 0.6})
    assert not detector.is_due(1.0 + AFTER)
    assert decided(detector, 1.0 + AFTER) == set()
    assert decided(detector, 1.4 + AFTER) == {"b"}


def test_a_link_is_not_dead_because_its_end_was_stopped_until_just_now() -> None:
    """The reporter's word about the time before was under way when the other end went on."""
    detector = FailureDetector()
    silent(detector, 1.0, A, B)
    detector.answered(2.0, B, 0.0)
    detector.told(2.01, A, {B: 1.5})
    assert not detector.is_due(2.01)
    assert decided(detector, 2.01) == set()
    detector.told(2.2, A, {B: 0.1})
    assert detector.is_idle


def test_a_link_is_dead_that_lets_nothing_pass_after_its_end_has_gone_on() -> None:
    detector = FailureDetector()
    silent(detector, 1.0, A, B)
    detector.answered(2.0, B, 0.0)
    detector.told(2.01, A, {B: 1.5})
    detector.answered(2.4, B, 0.0)
    detector.told(2.0 + AFTER, A, {B: 2.1})
    assert decided(detector, 2.0 + AFTER, "a") == {"b"}


def test_what_a_member_reads_after_it_was_stopped_is_no_sign_of_anothers_life() -> None:
    detector = FailureDetector()
    silent(detector, 1.0, A, B)
    detector.told(1.3, C, {B: 0.1}, lag=1.2)  # C has read what B had sent before both were stopped
    detector.answered(1.65, B, 0.0)
    detector.told(1.67, A, {B: 1.5})
    assert decided(detector, 1.67) == set()
    detector.told(1.8, A, {B: 0.1})
    assert detector.is_idle


def test_a_node_that_died_just_before_it_was_suspected_makes_no_link_dead() -> None:
    detector = FailureDetector()
    silent(detector, 1.0, A, B)
    detector.answered(1.0, B, 0.0)  # sent long before
    detector.told(1.0, C, {B: 0.1})
    detector.link_ended(1.1, B, MEMBERS)
    detector.told(1.0 + AFTER, A, {B: 0.6})
    assert decided(detector, 1.1 + AFTER) == set()
    assert decided(detector, 1.1 + AFTER) == set()
    assert detector.is_idle


def test_what_a_node_said_before_its_control_link_ended_is_no_sign_of_life_afterwards() -> None:
    detector = FailureDetector()
    silent(detector, 1.0, A, B)
    detector.answered(1.1, B, 0.0)
    detector.link_ended(1.2, B, MEMBERS)
    detector.linked(1.3, B)
    detector.told(1.0 + AFTER, A, {B: 0.6})
    assert decided(detector, 1.0 + AFTER) == set()


def test_links_that_died_together_are_decided_on_together() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    silent(detector, 0.4, A, C)
    detector.answered(0.41, C, 0.0)
    detector.told(AFTER, A, {B: 2.0, C: 2.0})
    assert decided(detector, AFTER, "a") == set(), "the other link is still in question"
    detector.told(0.4 + AFTER, A, {B: 2.0, C: 2.0})
    assert decided(detector, 0.4 + AFTER, "a") == {"a"}, "one node for two links"


def test_a_link_that_makes_no_difference_is_not_waited_for() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    silent(detector, 0.4, C, B)
    detector.answered(0.41, B, 0.0)
    detector.told(AFTER, A, {B: 2.0})
    assert decided(detector, AFTER, "a") == {"b"}


def test_a_link_that_dies_after_the_window_is_a_matter_of_its_own() -> None:
    detector = FailureDetector()
    silent(detector, 0.0, A, B)
    detector.answered(0.1, B, 0.0)
    silent(detector, AFTER + 0.1, A, C)
    detector.told(AFTER + 0.2, A, {B: 2.0, C: 2.0})
    assert decided(detector, AFTER + 0.2, "a") == {"b"}


def test_a_link_is_waited_for_longer_if_the_reporter_is_late_itself() -> None:
    detector = FailureDetector()
    detector.suspected(0.0, A, B, "silent", MEMBERS, lag=0.3)
    detector.answered(0.1, B, 0.0)
    detector.told(AFTER, A, {B: 2.0})
    assert decided(detector, AFTER, "a") == set()
    detector.answered(0.3 + AFTER, B, 0.0)
    detector.told(0.3 + AFTER, A, {B: 2.0})
    assert decided(detector, 0.3 + AFTER, "a") == {"b"}
