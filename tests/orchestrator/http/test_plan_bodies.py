"""The response bodies for agents that wait for a plan."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from allfold_control import messages
from allfold_core.plan import Plan
from allfold_orchestrator.http import plan_bodies
from allfold_orchestrator.http.plan_bodies import PlanBodies
from allfold_orchestrator.membership.group_state import GroupState
from allfold_orchestrator.membership.reports import term_record
from tests.orchestrator.builders import join, leave, play, ready


def plan_of(world_size: int) -> Plan:
    if world_size < 20:
        state = ready(world_size)
    else:
        state, _ = play(join(r, f"n{r:03}", of=world_size) for r in range(world_size))
    assert state.current is not None
    return state.current.plan


def test_a_plan_is_encoded_and_compressed_once_for_all_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    encode, compress = plan_bodies.encode, gzip.compress

    def counted_encode(found: Plan | GroupState) -> bytes:
        calls.append("encode")
        return encode(found)

    def counted_compress(*arguments: Any, **options: Any) -> bytes:
        calls.append("compress")
        return compress(*arguments, **options)

    monkeypatch.setattr(plan_bodies, "encode", counted_encode)
    monkeypatch.setattr(gzip, "compress", counted_compress)
    bodies, plan = PlanBodies(), plan_of(100)
    answers = [bodies.response("train", plan, "gzip, deflate") for _ in range(5)]
    assert sorted(calls) == ["compress", "encode"]
    assert {bytes(answer.body) for answer in answers} == {bytes(answers[0].body)}


@pytest.mark.parametrize("world_size", [2, 100])
def test_a_message_of_a_link_carries_the_same_plan_and_a_large_one_compressed(
    world_size: int,
) -> None:
    bodies, plan = PlanBodies(), plan_of(world_size)
    text = bodies.text("train", plan)
    message = messages.answer([1, 2], text)
    answer = messages.from_orchestrator(message)
    assert isinstance(answer, messages.Answer)
    assert (answer.numbers, answer.status) == ([1, 2], 200)
    assert answer.body == json.loads(bytes(bodies.response("train", plan, "identity").body))
    assert bodies.text("train", plan) is text, "it is made once"
    assert len(message) < 8 * 1024


def test_a_large_plan_is_compressed_for_those_who_can_read_it() -> None:
    bodies, plan = PlanBodies(), plan_of(100)
    plain = bodies.response("train", plan, "identity")
    packed = bodies.response("train", plan, "gzip, deflate, br")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    assert len(packed.body) < len(plain.body) / 4
    assert gzip.decompress(packed.body) == plain.body
    assert Plan.from_dict(json.loads(bytes(plain.body))["plan"]) == plan


def test_a_small_plan_is_sent_as_it_is() -> None:
    response = PlanBodies().response("train", plan_of(2), "gzip")
    assert "content-encoding" not in response.headers
    assert Plan.from_dict(json.loads(bytes(response.body))["plan"]) == plan_of(2)


def test_the_next_plan_replaces_the_last_one() -> None:
    bodies = PlanBodies()
    for world_size in (2, 3):
        answer = json.loads(bytes(bodies.response("train", plan_of(world_size), "").body))
        assert answer["plan"]["world_size"] == world_size


def test_who_waits_is_told_of_the_present_formation() -> None:
    bodies = PlanBodies()
    state, _ = play([join(2, of=4)])
    for events, present in (([], [2]), ([join(0, of=4)], [0, 2])):
        state, _ = play(events, state)
        answer = json.loads(bytes(bodies.response("train", state, "gzip").body))
        assert answer["ready"] is False
        assert answer["present"] == present
        assert answer["missing"] == [rank for rank in range(4) if rank not in present]


def test_who_waits_is_told_of_the_ranks_that_still_hold_the_name() -> None:
    bodies = PlanBodies()
    state, _ = play([leave(0), join(0)], ready(3))
    for events, held in (([], [1, 2]), ([leave(1)], [2])):
        state, _ = play(events, state)
        answer = json.loads(bytes(bodies.response("train", state, "gzip").body))
        assert [place["rank"] for place in answer["held_by"]] == held
        assert {place["node"] for place in answer["held_by"]} == {"abc"[rank] for rank in held}


def test_who_waits_is_told_of_those_who_hold_the_name_though_their_opening_was_lost() -> None:
    before, _ = play([leave(0)], ready(3))
    lost = GroupState("train", last_opening=1, recalled=1, term=term_record(before))
    state, _ = play([join(0, of=3, session="new")], lost)
    answer = json.loads(bytes(PlanBodies().response("train", state, "").body))
    assert [place["node"] for place in answer["held_by"]] == ["b", "c"]


def test_answers_are_kept_for_a_bounded_number_of_groups() -> None:
    bodies, plan = PlanBodies(), plan_of(2)
    for number in range(3 * plan_bodies.MAX_ANSWERS):
        bodies.response(f"g{number}", plan, "")
    assert len(bodies._answers) == plan_bodies.MAX_ANSWERS
