"""The times of BEATs, the silence of an orchestrator, and the terms that count."""

from __future__ import annotations

import pytest

from allfold_agent.membership.control_socket import LinkSession

BEAT = 0.5


def registered(generation: int = 3, now: float = 100.0) -> LinkSession:
    session = LinkSession(0, BEAT)
    session.registers(now)
    session.registered(generation, now)
    return session


def beats(session: LinkSession, count: int) -> float:
    """Send as many BEATs as this, each as soon as it is due; return when the next one is."""
    for _ in range(count):
        session.beat(session.due)
    return session.due


def test_no_term_counts_before_the_node_is_registered() -> None:
    session = LinkSession(3, BEAT)
    session.registers(0.0)
    assert not session.is_registered
    assert not session.takes_term_of(3)


def test_terms_count_that_the_generation_of_the_last_registration_announces() -> None:
    session = registered(3)
    assert [session.takes_term_of(each) for each in (2, 3, 4)] == [False, True, False]


def test_from_a_registration_to_its_answer_no_term_counts() -> None:
    session = registered(3)
    session.registers(101.0)
    assert not session.takes_term_of(3)
    session.registered(4, 101.1)
    assert [session.takes_term_of(each) for each in (3, 4)] == [False, True]


def test_of_two_registrations_both_must_be_answered_before_a_term_counts() -> None:
    session = registered(3)
    session.registers(101.0)
    session.registers(101.1)
    session.registered(4, 101.2)
    assert not session.takes_term_of(4)
    session.registered(4, 101.3)
    assert session.takes_term_of(4)


def test_an_answer_that_nobody_has_asked_for_counts_for_no_later_registration() -> None:
    session = registered(3)
    session.registered(3, 100.1)
    session.registers(101.0)
    assert not session.is_registered


def test_a_new_connection_reports_the_generation_of_the_last_one() -> None:
    assert LinkSession(registered(7).generation, BEAT).generation == 7


def test_the_first_beat_is_due_with_the_first_answer_and_the_next_half_a_second_later() -> None:
    session = registered(now=100.0)
    assert session.due == 100.0
    assert session.beat(100.02) == 1
    assert session.due == 100.52
    session.registers(100.1)
    session.registered(3, 100.2)
    assert session.due == 100.52, "a second registration changes nothing about that"


def test_three_beats_without_an_answer_are_too_many_when_the_next_is_due() -> None:
    session = registered()
    due = beats(session, 3)
    assert not session.is_silent(due - 0.01)
    assert session.is_silent(due)


def test_an_answer_to_the_last_beat_stands_for_those_before() -> None:
    session = registered()
    due = beats(session, 3)
    session.answered(session.number)
    assert not session.is_silent(due)


def test_late_answers_keep_the_orchestrator_alive() -> None:
    session = registered()
    for _ in range(10):
        due = beats(session, 1)
        session.answered(session.number - 2)
        assert not session.is_silent(due)


def test_a_pause_of_this_process_is_no_silence_of_the_orchestrator() -> None:
    session = registered()
    due = beats(session, 2)
    assert not session.is_silent(due + 60.0)


def test_an_extra_beat_comes_when_a_ping_had_the_time_to_be_answered() -> None:
    session = registered(now=100.0)
    session.beat(100.0)
    session.wants_extra_beat(100.05)
    session.wants_extra_beat(100.1)
    assert session.due == 100.25
    session.beat(100.25)
    assert session.due == 100.5, "the regular one comes all the same"


def test_a_regular_beat_does_not_take_the_place_of_an_extra_one() -> None:
    """The other node may not have had the time for an answer yet."""
    session = registered(now=100.0)
    session.beat(100.0)
    session.wants_extra_beat(100.4)
    session.beat(100.5)
    assert session.due == pytest.approx(100.6)


def test_extra_beats_do_not_make_the_orchestrator_silent_sooner() -> None:
    session = registered(now=100.0)
    session.beat(100.0)
    for each in range(5):
        session.wants_extra_beat(100.0 + 0.01 * each)
        session.beat(session.due)
    assert session.due == 100.5
    assert not session.is_silent(100.5)


def test_a_registration_that_is_not_answered_in_time_is_silence() -> None:
    session = LinkSession(0, BEAT)
    session.registers(100.0)
    assert session.due == 105.0
    assert not session.is_silent(104.9)
    assert session.is_silent(105.0)
    session.registered(1, 104.9)
    assert not session.is_silent(105.0)
