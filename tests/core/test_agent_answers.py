"""Answers of agents, as they are read, and those that are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_core.agent_answers import CLOCK, STATUS, Question, flight, history
from allfold_core.schema import OtherForm
from tests.orchestrator.observations import history_of, op_in_flight, sample, status_of

URL = "http://a:7411"
NOW = 10_000.0


def status(**of_its_group: Any) -> Any:
    return status_of("a", "train", ["a"], **of_its_group)


def history_with(**fields: Any) -> Any:
    return history_of("a", "train", NOW, sample(NOW, **fields))


def test_an_answer_is_read_as_it_is_also_with_fields_of_a_later_version() -> None:
    later = status(in_flight=[op_in_flight(7, 1)], something_new=[1]) | {"new": {}}
    assert STATUS.read(URL, later) is later
    told_of = status() | {"incidents": [{"id": "n0/7", "evidence": None}]}
    assert STATUS.read(URL, told_of) is told_of
    rank = {"own": 0, "late": 0.5}
    told = history_with(latency=0.5, ranks={"0": rank}, edges={"b": {"out": 7, "in": 0.0}})
    assert history(0.0).read(URL, told) is told


@pytest.mark.parametrize(
    ("question", "answer", "difference"),
    [
        (STATUS, {"node": "a"}, "status of another version: ready is missing"),
        (STATUS, status() | {"ready": 1}, "ready: expected bool, got 1"),
        (STATUS, status() | {"groups": None}, "groups: expected list, got None"),
        (STATUS, status(ranks=[0, True]), "groups.0.ranks.1: expected int, got True"),
        (STATUS, status(in_flight=[{"seq": 1}]), "groups.0.in_flight.0.what is missing"),
        (STATUS, status(last_seq={"x": 1}), "groups.0.last_seq: expected numbers as keys"),
        (STATUS, status(layout=None), "groups.0.layout: expected str, got None"),
        (history(0.0), {"node": "a", "now": 1, "groups": [{"name": "x"}]}, "groups.0.opening is"),
        (history(0.0), history_with(ops="many"), "samples.0.ops: expected int, got 'many'"),
        (history(0.0), history_with(skew="x"), "samples.0.skew: expected NoneType or float or int"),
        (history(0.0), history_with(ranks=[1]), "samples.0.ranks: expected dict, got [1]"),
        (flight(), {"node": "a", "clock": {"monotonic": 1.0}}, "clock.wall is missing"),
    ],
)
def test_an_answer_of_another_version_is_refused_and_the_difference_named(
    question: Question[Any], answer: Any, difference: str
) -> None:
    with pytest.raises(OtherForm) as caught:
        question.read(URL, answer)
    assert str(caught.value).startswith(f"{URL} answers with a {question.name} of another version")
    assert difference in str(caught.value)


@pytest.mark.parametrize("answer", [{}, {"status": "ok"}, {"node": 7}])
def test_what_names_no_node_is_no_agent(answer: Any) -> None:
    with pytest.raises(OtherForm, match=f"{URL} answers, but not as an agent does"):
        CLOCK.read(URL, answer)


def test_a_question_names_what_is_wanted_and_no_more() -> None:
    assert history(1.5).path == "/v1/history?since=1.500"
    assert flight("a b", 3).path == "/v1/flight?group=a+b&limit=3"
