"""The terms that a replica knows: looked up for every BEAT, in groups of thousands of nodes."""

from __future__ import annotations

import pytest

from allfold_core.survival.records import Seat, Term
from allfold_core.survival.term_record import TermRecord, Voter
from allfold_orchestrator.links.known_terms import KnownTerms


def record(**incarnations: str) -> TermRecord:
    names = tuple(incarnations)
    voters = {name: Voter(life, name, f"http://{name}") for name, life in incarnations.items()}
    seats = tuple(Seat(f"s-{name}", name) for name in names)
    return TermRecord(1, Term(1, 1, names, (1,) * len(names)), voters, seats, 1)


def known(**records: TermRecord) -> KnownTerms:
    terms = KnownTerms()
    for group, each in records.items():
        terms.replace(group, each)
    return terms


def test_those_that_a_node_has_heard_are_the_lives_of_its_own_groups() -> None:
    terms = known(x=record(a="1", b="1"), y=record(a="1", c="2"), z=record(b="1", d="1"))
    found = terms.named_beside(("a", "1"), ["a", "b", "c", "d", "e"])
    assert found == {("b", "1"), ("c", "2")}


def test_to_look_up_who_was_heard_the_other_nodes_are_not_gone_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terms = known(x=record(a="1", b="1", c="1"))
    monkeypatch.delattr(TermRecord, "lives")
    assert terms.named_beside(("a", "1"), ["b"]) == {("b", "1")}


def test_only_those_are_looked_at_of_whom_it_is_asked_who_is_protected() -> None:
    terms = known(x=record(a="1", b="1"), y=record(c="1"))
    assert terms.protected([("a", "1"), ("d", "1")], 0.0, generation=2) == {("a", "1")}
    assert terms.protected([("a", "1")], 0.0, generation=1) == set()
