"""A node that answers pings but not its rounds is found out, on a clock of the test."""

from __future__ import annotations

from allfold_core.survival.suspicion import STUCK_SECONDS, Awaited, OverdueRounds

START = 100.0
REPORT = Awaited("train", 3, 1, 2, "b")


def test_a_node_that_is_awaited_for_long_is_stuck_until_it_has_done_its_part() -> None:
    overdue = OverdueRounds()
    assert overdue.stuck(START, [REPORT]) == {}
    assert overdue.stuck(START + STUCK_SECONDS - 0.1, [REPORT]) == {}
    assert overdue.stuck(START + STUCK_SECONDS, [REPORT]) == {"b": STUCK_SECONDS}
    assert overdue.stuck(START + STUCK_SECONDS + 1, [REPORT]) == {"b": STUCK_SECONDS + 1}
    assert overdue.stuck(START + STUCK_SECONDS + 2, []) == {}


def test_each_round_and_each_group_has_a_time_of_its_own() -> None:
    overdue = OverdueRounds()
    overdue.stuck(START, [REPORT])
    others = [REPORT._replace(round=3), REPORT._replace(group="other"), REPORT._replace(node="c")]
    assert overdue.stuck(START + STUCK_SECONDS, others) == {}


def test_an_excuse_starts_the_time_anew() -> None:
    overdue = OverdueRounds()
    overdue.stuck(START, [REPORT])
    overdue.stuck(START + 1, [])
    assert overdue.stuck(START + STUCK_SECONDS, [REPORT]) == {}
    assert overdue.stuck(START + 2 * STUCK_SECONDS, [REPORT]) == {"b": STUCK_SECONDS}


def test_who_is_late_to_read_waits_longer() -> None:
    overdue = OverdueRounds()
    overdue.stuck(START, [REPORT])
    assert overdue.stuck(START + STUCK_SECONDS, [REPORT], own_lag=0.5) == {}
    assert overdue.stuck(START + STUCK_SECONDS + 0.5, [REPORT], own_lag=0.5)


def test_a_node_that_is_late_in_two_groups_was_waited_for_as_long_as_in_the_older_one() -> None:
    overdue, other = OverdueRounds(), REPORT._replace(group="other")
    overdue.stuck(START, [REPORT])
    overdue.stuck(START + 1, [other, REPORT])
    assert overdue.stuck(START + STUCK_SECONDS + 1, [other, REPORT]) == {"b": STUCK_SECONDS + 1}
