"""One picture of everything, from the views of the store and what the agents answer."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_core.incident import Cause, Effect, Incident, node_culprit, rank_culprit
from allfold_orchestrator.observation.agents import AgentAnswer
from allfold_orchestrator.observation.drawing import MAX_DRAWN_NODES, MAX_LISTED_LINKS
from allfold_orchestrator.observation.overview import OverviewFacts, picture
from allfold_orchestrator.observation.series import Series
from tests.orchestrator.observations import (
    group_view,
    history_of,
    node_view,
    op_in_flight,
    sample,
    status_of,
)

NOW = 10_000.0
NODES = ["a", "b"]


def incident(effect: Effect, number: str = "1", **fields: Any) -> dict[str, Any]:
    return Incident(
        number, Cause.LATE_RANK, effect, rank_culprit(1, "b"), "rank 1 on node b sleeps", "train",
        **fields,
    ).to_dict()  # fmt: skip


def overview(series: Series | None = None, **fields: Any) -> dict[str, Any]:
    """Return the overview of two nodes with one group, with other facts where they are given."""
    facts = {
        "at": NOW,
        "nodes": [node_view(name) for name in NODES],
        "groups": [group_view("train", NODES)],
        "answers": {name: AgentAnswer(status_of(name, "train", NODES)) for name in NODES},
        "incidents": [],
        **fields,
    }
    series = series or Series()
    return picture(OverviewFacts(**facts), series).to_dict(series, 0.0)


def waiting(age: float) -> dict[str, AgentAnswer]:
    """Rank 0 waits in op 7, which rank 1 has not called."""
    ours = status_of("a", "train", NODES, in_flight=[op_in_flight(7, age)], last_seq={"0": 7})
    return {"a": AgentAnswer(ours), "b": AgentAnswer(status_of("b", "train", NODES))}


def test_when_all_is_well_it_says_so() -> None:
    shown = overview()
    assert shown["headline"] == {"mood": "calm", "text": "1 group runs on 2 nodes. All is well."}
    assert shown["groups"][0]["sentence"] == "Runs"
    assert [node["groups"] for node in shown["nodes"]] == [{"train": [0]}, {"train": [1]}]


def test_an_op_that_waits_says_for_whom_in_the_words_of_the_command() -> None:
    shown = overview(answers=waiting(1.25))
    op = "Op 7 of group 'train', all_reduce(sum, float32[1024])"
    sentence = f"{op}, waits for rank 1 on node b, for 1.2 s"
    assert shown["headline"] == {"mood": "waiting", "text": f"{sentence}."}
    assert shown["groups"][0]["sentence"] == sentence
    assert list(shown["ops"][0]["missing"]) == [{"rank": 1, "node": "b"}]


def test_an_op_that_has_just_begun_is_no_news() -> None:
    shown = overview(answers=waiting(0.01))
    assert shown["headline"]["mood"] == "calm"
    assert not shown["groups"][0]["is_waiting"]
    assert len(shown["ops"]) == 1


def test_an_agent_that_does_not_answer_is_named_with_the_reason_and_hides_nothing() -> None:
    answers = waiting(2.0) | {"b": AgentAnswer(problem="http://b cannot be reached: refused")}
    shown = overview(answers=answers)
    assert shown["headline"] == {"mood": "trouble", "text": "Node b does not answer."}
    assert [node["problem"] for node in shown["nodes"]] == [
        "",
        "http://b cannot be reached: refused",
    ]
    assert shown["groups"][0]["drawing"]["nodes"] == NODES
    assert "waits for data from node b" in shown["ops"][0]["sentence"]


@pytest.mark.parametrize(
    ("effect", "mood", "text"),
    [
        (Effect.HANG, "trouble", "Group train waits for rank 1 on node b."),
        (Effect.SLOW, "waiting", "Group train is slowed by rank 1 on node b."),
        (Effect.FAILED, "trouble", "Group train has failed because of rank 1 on node b."),
    ],
)
def test_an_open_incident_is_the_headline(effect: Effect, mood: str, text: str) -> None:
    shown = overview(incidents=[incident(effect)])
    assert shown["headline"] == {"mood": mood, "text": text}
    assert overview(incidents=[incident(effect, ended=NOW)])["headline"]["mood"] == "calm"


def test_of_several_incidents_the_worst_is_named_and_the_others_counted() -> None:
    told = [incident(Effect.SLOW, "1"), incident(Effect.HANG, "2")]
    shown = overview(incidents=told)
    assert shown["headline"]["text"] == (
        "Group train waits for rank 1 on node b. And 1 more incident."
    )


def test_an_incident_without_a_group_is_said_in_its_own_words() -> None:
    lost = Incident("1", Cause.LOST_NODE, Effect.FAILED, node_culprit("c"), "node c is dead")
    assert overview(incidents=[lost.to_dict()])["headline"]["text"] == "Node c is dead."


def test_an_incident_that_agent_and_store_tell_is_there_once_and_over_if_one_knows() -> None:
    status = status_of("a", "train", NODES) | {"incidents": [incident(Effect.HANG)]}
    shown = overview(
        answers={"a": AgentAnswer(status)}, incidents=[incident(Effect.HANG, ended=NOW - 1)]
    )
    assert [each["ended"] for each in shown["incidents"]] == [NOW - 1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"phase": "forming", "missing": [1], "present": [{"rank": 0, "node": "a"}]},
            "Waits for rank 1 to join; 1 of 2 are there",
        ),
        (
            {"phase": "forming", "missing": [1], "present": [], "refused": "rank 1 has 3"},
            "Waits for rank 1 to join; 0 of 2 are there. One was refused: rank 1 has 3",
        ),
        ({"phase": "gone", "present": []}, "Is over: nobody is there"),
        ({"phase": "reduced", "lost": [{"rank": 1, "node": "b", "reason": "lost"}]},
         "Goes on without 1 of its ranks"),
        ({"phase": "unreadable"}, "Its record cannot be read; the orchestrator's log says more"),
        ({"phase": "recalled"},
         "Runs; the orchestrator has lost its record and shows what agents report"),
    ],
)  # fmt: skip
def test_a_group_says_what_it_does(fields: dict[str, Any], sentence: str) -> None:
    shown = overview(groups=[group_view("train", NODES, **fields)], answers={})
    assert shown["groups"][0]["sentence"] == sentence


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"nodes": [], "groups": []}, "No node has registered yet."),
        ({"nodes": [node_view("a")], "groups": []},
         "1 node is there, and no group has been opened yet."),
        ({"groups": [group_view("t", [], phase="gone")]}, "2 nodes are there, and no group runs."),
    ],
)  # fmt: skip
def test_an_empty_cluster_has_a_sentence(facts: dict[str, Any], text: str) -> None:
    shown = overview(answers={}, **facts)
    assert shown["headline"] == {"mood": "calm", "text": text}


def test_figures_and_traffic_come_from_the_histories() -> None:
    series = Series()
    now = sample(NOW - 4, ops=10, bytes=4000, latency=0.5, edges={"b": {"out": 70, "in": 50}})
    series.take("a", history_of("a", "train", NOW, now), NOW)
    series.settle(NOW)
    shown = overview(series)
    (group,) = shown["groups"]
    assert group["sentence"] == "Runs, 10 ops/s"
    assert group["figures"]["bytes_per_second"] == 4000
    assert [point["at"] for point in group["series"]] == [NOW - 4]
    assert [node["bytes_sent_per_second"] for node in shown["nodes"]] == [70, 50]


def test_a_group_of_a_name_that_was_used_before_has_the_points_of_its_own_opening() -> None:
    series = Series()
    older = history_of("a", "train", NOW, sample(NOW - 9, ops=5))
    older["groups"][0]["opening"] = 0
    series.take("a", older, NOW)
    series.settle(NOW)
    assert overview(series)["groups"][0]["series"] == []


def test_the_last_op_is_told_with_its_age() -> None:
    op = {
        "seq": 7, "what": "barrier()", "kind": "barrier", "strategy": "ring", "state": "completed",
        "seconds": 0.25, "error": "", "started_at": NOW - 3, "root": -1,
    }  # fmt: skip
    flight: Any = {"groups": [{"name": "train", "opening": 1, "ops": [op]}]}
    answer = AgentAnswer(status_of("a", "train", NODES), flight=flight)
    (group,) = overview(answers={"a": answer})["groups"]
    assert group["last_op"] == {
        "seq": 7, "what": "barrier()", "strategy": "ring", "state": "completed", "seconds": 0.25,
        "error": "", "age": 3,
    }  # fmt: skip


def told_round(seq: int, **fields: Any) -> dict[str, Any]:
    """Return a round of two ranks as the status of a node has it."""
    return {
        "seq": seq, "world_size": 2, "ended_at": NOW - 9, "seconds": 1.0, "weight": 3.0,
        "absent": [], "late": [], "sent_bytes": 100, **fields,
    }  # fmt: skip


def test_a_round_is_put_together_from_what_each_node_knows_of_it() -> None:
    without = {"absent": [1], "weight": 1.0}
    told = {
        "a": [told_round(4), told_round(5, **without, ended_at=NOW - 2, seconds=0.5)],
        "b": [told_round(5, **without, late=[1], sent_bytes=40), told_round(6, sent_bytes=0)],
    }
    answers = {
        name: AgentAnswer(status_of(name, "train", NODES, rounds=rounds))
        for name, rounds in told.items()
    }
    (group,) = overview(answers=answers)["groups"]
    late = {"late": [1], "ended_at": NOW - 2, "sent_bytes": 140}
    assert group["rounds"] == [
        told_round(6, sent_bytes=0),
        told_round(5, **without, **late),
        told_round(4),
    ]


def test_agents_of_earlier_versions_tell_nothing_of_rounds_and_zones() -> None:
    shown = overview()
    assert shown["groups"][0]["rounds"] == []
    assert [node["sent_to_zones"] for node in shown["nodes"]] == [{}, {}]


def test_the_traffic_of_a_node_is_that_of_all_its_links_also_of_those_that_are_not_drawn() -> None:
    names = [f"n{number}" for number in range(MAX_DRAWN_NODES + 1)]
    series = Series()
    for name in names:
        edges = {peer: {"out": 10, "in": 10} for peer in names if peer != name}
        series.take(name, history_of(name, "train", NOW, sample(NOW - 3, edges=edges)), NOW)
    shown = overview(
        series,
        nodes=[node_view(name) for name in names],
        groups=[group_view("train", names)],
        answers={name: AgentAnswer(status_of(name, "train", names)) for name in names},
    )
    assert len(shown["groups"][0]["drawing"]["edges"]) == MAX_LISTED_LINKS
    traffic = {
        (node["bytes_sent_per_second"], node["bytes_received_per_second"])
        for node in shown["nodes"]
    }
    assert traffic == {(10 * MAX_DRAWN_NODES, 10 * MAX_DRAWN_NODES)}
