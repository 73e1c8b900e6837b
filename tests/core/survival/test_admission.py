"""Ranks join a running group and leave it, at the right time."""

from __future__ import annotations

import json
from dataclasses import replace

from allfold_core.survival.admission import (
    Change,
    announce,
    is_due,
    possible_change,
    waiting_sessions,
    with_others_awaited,
)
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Wishes
from tests.support.policies import changed, policy_with

FIXED = policy_with()
ANY = changed(FIXED, max_world=4)
COMMIT = changed(ANY, joins="commit")
TERM = Term(2, 1, ("a", "b", "c"), (1, 1, 2))
EPOCH = Epoch(Stamp(1, 0, 1), 0, (Seat("s0", "a", 0), Seat("s1", "b", 1)), seated=2)
WAITING = announce(EPOCH, ("n1",))
NEXT = Stamp(2, 1, 1)
JOINS = {"c": Wishes(join=("n1",)), "a": Wishes(join=("n0",))}


def at_boundary(
    s0: int | None = None, s1: int | None = None, *, leave: bool = False
) -> dict[str, Wishes]:
    """The wishes of ranks of which some wait at a boundary; ``leave``: s1 wants to go."""
    return {
        "a": Wishes(at_boundary={} if s0 is None else {"s0": s0}),
        "b": Wishes(at_boundary={} if s1 is None else {"s1": s1}, leave=("s1",) if leave else ()),
    }


# Between any two ops


def test_those_who_are_ready_come_in_in_the_order_of_the_voters() -> None:
    change = possible_change(ANY, TERM, EPOCH, JOINS)
    assert change == Change((("n0", "a"), ("n1", "c")))
    assert is_due(ANY, TERM, EPOCH, JOINS)
    assert waiting_sessions(ANY, TERM, EPOCH, JOINS) == ()


def test_no_more_come_in_than_there_is_room_for() -> None:
    three = changed(ANY, max_world=3)
    assert possible_change(three, TERM, EPOCH, JOINS) == Change((("n0", "a"),))
    assert possible_change(changed(ANY, max_world=1), TERM, EPOCH, JOINS) is None


def test_nobody_comes_in_who_is_in_it_is_dead_or_on_a_node_without_a_vote() -> None:
    assert possible_change(ANY, TERM, EPOCH, {"a": Wishes(join=("s0",))}) is None
    assert possible_change(ANY, TERM, EPOCH, {"c": Wishes(join=("n1",))}, dead={"n1"}) is None
    assert possible_change(ANY, TERM, EPOCH, {"d": Wishes(join=("n1",))}) is None


def test_nobody_comes_into_a_group_that_is_over_or_takes_in_nobody() -> None:
    assert possible_change(ANY, TERM, replace(EPOCH, seats=()), JOINS) is None
    assert possible_change(ANY, TERM, NO_EPOCH, JOINS) is None
    assert possible_change(FIXED, TERM, EPOCH, JOINS) is None
    assert not is_due(FIXED, TERM, EPOCH, JOINS)


def test_a_rank_of_a_group_without_boundaries_asks_nobody_before_it_leaves() -> None:
    assert possible_change(ANY, TERM, EPOCH, at_boundary(3, 3, leave=True)) is None


# At boundaries


def test_somebody_who_waits_is_announced_once() -> None:
    wishes = JOINS | {"b": Wishes(leave=("s1",))}
    waiting = waiting_sessions(COMMIT, TERM, EPOCH, wishes)
    assert waiting == ("n0", "n1", "s1")
    assert is_due(COMMIT, TERM, EPOCH, wishes)
    announced = announce(EPOCH, waiting)
    assert (EPOCH.boundary, announced.boundary) == (0, 1)
    assert not is_due(COMMIT, TERM, announced, wishes)


def test_one_more_who_waits_waits_for_the_same_boundary_and_the_next_has_another_number() -> None:
    assert announce(WAITING, ("n1", "n2")).boundary == 1
    nobody = announce(WAITING, ())
    assert nobody.boundary == 0
    assert announce(nobody, ("n2",)).boundary == 2


def test_the_members_change_when_all_ranks_have_come_to_the_boundary() -> None:
    joins = {"c": JOINS["c"]}
    assert possible_change(COMMIT, TERM, WAITING, joins) is None
    assert possible_change(COMMIT, TERM, WAITING, joins | at_boundary(5)) is None
    change = possible_change(COMMIT, TERM, WAITING, joins | at_boundary(5, 6, leave=True))
    assert change == Change((("n1", "c"),), frozenset({"s1"}), at_boundary=6)


def test_a_boundary_that_was_not_announced_changes_nothing() -> None:
    assert possible_change(COMMIT, TERM, EPOCH, {"c": JOINS["c"]} | at_boundary(5, 5)) is None


def test_a_dead_rank_is_not_announced() -> None:
    wishes = at_boundary(leave=True)
    assert waiting_sessions(COMMIT, TERM, EPOCH, wishes) == ("s1",)
    assert waiting_sessions(COMMIT, TERM, EPOCH, wishes, dead={"s1"}) == ()


def test_a_rank_that_leaves_makes_room() -> None:
    full = changed(COMMIT, max_world=2)
    wishes = {"c": JOINS["c"]} | at_boundary(5, 5, leave=True)
    change = possible_change(full, TERM, WAITING, wishes)
    assert change == Change((("n1", "c"),), frozenset({"s1"}), at_boundary=5)


def test_too_few_ranks_stop_at_a_boundary_before_anybody_has_come_to_join_them() -> None:
    few = changed(COMMIT, min_world=3)
    waiting = with_others_awaited(few, EPOCH)
    assert (EPOCH.boundary, waiting.boundary) == (0, 1)
    assert not is_due(few, TERM, waiting, at_boundary(5, 5))
    assert with_others_awaited(few, waiting) == waiting
    announced = announce(waiting, waiting_sessions(few, TERM, waiting, JOINS))
    assert announced.boundary == 1
    change = possible_change(few, TERM, announced, {"c": JOINS["c"]} | at_boundary(5, 5))
    assert change == Change((("n1", "c"),), at_boundary=5)


def test_a_group_that_is_over_or_has_no_boundaries_does_not_stop_at_one() -> None:
    few = changed(COMMIT, min_world=3)
    assert with_others_awaited(few, replace(EPOCH, seats=())).boundary == 0
    assert with_others_awaited(changed(few, max_world=None), EPOCH).boundary == 0
    assert with_others_awaited(changed(few, joins="any"), EPOCH).boundary == 0


# The epoch after a change


def test_newcomers_sit_behind_the_others_with_numbers_that_nobody_had() -> None:
    before = replace(EPOCH, seated=5)
    after = Change((("n1", "c"), ("n2", "a"))).apply(ANY, before, NEXT, 9)
    assert after.seats == (*before.seats, Seat("n1", "c", 5, 9), Seat("n2", "a", 6, 9))
    assert (after.stamp, after.ordinal, after.seated) == (NEXT, 1, 7)
    assert after.first_op_of_all == 9
    assert "taken in rank" in json.loads(after.change)["message"]


def test_who_leaves_is_out_and_nobody_waits_any_more() -> None:
    after = Change((("n1", "c"),), frozenset({"s0"}), 4).apply(COMMIT, WAITING, NEXT, 4)
    assert [seat.session for seat in after.seats] == ["s1", "n1"]
    assert (after.boundary, after.boundaries) == (0, 1)
    message = json.loads(after.change)["message"]
    assert "rank 0 on node a" in message
    assert "left" in message
