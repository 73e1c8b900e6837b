"""The incidents that one agent knows of."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from allfold_agent.observation.incidents import Incidents
from allfold_control.messages import IncidentReport, Told, dump, from_agent
from allfold_core.incident import Cause, Effect, Incident, rank_culprit

LATE = Incident(
    "",
    Cause.LATE_RANK,
    Effect.HANG,
    rank_culprit(3, "b"),
    "op 7 waits for rank 3",
    "dp",
    1,
    7,
    began=100.0,
)
KEY = ("dp", 1, "wait", 3)


@pytest.fixture
def told() -> list[Incident]:
    return []


@pytest.fixture
def incidents(told: list[Incident]) -> Incidents:
    return Incidents("b", told.append)


def test_an_incident_is_told_once_as_long_as_it_stays_the_same(
    incidents: Incidents, told: list[Incident], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first = incidents.open(KEY, LATE)
        assert incidents.open(KEY, LATE) == first
    assert told == [first]
    assert (first.reporter, first.began, first.is_open) == ("b", 100.0, True)
    assert caplog.messages == ["op 7 waits for rank 3"]


def test_what_a_rank_says_of_itself_is_told_in_a_form_that_the_orchestrator_takes(
    incidents: Incidents, told: list[Incident]
) -> None:
    """It ends the link of an agent that sends anything else."""
    long = replace(LATE, sentence="x" * 9999 + "\ud800", evidence={"process": "is in " + "f" * 999})
    incidents.open(KEY, long)
    incidents.open(KEY, long)
    (found,) = told
    message = from_agent(dump(Told(incident=IncidentReport(**found.to_dict()))))
    assert isinstance(message, Told)
    assert message.incident.seq == LATE.seq


def test_what_changes_is_told_under_the_same_id(incidents: Incidents, told: list[Incident]) -> None:
    first = incidents.open(KEY, LATE)
    second = incidents.open(KEY, replace(LATE, cause=Cause.STOPPED_RANK, sentence="is stopped"))
    assert (second.id, second.began, second.seen) == (first.id, first.began, first.seen)
    assert told == [first, second]
    assert incidents.open_ones() == [second]


def test_the_end_is_told_and_remembered(incidents: Incidents, told: list[Incident]) -> None:
    first = incidents.open(KEY, LATE)
    incidents.end(KEY)
    incidents.end(KEY)
    assert [each.is_open for each in told] == [True, False]
    assert incidents.open_ones() == []
    assert [each.id for each in incidents.recent()] == [first.id]


def test_a_line_of_the_log_says_that_it_is_over_unless_it_was_over_at_once(
    incidents: Incidents, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        incidents.report(replace(LATE, effect=Effect.FAILED, sentence="rank 3 has ended"))
        assert caplog.messages == ["rank 3 has ended"]
        incidents.open(KEY, LATE)
        incidents.end(KEY)
    assert caplog.messages[2].endswith(": op 7 waits for rank 3")


def test_two_incidents_have_different_ids_also_after_a_restart(incidents: Incidents) -> None:
    first = incidents.open(KEY, LATE)
    incidents.end(KEY)
    second = incidents.open(KEY, LATE)
    assert first.id != second.id


def test_what_is_over_at_once_is_told_as_begun_and_ended(
    incidents: Incidents, told: list[Incident], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        incidents.report(LATE)
        incidents.report(LATE)
    assert caplog.messages == ["op 7 waits for rank 3"] * 2
    assert [each.is_open for each in told] == [True, False, True, False]
    assert len({each.id for each in told}) == 2


def test_what_others_say_is_shown_until_it_is_over_or_nobody_repeats_it(
    incidents: Incidents, told: list[Incident]
) -> None:
    far = replace(LATE, id="c-1", reporter="c", group="dp")
    incidents.hear(far, now=0.0)
    incidents.hear(far, now=1.0)
    assert incidents.open_ones("dp") == [far]
    assert incidents.open_ones("other") == []
    incidents.hear(replace(far, ended=5.0), now=2.0)
    assert incidents.open_ones() == []
    assert [each.id for each in incidents.recent()] == ["c-1"]
    incidents.hear(replace(far, id="c-2"), now=3.0)
    incidents.repeat(now=17.0)
    assert [each.id for each in incidents.open_ones()] == ["c-2"]
    incidents.repeat(now=30.0)
    assert incidents.open_ones() == []
    assert told == []  # who has found it tells everybody


def test_what_lasts_is_repeated_but_not_all_the_time(
    incidents: Incidents, told: list[Incident]
) -> None:
    first = incidents.open(KEY, LATE)
    for now in (10.0, 11.0, 14.9, 15.1):
        incidents.repeat(now)
    assert told == [first] * 3


def test_the_end_of_a_group_ends_what_was_wrong_with_it(
    incidents: Incidents, told: list[Incident]
) -> None:
    incidents.open(KEY, LATE)
    other = incidents.open("other", replace(LATE, group="tp"))
    incidents.hear(replace(LATE, id="c-1"), now=0.0)
    incidents.end_all("dp", 1)
    assert incidents.open_ones() == [other]
    assert [each.is_open for each in told] == [True, True, False]
