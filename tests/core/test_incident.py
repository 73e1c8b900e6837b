"""Incidents in their JSON form, and how culprits are called."""

from __future__ import annotations

import json

import pytest

from allfold_core.incident import (
    MAX_EVIDENCE_TEXT,
    MAX_SENTENCE,
    STORE,
    Cause,
    Culprit,
    Effect,
    Incident,
    bounded,
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


@pytest.mark.parametrize("spoilt", ["began", "seen", "ended", "seq", "opening"])
@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_numbers_that_are_none_are_refused_as_no_browser_reads_them(
    spoilt: str, number: str
) -> None:
    data = Incident("1", Cause.LATE_RANK, Effect.HANG, STORE, "").to_dict()
    data[spoilt] = json.loads(number)
    with pytest.raises((ValueError, TypeError)):
        from_dict(data)


def test_texts_of_users_become_one_printable_line_of_a_bounded_length() -> None:
    incident = Incident(
        "1",
        Cause.EXITED_RANK,
        Effect.FAILED,
        rank_culprit(3, "b"),
        "rank 3 failed: \x1b]0;evil\x07\nERROR forged\ud800 " + "x" * MAX_SENTENCE,
        evidence={"process": "is in " + "f" * MAX_EVIDENCE_TEXT, "ranks": 4},
    )
    found = bounded(incident)
    assert found.sentence.startswith("rank 3 failed: ]0;evil ERROR forged x")
    assert (len(found.sentence), found.sentence[-3:]) == (MAX_SENTENCE, "...")
    assert len(found.evidence["process"]) == MAX_EVIDENCE_TEXT
    assert found.evidence["ranks"] == 4
    assert from_dict(incident.to_dict()) == found


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
