"""The jury on links that are dead while both ends live."""

from __future__ import annotations

from allfold_orchestrator.membership.cases import Charge
from allfold_orchestrator.membership.group_state import Life
from allfold_orchestrator.membership.jury import Evict, Jury
from tests.orchestrator.juries import (
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


def cut(jury: Jury, now: float, *pairs: tuple[Life, Life], leaders: str = "") -> set[str]:
    """Each end accuses the other one; all live, and nothing comes back on these links."""
    for one, other in pairs:
        silent(jury, now, one, other)
        silent(jury, now, other, one)
    for life in {life for pair in pairs for life in pair}:
        jury.answered(now + 0.01, life, 0.0)
        jury.told(now + 0.01, life, {})
    assert decided(jury, now + AFTER) == set(), "not before the accusers have said it again"
    for life in {life for pair in pairs for life in pair}:
        jury.told(now + AFTER, life, {peer: 1.0 for pair in pairs for peer in pair})
    return decided(jury, now + AFTER, leaders)


def test_of_a_dead_link_one_end_goes_and_the_leader_stays() -> None:
    assert cut(Jury(), 5.0, (A, B), leaders="a") == {"b"}
    assert cut(Jury(), 5.0, (A, B), leaders="b") == {"a"}


def test_the_reason_names_the_other_ends_of_the_dead_links() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    jury.told(AFTER, A, {B: 2.0})
    assert jury.decide(AFTER, RANKS, "a") == [
        Evict({B: "has no connection with a, although both ends live"}, is_proven=False)
    ]


def test_a_node_cut_off_from_all_others_goes_alone() -> None:
    assert cut(Jury(), 5.0, (A, B), (A, C), (A, D), leaders="a") == {"a"}


def test_a_dead_link_of_a_node_that_may_not_be_evicted_now_waits() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    jury.told(AFTER, A, {B: 2.0})
    assert evicted(jury.decide(AFTER, RANKS, "a", {B})) == {}
    assert decided(jury, AFTER, "a") == {"b"}


def test_nobody_waits_longer_for_a_node_for_what_one_behind_dead_links_said_of_it() -> None:
    jury = Jury()
    assert cut(jury, 5.0, (A, B), (A, C), leaders="b") == {"a"}
    assert jury.patience(B, 6.0) == jury.patience(C, 6.0) == 0.4


def test_a_link_that_came_back_is_not_dead() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    jury.told(AFTER, A, {B: 0.1})
    assert decided(jury, AFTER) == set()
    assert jury.is_idle


def test_a_node_that_is_too_slow_to_read_its_links_does_not_make_them_dead() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.2)
    jury.told(AFTER, A, {B: 2.0})
    assert decided(jury, AFTER) == set()
    assert jury.is_idle


def test_an_accuser_that_is_silent_itself_makes_no_link_dead() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    assert decided(jury, AFTER) == set()
    assert jury.is_idle


def test_a_node_that_a_member_hears_lives_too() -> None:
    jury = Jury()
    silent(jury, 1.0, A, B)
    jury.told(1.2, C, {B: 0.1})
    jury.told(1.0 + AFTER, A, {B: 2.0})
    assert decided(jury, 1.0 + AFTER) in ({"a"}, {"b"})


def test_no_link_of_a_node_is_dead_while_a_sign_of_its_life_is_waited_for() -> None:
    jury = Jury()
    jury.told(0.9, C, {B: 0.0})
    silent(jury, 1.0, A, B)
    jury.asked(1.4, B)
    jury.told(1.0 + AFTER, A, {B: 0.6})
    jury.told(1.0 + AFTER, C, {B: 0.6})
    assert not jury.is_due(1.0 + AFTER)
    assert decided(jury, 1.0 + AFTER) == set()
    assert decided(jury, 1.4 + AFTER) == {"b"}


