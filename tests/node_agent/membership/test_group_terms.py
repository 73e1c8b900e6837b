"""Terms from the orchestrator reach the groups of a node that they are meant for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from allfold_agent.groups.registry import LastTerm
from allfold_agent.membership.group_terms import GroupTerms
from allfold_control.messages import Held
from allfold_core.survival.records import Term
from allfold_core.survival.term_record import TermRecord, Voter
from allfold_core.topology import Member


def record(term: Term, *, opening: int = 3, generation: int = 2, life: str = "life") -> TermRecord:
    """The record of a term; ``life``: that of node0."""
    lives = {"node0": life}
    voters = {node: Voter(lives.get(node, "other"), "a:1", "http://a:2") for node in term.voters}
    return TermRecord(opening, term, voters, (), generation)


class Noted:
    """A group that notes whether it was evicted."""

    def __init__(self, opening: int, generation: int = 1) -> None:
        self.name, self.opening = "train", opening
        term = Term(opening, generation, ("node0",), (opening,))
        self.record = record(term, opening=opening, generation=generation)
        self.evicted: Exception | None = None
        self.errors: list[Exception] = []
        self.is_registering = self.is_empty = False

    def registers(self) -> TermRecord:
        self.is_registering = True
        return self.record

    def registered(self, generation: int) -> None:
        self.is_registering = False

    def evict(self, error: Exception) -> None:
        self.errors.append(error)


def terms_of(
    groups: list[Noted], call: Callable[[Callable[[], None]], None] = lambda task: task()
) -> GroupTerms:
    registry: Any = SimpleNamespace(all=lambda: groups, last_term=lambda *_: None)
    reactor: Any = SimpleNamespace(call=call)
    notices: Any = SimpleNamespace(apply=lambda *_: True)
    return GroupTerms("node0", lambda: "life", registry, notices, reactor)


def test_only_the_opening_of_a_group_that_a_registration_spoke_of_goes_on_without_the_node() -> (
    None
):
    groups = [Noted(3)]
    terms = terms_of(groups)
    terms.held()
    groups.append(Noted(4))
    terms.registered(1, ["train"])
    assert [len(each.errors) for each in groups] == [1, 0]


def test_a_store_may_lack_what_an_earlier_one_has_opened_and_no_registration_spoke_of() -> None:
    groups = [Noted(3)]
    terms = terms_of(groups)
    terms.held()
    groups.append(Noted(4))
    terms.registered(1, [])
    assert not terms.has_unsaid(), "the store has opened it"
    terms.registered(2, [])
    assert terms.has_unsaid()
    terms.held()
    terms.registered(2, [])
    assert not terms.has_unsaid()
    groups.append(Noted(5, generation=2))
    assert not terms.has_unsaid(), "the present store has opened it"


def test_a_group_takes_no_term_from_its_report_to_the_answer() -> None:
    group = Noted(3)
    terms = terms_of([group])
    assert [each.record for each in terms.held()] == [group.record]
    assert group.is_registering
    terms.registered(1, [])
    assert not group.is_registering


def test_an_answer_that_the_reactor_takes_late_does_not_end_the_next_registration() -> None:
    group, queued = Noted(3), list[Callable[[], None]]()
    terms = terms_of([group], queued.append)
    terms.held()
    terms.registered(1, [])
    terms.held()
    queued.pop(0)()
    assert group.is_registering, "the store has not answered what the node has said last"
    terms.registered(1, [])
    queued.pop(0)()
    assert not group.is_registering


def test_an_answer_that_the_reactor_takes_late_is_about_the_opening_it_was_given_for() -> None:
    groups, queued = [Noted(5)], list[Callable[[], None]]()
    terms = terms_of(groups, queued.append)
    terms.held()
    groups.append(Noted(9))
    terms.registered(2, ["train"])
    terms.held()  # tells of the later opening
    queued.pop(0)()
    assert [len(each.errors) for each in groups] == [1, 0]


@pytest.mark.parametrize("is_empty", [False, True], ids=["ranks", "no ranks"])
def test_an_opening_with_ranks_is_over_once_a_registration_has_spoken_of_a_later_one(
    is_empty: bool,
) -> None:
    """A store has lost them, or the name were not opened anew. Without any it ends by itself."""
    groups = [Noted(3), Noted(4)]
    groups[0].is_empty = is_empty
    terms = terms_of(groups)
    terms.held()
    terms.registered(2, [])
    assert [len(each.errors) for each in groups] == [not is_empty, 0]


def newcomers(*nodes: str) -> tuple[Member, ...]:
    return tuple(Member(node, "http://a:2", "a:1", ()) for node in nodes)


NEWCOMER = record(Term(9, 1, ("a", "node0"), (3, 9), newcomers=newcomers("b", "node0")))
OTHERS = record(Term(9, 1, ("a", "node0"), (3, 9), newcomers=newcomers("b")))
LEFT_OUT = record(Term(9, 1, ("a",), (3,), newcomers=newcomers("b", "node0")))


@pytest.mark.parametrize(
    ("generation", "record", "is_let_in"),
    [
        (2, NEWCOMER, True),
        (1, NEWCOMER, False),
        (2, OTHERS, False),
        (2, LEFT_OUT, False),
    ],
    ids=["let in", "of an earlier store", "others are", "left out since"],
)
def test_a_term_that_lets_this_node_in_is_passed_on(
    generation: int, record: TermRecord, is_let_in: bool
) -> None:
    terms, told = terms_of([]), list[Any]()
    terms.held()
    terms.registered(2, [])
    terms.let_in = told.append
    terms.term(generation, "train", record)
    assert told == [record] * is_let_in


class Seen:
    """A registry that has seen one opening, as far as terms ask."""

    def __init__(self, *, is_open: bool = False, last: LastTerm | None = None, empty: bool = False):
        self.is_open, self.last, self.empty = is_open, last, empty

    def all(self) -> list[Noted]:
        return []

    def look_for(self, *_: object) -> object:
        return object() if self.is_open else None

    def last_term(self, *_: object) -> LastTerm | None:
        return self.last

    def had_no_ranks(self, *_: object) -> bool:
        return self.empty


def terms_that_have(seen: Seen) -> tuple[GroupTerms, list[None]]:
    """Terms after a registration, and what notes that another one is wanted."""
    reactor: Any = SimpleNamespace(call=lambda task: task())
    notices: Any = SimpleNamespace(apply=lambda *_: True)
    terms = GroupTerms("node0", lambda: "life", cast(Any, seen), notices, reactor)
    asked = list[None]()
    terms.register = lambda: asked.append(None)
    terms.held()
    terms.registered(2, [])
    return terms, asked


def record_of(joined: int, life: str = "life", *, number: int = 9, store: int = 1) -> TermRecord:
    """A record of opening 3 that a term has let node0 into, with the newest term's numbers."""
    let_in = newcomers(*["node0"] * (joined > 3))
    return record(Term(number, store, ("a", "node0"), (3, joined), newcomers=let_in), life=life)


