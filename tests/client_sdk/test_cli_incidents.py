"""Incidents in ``allfold status``: told by several, shown once, open ones first."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from allfold.cli._report import incident_lines
from allfold.cli._showing import age
from allfold_core.incident import Cause, Effect, Incident, merged, rank_culprit
from tests.client_sdk.http_service import NO_NODES, service
from tests.support.processes.cli import Commands, commands

NOW = 1_000_000.0


def incident(
    name: str,
    began: float,
    ended: float | None = None,
    sentence: str = "rank 3 on node b sleeps",
    rank: int = 3,
) -> Incident:
    return Incident(
        name, Cause.LATE_RANK, Effect.HANG, rank_culprit(rank, "b"), sentence, "dp", 1, 7, began,
        began, ended, "b",
    )  # fmt: skip


def test_a_line_has_the_sentence_and_how_long_it_lasts() -> None:
    assert incident_lines([incident("x", NOW - 12)], NOW) == [
        "hang, for 12.0 s: rank 3 on node b sleeps"
    ]
    over = incident("x", NOW - 12, NOW - 6000)
    assert incident_lines([over], NOW) == ["hang, until 1.7 h ago: rank 3 on node b sleeps"]


def test_of_those_that_are_over_a_few_are_shown() -> None:
    told = merged(incident(str(n), NOW - 99, NOW - n).to_dict() for n in range(9))
    ages = [line.partition(" ago")[0] for line in incident_lines(told, NOW)]
    assert ages == [f"hang, until {n}.0 s" for n in range(3)]


def test_one_that_has_begun_again_is_shown_once() -> None:
    told = [incident("again", NOW - 1), incident("before", NOW - 9, NOW - 5)]
    other = incident("other", NOW - 9, NOW - 5, "rank 4 was late", rank=4)
    assert incident_lines([*told, other], NOW) == [
        "hang, for 1.0 s: rank 3 on node b sleeps",
        "hang, until 5.0 s ago: rank 4 was late",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0.0 s"), (99.9, "99.9 s"), (600, "10 min"), (36000, "10.0 h")]
)
def test_durations_are_in_the_unit_that_reads_well(seconds: float, text: str) -> None:
    assert age(seconds) == text


# --- the command


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def test_status_shows_what_agents_and_orchestrator_tell_once(allfold: Commands) -> None:
    now = time.time()
    known = incident("known", now - 30, sentence="rank 3 on node b sleeps").to_dict()
    fresh = incident("fresh", now - 1, sentence="rank 5 on node c is stopped").to_dict()
    agent_says = {
        "node": "b",
        "ready": True,
        "waiting_for": "",
        "groups": [],
        "incidents": [known, fresh],
    }
    with (
        service(NO_NODES | {"/v1/incidents": {"incidents": [known]}}) as orchestrator,
        service({"/v1/status": agent_says}) as agent,
    ):
        asked = ("status", "--orchestrator", orchestrator, "--agent-url", agent)
        shown = allfold.run(*asked).out
        report = json.loads(allfold.run(*asked, "--json").out)
    assert shown.count("rank 3 on node b sleeps") == 1
    assert shown.count("rank 5 on node c is stopped") == 1
    assert [each["id"] for each in report["incidents"]] == ["known", "fresh"]
    assert report["schema"] == 1


def test_an_orchestrator_that_keeps_no_incidents_is_shown_all_the_same(allfold: Commands) -> None:
    with service(NO_NODES) as orchestrator:
        report = json.loads(allfold.run("status", "--orchestrator", orchestrator, "--json").out)
    assert report["incidents"] == []
