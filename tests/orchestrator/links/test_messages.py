"""The messages of control links: what is taken for one, and what is refused."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from allfold_control import messages
from allfold_control.messages import MAX_MESSAGE_BYTES, MAX_PEERS
from allfold_control.records import record_fields
from allfold_core.schema import MAX_OPENING, MAX_WORLD_SIZE, UnknownSchema
from allfold_core.survival.records import Seat, Term
from allfold_core.survival.term_record import TermRecord, Voter
from allfold_orchestrator.membership.reports import term_record
from tests.orchestrator.builders import ready

RECORD = cast(TermRecord, term_record(ready(2)))


def register(**changes: Any) -> str:
    held = {"group": "train", "record": {**record_fields(RECORD), **changes}}
    return json.dumps({"type": "register", "generation": 1, "incarnation": "x", "groups": [held]})


def test_a_record_comes_back_as_it_was_announced() -> None:
    message = messages.from_agent(register())
    assert isinstance(message, messages.Register)
    (held,) = message.groups
    assert held.record == RECORD


@pytest.mark.parametrize(
    "changes",
    [
        {"voters": {}},
        {"seats": [["s0"]]},
        {"epoch": -1},
        {"generation": 1 << 12},
        {"term": {"number": 1, "generation": 0, "voters": [], "joined": []}},
        {"more": 1},
    ],
    ids=[
        "no addresses",
        "half a seat",
        "no opening",
        "no generation",
        "no voters",
        "another field",
    ],
)
def test_a_record_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        messages.from_agent(register(**changes))


@pytest.mark.parametrize("name", ["epoch", "last_seq", "in_flight"])
@pytest.mark.parametrize("value", [2**63, 10**4000], ids=["64 bits", "4000 digits"])
def test_progress_with_numbers_out_of_bounds_is_refused(name: str, value: int) -> None:
    progress = {"group": "train", "epoch": 1, "last_seq": 0, "in_flight": 0}
    beat = {"type": "beat", "number": 1, "progress": [progress]}
    assert messages.from_agent(json.dumps(beat))
    progress[name] = value
    with pytest.raises(ValueError, match=name):
        messages.from_agent(json.dumps(beat))


def test_another_schema_is_refused() -> None:
    with pytest.raises(UnknownSchema):
        messages.from_agent('{"schema": 2, "type": "alive", "nonce": "n", "lag": 0.0}')


def test_what_goes_down_has_a_type_and_the_schema_and_comes_out_as_it_went_in() -> None:
    sent: list[messages.Down] = [
        messages.Registered(generation=1, out=["g"]),
        messages.Registered(is_evicted=True, how="signed off"),
        messages.BeatAnswered(number=1),
        messages.TermAnnounced(generation=1, group="train", record=RECORD),
        messages.Probe(nonce="n"),
        messages.PingFor(node="a", incarnation="1"),
        messages.Cleared(node="a", incarnation="1", patience=0.8),
        messages.Recall(generation=2),
        messages.Drain(),
    ]
    texts = [messages.dump(each) for each in sent]
    found = [json.loads(text) for text in texts]
    assert {each["schema"] for each in found} == {1}
    assert [each["type"] for each in found] == [each.type for each in sent]
    assert [messages.from_orchestrator(text) for text in texts] == sent


def test_the_record_of_the_largest_group_fits_into_a_message() -> None:
    nodes = [f"node-{number:05d}.rack-{number % 100:02d}" for number in range(MAX_PEERS)]
    voter = Voter("0" * 32, "255.255.255.255:65535", "http://255.255.255.255:65535")
    seats = tuple(Seat(f"{rank:016x}", nodes[rank % MAX_PEERS]) for rank in range(MAX_WORLD_SIZE))
    term = Term(MAX_OPENING, 1, tuple(nodes), (MAX_OPENING,) * MAX_PEERS)
    record = TermRecord(MAX_OPENING, term, dict.fromkeys(nodes, voter), seats, 1)
    message = messages.TermAnnounced(generation=1, group="train", record=record)
    assert len(messages.dump(message)) < MAX_MESSAGE_BYTES