@pytest.mark.parametrize(
    ("seen", "record", "is_unknown"),
    [
        (Seen(), record_of(3), True),
        (Seen(is_open=True), record_of(3), False),
        (Seen(), record_of(5), False),
        (Seen(is_open=True, last=LastTerm(6, 1)), record_of(5), True),
        (Seen(last=LastTerm(6, 1)), record_of(7), False),
        (Seen(last=LastTerm(6, 1)), record_of(5, number=5, store=2), False),
        (Seen(last=LastTerm(6, 1)), record_of(5, number=5), True),
        (Seen(last=LastTerm(6, 1), empty=True), record_of(3), False),
        (Seen(last=LastTerm(6, 1)), record_of(3, "earlier"), False),
    ],
    ids=[
        "no plan yet",
        "open",
        "let in",
        "out since",
        "let in again",
        "by another store",
        "by the same store",
        "empty",
        "other life",
    ],
)
def test_a_term_takes_a_node_for_one_that_knows_the_group_which_does_not(
    seen: Seen, record: TermRecord, is_unknown: bool
) -> None:
    terms, _ = terms_that_have(seen)
    assert terms.is_unknown("train", record) == is_unknown


@pytest.mark.parametrize(("last", "is_told"), [(LastTerm(6, 1), True), (None, False)])
def test_a_node_says_that_it_is_out_of_a_group_where_the_term_that_said_so_is_lost(
    last: LastTerm | None, is_told: bool
) -> None:
    terms, asked = terms_that_have(Seen(last=last))
    record = record_of(5)
    terms.term(2, "train", record)
    told = [Held(group="train", record=record, is_out=True)] * is_told
    assert (asked, terms.has_unsaid(), terms.held()) == ([None] * is_told, is_told, told)
    terms.registered(2, ["train"])
    assert (terms.has_unsaid(), terms.held()) == (False, [])


def test_a_rank_is_to_ask_anew_that_comes_between_a_report_and_its_answer() -> None:
    terms = terms_of([Noted(3)])
    terms.registered(2, [])
    assert terms.generation == 2
    terms.held()
    assert terms.generation == 0, "the report does not name the rank"
    terms.registered(2, [])
    assert terms.generation == 2
