"""From the plan of a group's opening to its later epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.survival.plans import (
    first_epoch,
    first_record,
    first_term,
    joining_plan,
    plan_of,
)
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.term_record import TermRecord, Voter
from allfold_core.topology import LinkModel, Member

PLAN = Plan(
    group="g",
    opening=7,
    world_size=5,
    members=(
        Member("a", "http://a", "a:1", (0, 3)),
        Member("b", "http://b", "b:1", (1,), zone="z"),
        Member("c", "http://c", "c:1", (2, 4), zone="z"),
    ),
    tree_order=(1, 2, 0),
    links=LinkModel(),
    options=GroupOptions(3.0, on_loss="shrink", min_world=2),
    sessions=("s0", "s1", "s2", "s3", "s4"),
    generation=4,
)


MEMBERS = {member.node: member for member in PLAN.members}


def without(*sessions: str) -> Epoch:
    seats = tuple(seat for seat in first_epoch(PLAN).seats if seat.session not in sessions)
    return Epoch(Stamp(7, 1, 4), 1, seats, "{}")


def test_a_group_begins_with_the_term_and_the_ranks_of_its_plan() -> None:
    assert first_term(PLAN) == Term(7, 4, ("a", "b", "c"), (7, 7, 7))
    seats = tuple(Seat(f"s{rank}", node, rank) for rank, node in enumerate("abcac"))
    assert first_epoch(PLAN) == Epoch(Stamp(7, 0, 4), 0, seats, seated=5)


def test_the_first_epoch_has_the_plan_itself() -> None:
    assert plan_of(PLAN, first_epoch(PLAN), MEMBERS) == PLAN


def test_ranks_are_numbered_anew_in_the_order_of_before() -> None:
    plan = plan_of(PLAN, without("s0", "s2"), MEMBERS)
    assert plan.world_size == 3
    assert [(member.node, member.ranks) for member in plan.members] == [
        ("a", (1,)),
        ("b", (0,)),
        ("c", (2,)),
    ]
    assert plan.sessions == ("s1", "s3", "s4")
    assert plan.tree_order == (1, 2, 0)


def test_a_node_without_ranks_is_in_no_schedule() -> None:
    plan = plan_of(PLAN, without("s1"), MEMBERS)
    assert [member.node for member in plan.members] == ["a", "c"]
    assert plan.tree_order == (0, 1)


def test_an_epoch_that_nobody_is_left_in_has_an_empty_plan() -> None:
    plan = plan_of(PLAN, without(*PLAN.sessions), MEMBERS)
    assert (plan.world_size, plan.members, plan.tree_order) == (0, (), ())


@given(st.sets(st.sampled_from(PLAN.sessions), max_size=4))
def test_every_rank_that_is_left_is_on_its_node(gone: set[str]) -> None:
    epoch = without(*gone)
    plan = plan_of(PLAN, epoch, MEMBERS)
    ranks = sorted(rank for member in plan.members for rank in member.ranks)
    assert ranks == list(range(plan.world_size))
    for rank, seat in enumerate(epoch.seats):
        assert plan.members[plan.index_of_rank(rank)].node == seat.node
    assert sorted(plan.tree_order) == list(range(len(plan.members)))


# Nodes that join


def record_with(newcomer: Member) -> TermRecord:
    """The record of a term that lets in a node."""
    first = first_term(PLAN)
    nodes = (*first.voters, newcomer.node)
    term = Term(8, 4, nodes, (*first.joined, 8), newcomers=(newcomer,))
    record = first_record(PLAN)
    voters = {**record.voters, newcomer.node: Voter.of(newcomer)}
    return replace(record, term=term, voters=voters)


def test_a_node_that_joins_knows_the_terms_of_the_opening_and_all_nodes() -> None:
    newcomer = Member("d", "http://d", "d:1", (), device_type="cuda", zone="z", incarnation="x")
    plan = joining_plan(record_with(newcomer))
    assert plan.members == (*(replace(each, ranks=()) for each in PLAN.members), newcomer)
    assert (plan.world_size, plan.sessions) == (0, ())
    assert (plan.opening, plan.options, plan.generation) == (PLAN.opening, PLAN.options, 4)


def test_a_node_that_joins_makes_the_same_plan_of_an_epoch_as_the_others() -> None:
    newcomer = Member("d", "http://d", "d:1", ())
    joined = joining_plan(record_with(newcomer))
    epoch = first_epoch(PLAN)
    epoch = replace(epoch, ordinal=1, seats=(*epoch.seats, Seat("new", "d", 5, 3)))
    theirs = plan_of(PLAN, epoch, MEMBERS | {"d": newcomer})
    assert plan_of(joined, epoch, {each.node: each for each in joined.members}) == theirs
    assert theirs.ranks_on("d") == (5,)


def test_a_record_of_an_older_release_that_has_no_plan_lets_nobody_in() -> None:
    record = replace(record_with(Member("d", "", "d:1", ())), plan=None)
    with pytest.raises(ValueError, match="has no plan"):
        joining_plan(record)
