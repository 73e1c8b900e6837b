"""Terms of a group: the first one, evictions, and what becomes of a record that was lost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from allfold_control.records import read_record, record_fields
from allfold_core.schema import MAX_GENERATION
from allfold_core.survival.plans import first_record
from allfold_core.survival.records import Seat, Term
from allfold_core.survival.term_record import (
    Recall,
    TermRecord,
)
from allfold_orchestrator.membership.group_state import AgentRegisters, StoreLife
from allfold_orchestrator.membership.terms import (
    FIRST_GENERATIONS,
    evict,
    may_evict,
    outgrow,
    recalled,
    register,
    shows_loss,
    store_life,
    without_seats,
)
from tests.orchestrator.builders import join, node, play, ready

UNTIL = 100.0
STORE = StoreLife(2, "second")


def first(nodes: int = 3) -> TermRecord:
    """The first term of a group of nodes a, b, c ... with a rank each, of generation 1."""
    current = ready(nodes).current
    assert current is not None
    return first_record(replace(current.plan, generation=1))


def lost(*names: str) -> dict[tuple[str, str], str]:
    return {(name, "1"): "refused" for name in names}


def without(record: TermRecord, *names: str) -> TermRecord:
    """The record after evictions, which leave somebody."""
    left = evict(record, lost(*names))
    assert left is not None
    return left


def report(
    name: str, held: TermRecord, *, generation: int = 1, is_out: bool = False
) -> AgentRegisters:
    return AgentRegisters((name, "1"), generation, held, STORE, UNTIL, is_out=is_out)


def recall_by(record: TermRecord | None, *reports: AgentRegisters) -> TermRecord:
    """The record after registrations, all of which are accepted."""
    for each in reports:
        answer = register(record, each)
        assert not answer.is_out
        record = answer.record
    assert record is not None
    return record


# Chains


def test_the_first_term_has_the_number_of_the_opening_and_every_node_as_a_voter() -> None:
    state, _ = play(join(r, node("ab"[r % 2]), of=4) for r in range(4))
    assert state.current is not None
    record = first_record(replace(state.current.plan, generation=5))
    assert record.term == Term(1, 5, ("a", "b"), (1, 1))
    assert record.seats == tuple(Seat(f"s{r}", "ab"[r % 2]) for r in range(4))
    assert record.voters["b"].data_address == "b:7402"
    assert record.has(("a", "1"))
    assert not record.has(("a", "2"))
    assert not record.has(("c", "1"))
    assert record.is_trusted(0.0)


def test_an_eviction_is_the_next_term_without_the_node_and_says_why() -> None:
    after = without(first(), "a")
    assert after.term == Term(2, 1, ("b", "c"), (1, 1), (("a", "refused"),))
    assert sorted(after.voters) == ["b", "c"]
    assert [seat.node for seat in after.seats] == ["b", "c"]
    assert after.term.leader == "b"
    assert after.term.may_follow(first().term)


def test_several_nodes_are_evicted_in_one_term() -> None:
    assert without(first(4), "a", "c").term.number == 2


def test_who_is_not_in_the_term_is_not_evicted_from_it() -> None:
    record = first()
    assert evict(record, {("a", "2"): "refused", ("d", "1"): "refused"}) is record


def test_without_any_node_the_group_is_over() -> None:
    assert evict(first(2), lost("a", "b")) is None


def test_ranks_that_leave_change_no_term_and_the_next_one_does_without_their_node() -> None:
    record = without_seats(first(), {"s1"})
    assert record.term == first().term
    assert [seat.session for seat in record.seats] == ["s0", "s2"]
    assert without_seats(record, {"s1"}) is record
    assert without(record, "a").term.voters == ("c",)


def test_a_record_survives_json_also_while_it_is_recalled() -> None:
    for record in (without(first(), "a"), replace(first(), recall=Recall(3.5, frozenset("ab")))):
        assert read_record(json.loads(json.dumps(record_fields(record)))) == record


# The life of the store


def test_a_server_that_was_started_anew_is_another_generation_of_the_store() -> None:
    one = store_life(None, "x")
    assert one == StoreLife(1, "x")
    assert store_life(one, "x") is one
    assert store_life(one, "y") == StoreLife(2, "y")


def test_a_store_that_has_lost_all_begins_with_a_generation_by_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # what all other tests begin at
    first = [store_life(None, f"run {n}").generation for n in range(100)]
    assert len(set(first)) > 90
    assert all(1 <= each <= FIRST_GENERATIONS < MAX_GENERATION / 2 for each in first)


@pytest.mark.parametrize(("reported", "grown"), [(1, 4), (3, 4), (7, 8)])
def test_a_generation_grows_above_all_that_agents_report(reported: int, grown: int) -> None:
    assert outgrow(StoreLife(3, "x"), reported) == StoreLife(grown, "x")


def test_agents_that_know_more_than_the_store_show_that_it_lost_something() -> None:
    old, new = replace(first(), generation=2), without(first(), "a")
    assert shows_loss(old, report("b", new, generation=2))
    assert shows_loss(None, report("b", new, generation=3))
    assert not shows_loss(None, report("b", new))
    assert not shows_loss(new, report("b", new)), "recalled, so it takes what it is told"
    assert not shows_loss(replace(new, generation=2), report("b", first(), generation=2))
    assert not shows_loss(old, report("b", new, is_out=True))


def test_an_agent_knows_a_store_that_has_lost_its_count_and_come_to_the_same_number() -> None:
    """As one that is in memory does, which ends with the orchestrator."""
    again = report("b", first(), generation=STORE.generation)
    assert shows_loss(None, again)
    assert not shows_loss(None, replace(again, is_out=True))
    assert not shows_loss(None, replace(again, held=without(first(), "b")))


# Registrations


def test_a_node_of_a_trusted_term_registers_and_one_that_was_evicted_is_out() -> None:
    record = replace(without(first(), "a"), generation=2)
    answer = register(record, report("b", first(), generation=2))
    assert (answer.record, answer.is_out) == (record, False)
    answer = register(record, report("a", first(), generation=2))
    assert (answer.record, answer.is_out) == (record, True)


def test_a_lost_record_is_rebuilt_from_what_the_agents_hold() -> None:
    held = without(first(), "a")
    record = recall_by(None, report("b", first()))
    assert record.term == first().term
    assert not record.is_trusted(UNTIL - 1)
    record = recall_by(record, report("c", held))
    assert record.term == held.term
    assert record.generation == STORE.generation
    assert record.recall is None, "both of its voters have registered"


def test_the_newest_term_wins_whoever_comes_first() -> None:
    held = without(first(), "a")
    for order in (("b", "c"), ("c", "b")):
        record = recall_by(None, *(report(n, held if n == "b" else first()) for n in order))
        assert record.term == held.term


def test_a_record_of_another_life_of_the_store_is_trusted_when_all_have_registered() -> None:
    record = recalled(first(), STORE, UNTIL)
    assert not record.is_trusted(0.0)
    assert recalled(record, STORE, UNTIL + 1) is record
    record = recall_by(record, *(report(name, first()) for name in "ab"))
    assert not record.is_trusted(UNTIL - 1)
    assert record.is_trusted(UNTIL), "the grace is over"
    assert recall_by(record, report("c", first())).is_trusted(0.0)


def test_two_terms_of_one_origin_meet_in_the_nodes_that_are_in_both() -> None:
    one, other = without(first(4), "a"), without(without(first(4), "b"), "c")
    record = recall_by(None, report("c", one), report("d", other))
    assert record.term.voters == ("d",)
    assert record.term.number == 4
    assert record.term.generation == STORE.generation
    assert [name for name, _ in record.term.lost] == ["a", "b", "c"]
    assert record.term.may_follow(one.term)
    assert record.term.may_follow(other.term)
    assert register(record, report("c", one)).is_out


def test_a_node_in_another_life_is_not_the_same_voter() -> None:
    one = without(first(3), "a")
    again = {**one.voters, "c": replace(one.voters["c"], incarnation="2")}
    other = replace(without(first(3), "b"), voters={**again, "a": first().voters["a"]})
    record = recall_by(None, report("b", one))
    assert register(record, report("a", other)).is_out


def test_a_later_opening_of_the_name_is_newer_whatever_the_numbers_of_its_terms() -> None:
    earlier = without(first(), "a")
    later = replace(first(), opening=2)
    for held, other in ((earlier, later), (later, earlier)):
        record = recall_by(None, report("b", held))
        answer = register(record, report("c", other))
        assert answer.record is not None
        assert answer.record.opening == 2
    assert shows_loss(replace(earlier, generation=2), report("b", later, generation=2))


@pytest.mark.parametrize("is_recalled", [False, True], ids=["trusted", "recalled"])
@pytest.mark.parametrize("is_out", [False, True], ids=["in", "out"])
def test_an_earlier_opening_is_over_and_the_later_one_goes_on_with_the_node(
    is_recalled: bool, is_out: bool
) -> None:
    """The name was opened anew as no node had told of the earlier opening yet."""
    later = replace(first(), opening=2, generation=1 if is_recalled else STORE.generation)
    held = with_sessions(first(), ("x", "a"))
    answer = register(later, report("a", held, is_out=is_out))
    assert answer.is_out
    assert answer.record is not None
    assert (answer.record.term, answer.record.seats) == (later.term, later.seats)
    assert answer.record.recall == (Recall(UNTIL) if is_recalled else None)


def test_where_two_terms_have_no_common_node_the_reporter_is_out() -> None:
    one, other = without(first(4), "a", "b"), without(first(4), "c", "d")
    record = recall_by(None, report("c", one))
    answer = register(record, report("a", other))
    assert (answer.record, answer.is_out) == (record, True)


def test_one_who_was_left_out_by_a_newer_term_is_told_so_in_a_recall() -> None:
    record = recall_by(None, report("b", without(first(), "a")))
    answer = register(record, report("a", first()))
    assert (answer.record, answer.is_out) == (record, True)


def test_one_whose_own_term_does_not_have_it_makes_no_record() -> None:
    answer = register(None, report("a", without(first(), "a")))
    assert (answer.record, answer.is_out) == (None, True)


def test_a_node_that_says_it_is_out_is_evicted_on_its_own_word() -> None:
    assert register(None, report("a", first(), is_out=True)).record is None
    answer = register(first(), report("a", first(), is_out=True))
    assert answer.is_out
    assert answer.record is not None
    assert answer.record.term.voters == ("b", "c")
    assert not answer.record.is_trusted(0.0)


# Evictions from a record that was lost


def test_from_a_whole_record_anybody_may_be_evicted() -> None:
    assert may_evict([first()], "a", is_proven=False, now=0.0)


@pytest.mark.parametrize(
    ("node", "registered", "is_proven", "now", "allowed"),
    [
        ("a", "ab", False, UNTIL - 1, False),
        ("a", "ab", True, UNTIL - 1, True),
        ("a", "ab", False, UNTIL, True),
        ("c", "ab", True, UNTIL - 1, False),
        ("c", "a", True, UNTIL, True),
        ("c", "a", False, UNTIL, False),
        ("c", "ab", False, UNTIL, True),
    ],
    ids=[
        "nobody for silence while it is recalled",
        "a node that registered, on proof",
        "a node that registered, for silence after the grace",
        "no node that never registered before the end of the grace",
        "then on proof",
        "not for silence where half or fewer have registered",
        "for silence where more than half have",
    ],
)
def test_while_a_record_is_recalled_evictions_take_more(
    node: str, registered: str, is_proven: bool, now: float, allowed: bool
) -> None:
    record = replace(first(), recall=Recall(UNTIL, frozenset(registered)))
    assert may_evict([record], node, is_proven=is_proven, now=now) is allowed


def test_nobody_is_evicted_from_a_record_for_which_no_agent_has_registered_yet() -> None:
    """The store may have gone back to it, from a term that left out those who would go on."""
    assert not may_evict([first()], "a", is_proven=True, now=UNTIL, generation=2)
    assert not may_evict([first()], "a", is_proven=False, now=UNTIL, generation=2)
    assert may_evict([first()], "a", is_proven=False, now=UNTIL, generation=1)


def test_a_term_is_of_the_store_that_makes_it() -> None:
    """Before it lost something the store may have made another one of this number."""
    left = evict(first(), lost("a"), STORE, UNTIL)
    assert left is not None
    assert (left.term.number, left.term.generation) == (2, STORE.generation)
    assert left.recall == Recall(UNTIL)


def test_those_who_registered_in_one_group_speak_for_its_smaller_ones() -> None:
    whole = replace(first(), recall=Recall(UNTIL, frozenset("ab")))
    half = replace(without(first(), "a"), recall=Recall(UNTIL, frozenset("b")))
    assert not may_evict([half], "c", is_proven=False, now=UNTIL)
    assert may_evict([half, whole], "c", is_proven=False, now=UNTIL)
    assert not may_evict([half, whole], "c", is_proven=False, now=UNTIL - 1)
    later = replace(half, recall=Recall(UNTIL + 1, frozenset("b")))
    assert not may_evict([later, whole], "c", is_proven=True, now=UNTIL)


def test_all_voters_of_a_record_that_was_not_lost_count_as_registered() -> None:
    half = replace(without(first(), "a"), recall=Recall(UNTIL, frozenset("b")))
    assert may_evict([half, first()], "c", is_proven=False, now=UNTIL)


def test_a_silent_node_of_which_the_store_has_no_record_is_evicted_on_proof_alone() -> None:
    """The store has just been emptied."""
    assert not may_evict([], "a", is_proven=False, now=UNTIL)
    assert may_evict([], "a", is_proven=True, now=UNTIL)


def test_a_record_follows_those_of_earlier_terms_and_of_earlier_openings() -> None:
    record = first()
    newer = without(record, "c")
    assert newer.follows(record)
    assert not record.follows(newer)
    assert not record.follows(record)
    assert replace(record, opening=record.opening + 1).follows(newer)


def test_the_lives_of_a_record_are_its_voters_each_in_its_incarnation() -> None:
    record = first(2)
    assert record.lives == {("a", "1"), ("b", "1")}
    assert all(map(record.has, record.lives))
    assert not record.has(("a", "2"))


# Seats that came and went without the orchestrator


def with_sessions(record: TermRecord, *seats: tuple[str, str]) -> TermRecord:
    return replace(record, seats=tuple(Seat(*seat) for seat in seats))


def test_every_node_is_believed_what_it_says_of_its_own_ranks() -> None:
    a = with_sessions(first(), ("new", "a"), ("s1", "b"), ("s2", "c"))
    b = with_sessions(first(), ("s0", "a"), ("s1", "b"), ("s3", "b"), ("s2", "c"))
    for reports in ((report("a", a), report("b", b)), (report("b", b), report("a", a))):
        record = recall_by(None, *reports)
        assert {seat.session for seat in record.seats} == {"new", "s1", "s2", "s3"}
    assert voters_without(record, "c") == ("a", "b")


def voters_without(record: TermRecord, *names: str) -> tuple[str, ...]:
    return without(record, *names).term.voters


def test_a_group_is_over_when_all_nodes_have_registered_and_none_has_a_rank() -> None:
    a, b = (with_sessions(first(2), *seats) for seats in ([("s1", "b")], [("s0", "a")]))
    record = recall_by(None, report("a", a))
    assert [seat.session for seat in record.seats] == ["s1"]
    answer = register(record, report("b", b))
    assert answer.record is None
    assert not answer.is_out
