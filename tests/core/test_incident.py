"""Incidents in their JSON form, and how culprits are called."""

from __future__ import annotations

import json

import pytest

from allfold_core.incident import (
    STORE,
    Cause,
    Culprit,
    Effect,
    Incident,
    from_dict,
    link_culprit,
    node_culprit,
    rank_culprit,
)


@pytest.mark.parametrize("culprit", [rank_culprit(3, "b"), link_culprit("a", "b"), STORE])
@pytest.mark.parametrize(("seq", "ended"), [(7, None), (None, 12.5)])
def test_an_incident_comes_out_of_its_json_form_as_it_went_in(
    culprit: Culprit, seq: int | None, ended: float | None
) -> None:
    incident = Incident(
        "b-1",
        Cause.LATE_RANK,
        Effect.HANG,
        culprit,
        "op 7 waits",
        "dp",
        2,
        seq,
        10.0,
        11.0,
        ended,
        "b",
        {"process": "is in load"},
    )
    assert from_dict(json.loads(json.dumps(incident.to_dict()))) == incident
    assert incident.is_open == (ended is None)


@pytest.mark.parametrize("spoilt", ["cause", "culprit", "began"])
def test_what_is_no_incident_is_refused(spoilt: str) -> None:
    data = Incident("1", Cause.LATE_RANK, Effect.HANG, STORE, "").to_dict()
    data[spoilt] = "nonsense"
    with pytest.raises((ValueError, TypeError)):
        from_dict(data)


def test_culprits_are_called_by_what_people_know() -> None:
    named = [rank_culprit(3, "b"), link_culprit("a", "b"), node_culprit("c"), STORE]
    assert [str(each) for each in named] == [
        "rank 3 on node b",
        "the link from node a to node b",
        "node c",
        "the orchestrator's store",
    ]


def test_links_and_agents_are_communication_ranks_and_their_machines_are_not() -> None:
    communication = {cause for cause in Cause if cause.is_communication}
    assert communication == {
        Cause.SLOW_LINK,
        Cause.LOSSY_LINK,
        Cause.LOST_NODE,
        Cause.SILENT_NODE,
        Cause.STORE_FAILED,
    }