def test_a_link_is_not_dead_because_its_end_was_stopped_until_just_now() -> None:
    """The accuser's word about the time before was under way when the other end went on."""
    jury = Jury()
    silent(jury, 1.0, A, B)
    jury.answered(2.0, B, 0.0)
    jury.told(2.01, A, {B: 1.5})
    assert not jury.is_due(2.01)
    assert decided(jury, 2.01) == set()
    jury.told(2.2, A, {B: 0.1})
    assert jury.is_idle


def test_a_link_is_dead_that_lets_nothing_pass_after_its_end_has_gone_on() -> None:
    jury = Jury()
    silent(jury, 1.0, A, B)
    jury.answered(2.0, B, 0.0)
    jury.told(2.01, A, {B: 1.5})
    jury.answered(2.4, B, 0.0)
    jury.told(2.0 + AFTER, A, {B: 2.1})
    assert decided(jury, 2.0 + AFTER, "a") == {"b"}


def test_what_a_member_reads_after_it_was_stopped_is_no_sign_of_anothers_life() -> None:
    jury = Jury()
    silent(jury, 1.0, A, B)
    jury.told(1.3, C, {B: 0.1}, lag=1.2)  # C has read what B had sent before both were stopped
    jury.answered(1.65, B, 0.0)
    jury.told(1.67, A, {B: 1.5})
    assert decided(jury, 1.67) == set()
    jury.told(1.8, A, {B: 0.1})
    assert jury.is_idle


def test_a_node_that_died_just_before_it_was_accused_makes_no_link_dead() -> None:
    jury = Jury()
    silent(jury, 1.0, A, B)
    jury.answered(1.0, B, 0.0)  # sent long before
    jury.told(1.0, C, {B: 0.1})
    jury.link_ended(1.1, B, MEMBERS)
    jury.told(1.0 + AFTER, A, {B: 0.6})
    assert decided(jury, 1.1 + AFTER) == set()
    assert decided(jury, 1.1 + AFTER) == set()
    assert jury.is_idle


def test_what_a_node_said_before_its_control_link_ended_is_no_sign_of_life_afterwards() -> None:
    jury = Jury()
    silent(jury, 1.0, A, B)
    jury.answered(1.1, B, 0.0)
    jury.link_ended(1.2, B, MEMBERS)
    jury.linked(1.3, B)
    jury.told(1.0 + AFTER, A, {B: 0.6})
    assert decided(jury, 1.0 + AFTER) == set()


def test_links_that_died_together_are_judged_together() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    silent(jury, 0.4, A, C)
    jury.answered(0.41, C, 0.0)
    jury.told(AFTER, A, {B: 2.0, C: 2.0})
    assert decided(jury, AFTER, "a") == set(), "the other link is still in question"
    jury.told(0.4 + AFTER, A, {B: 2.0, C: 2.0})
    assert decided(jury, 0.4 + AFTER, "a") == {"a"}, "one node for two links"


def test_a_link_that_makes_no_difference_is_not_waited_for() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    silent(jury, 0.4, C, B)
    jury.answered(0.41, B, 0.0)
    jury.told(AFTER, A, {B: 2.0})
    assert decided(jury, AFTER, "a") == {"b"}


def test_a_link_that_dies_after_the_window_is_a_matter_of_its_own() -> None:
    jury = Jury()
    silent(jury, 0.0, A, B)
    jury.answered(0.1, B, 0.0)
    silent(jury, AFTER + 0.1, A, C)
    jury.told(AFTER + 0.2, A, {B: 2.0, C: 2.0})
    assert decided(jury, AFTER + 0.2, "a") == {"b"}


def test_a_link_is_waited_for_longer_if_the_accuser_is_late_itself() -> None:
    jury = Jury()
    jury.accused(0.0, A, B, Charge.SILENT, MEMBERS, lag=0.3)
    jury.answered(0.1, B, 0.0)
    jury.told(AFTER, A, {B: 2.0})
    assert decided(jury, AFTER, "a") == set()
    jury.answered(0.3 + AFTER, B, 0.0)
    jury.told(0.3 + AFTER, A, {B: 2.0})
    assert decided(jury, 0.3 + AFTER, "a") == {"b"}
