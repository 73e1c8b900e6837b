"""The incidents of a run, asked for while its ranks run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from allfold.cli._run.questions import IncidentWatch
from allfold_cluster.processes import wait_for
from allfold_core.incident import Cause, Effect, Incident, rank_culprit
from tests.client_sdk.http_service import service
from tests.support.waiting import wait_until

HOUR = 3600.0


def incident(name: str, seen: float) -> Incident:
    return Incident(
        name, Cause.LATE_RANK, Effect.HANG, rank_culprit(3, "b"), f"op {name} waits", "dp",
        began=seen, seen=seen, reporter="b",
    )  # fmt: skip


def told(*incidents: Incident) -> dict[str, Any]:
    return {"incidents": [each.to_dict() for each in incidents]}


def next_note(watch: IncidentWatch) -> list[str]:
    wait_until(lambda: wait_for([watch], 0.0), "something is to be shown")
    return watch.take()


def test_incidents_are_shown_though_an_answer_was_of_another_form() -> None:
    odd = incident("odd", time.time()).to_dict() | {"culprit": []}
    answers: dict[str, Any] = {"/v1/incidents": {"incidents": [odd]}}
    with (
        service(answers) as url,
        IncidentWatch({"ALLFOLD_ORCHESTRATOR_URL": url}, "dp") as watch,
    ):
        assert not wait_for([watch], 1.2)
        answers["/v1/incidents"] = told(incident("new", time.time() + 1.0))
        assert next_note(watch) == ["op new waits"]


def test_incidents_of_nodes_whose_clock_is_behind_are_shown_but_not_those_of_earlier_runs() -> None:
    before = incident("before", time.time() - HOUR)
    answers: dict[str, Any] = {"/v1/incidents": told(before)}
    with (
        service(answers) as url,
        IncidentWatch({"ALLFOLD_ORCHESTRATOR_URL": url}, "dp") as watch,
    ):
        assert not wait_for([watch], 1.2)
        now = replace(incident("now", time.time()), seen=time.time() - HOUR / 2)
        answers["/v1/incidents"] = told(now, before)
        assert next_note(watch) == ["op now waits"]
