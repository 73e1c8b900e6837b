"""The record of a term comes out as it went in, and one that cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from allfold_control.records import read_record, record_fields
from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.schema import UnknownSchema
from allfold_core.survival.plans import first_record
from allfold_core.survival.records import Term
from allfold_core.survival.term_record import Recall, TermRecord, Voter
from allfold_core.topology import LinkModel, Member

MEMBERS = tuple(
    Member(node, f"http://{node}:1", f"{node}:2", (rank,), incarnation="x")
    for rank, node in enumerate("ab")
)
PLAN = Plan("g", 3, 2, MEMBERS, (0, 1), LinkModel(), GroupOptions(30.0), ("s0", "s1"), 1)
FIRST = first_record(PLAN)


def with_a_newcomer() -> TermRecord:
    newcomer = Member("c", "http://c:1", "c:2", (), zone="z", incarnation="y")
    term = Term(4, 1, ("a", "c"), (3, 4), (("b", "signed off"),), (newcomer,))
    voters = {"a": FIRST.voters["a"], "c": Voter.of(newcomer)}
    return replace(FIRST, term=term, voters=voters, recall=Recall(3.5, frozenset("a")))


@pytest.mark.parametrize("record", [FIRST, with_a_newcomer(), replace(FIRST, plan=None)])
def test_a_record_comes_out_as_it_went_in(record: TermRecord) -> None:
    assert read_record(json.loads(json.dumps(record_fields(record)))) == record


def test_a_record_of_before_nodes_could_join_is_read() -> None:
    fields = record_fields(FIRST)
    del fields["plan"], fields["term"]["newcomers"]
    assert read_record(fields) == replace(FIRST, plan=None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"term": None}, "term"),
        ({"voters": {}}, "with an address and a number"),
        ({"voters": {"a": FIRST.voters["a"], "x": FIRST.voters["b"]}}, "other voters"),
        ({"seats": [["s0"]]}, "seats"),
        ({"seats": [["s0", 1]]}, "a seat has the names"),
        ({"generation": 1 << 12}, "generation"),
        ({"plan": {}}, "KeyError"),
    ],
)
def test_a_record_that_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_record(record_fields(FIRST) | changes)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("data_address", "a:65536", "the port is above 65535"),
        ("control_url", "http://a:99999", "Port out of range"),
        ("incarnation", "no name", "pattern"),
    ],
)
def test_a_voter_where_nobody_can_be_reached_is_refused(place: str, value: str, told: str) -> None:
    fields = record_fields(FIRST)
    fields["voters"]["a"][place] = value
    with pytest.raises(ValueError, match=told):
        read_record(fields)


def test_a_newcomer_whose_fields_are_no_texts_is_refused() -> None:
    fields = record_fields(with_a_newcomer())
    fields["term"]["newcomers"][0]["zone"] = 3
    with pytest.raises(ValueError, match="the fields of a node are texts"):
        read_record(fields)


def test_a_record_with_a_plan_of_a_newer_release_says_so() -> None:
    fields = record_fields(FIRST)
    fields["plan"]["schema"] = 99
    with pytest.raises(UnknownSchema, match="has schema 99"):
        read_record(fields)
