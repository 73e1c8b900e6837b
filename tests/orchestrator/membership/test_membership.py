"""The state machine of one group, event by event."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from allfold_core.errors import (
    InvalidArgument,
    MultipleRegister,
    MultipleUnregister,
    RegisterParamsMismatch,
)
from allfold_orchestrator.membership.group_state import (
    Event,
    GroupState,
    NodeHolds,
    PlanReady,
    RanksDeparted,
    Reason,
    Seated,
    SeatsFreed,
)
from allfold_orchestrator.membership.membership import step
from tests.orchestrator.builders import (
    GROUP,
    join,
    leave,
    lost,
    node,
    play,
    ready,
    refused,
    with_options,
)

EMPTY = GroupState(GROUP)


# The key


@pytest.mark.parametrize(("has", "comes"), [("a", "b"), ("a", ""), ("", "a")])
def test_a_rank_with_another_key_is_refused_and_learns_nothing_else(has: str, comes: str) -> None:
    first, later = (
        with_options(each, key=key)
        for each, key in ((join(0, timeout=7.0), has), (join(1, "b", timeout=8.0), comes))
    )
    state, _ = step(EMPTY, first)
    error = refused(state, later)
    assert type(error) is RegisterParamsMismatch
    assert error.details["differing"] == ["key"]
    assert "timeout" not in error.message
    assert isinstance(step(state, replace(first, seat=later.seat, rank=1))[1][0], Seated)


# Releases


def test_agents_of_different_series_are_in_no_group_together() -> None:
    first, later = node("a", version="0.2.3"), node("b", version="0.3.0")
    state, _ = step(EMPTY, join(0, first))
    error = refused(state, join(1, later))
    assert type(error) is RegisterParamsMismatch
    assert "node b is Allfold 0.3.0" in error.message
    assert "node a" in error.message
    assert "0.2.3" in error.message
    assert isinstance(step(state, join(1, node("b", version="0.2.9")))[1][0], Seated)
    assert isinstance(step(state, join(1, node("b")))[1][0], Seated)  # has not said


# Forming


def test_the_first_rank_opens_a_formation_and_fixes_its_parameters() -> None:
    state, instructions = step(EMPTY, join(1, of=3, timeout=7.0, strategies={"reduce": "tree(2)"}))
    assert instructions == (Seated(1, opening=1, ready=False),)
    assert state.forming is not None
    assert (
        state.forming.params == join(1, of=3, timeout=7.0, strategies={"reduce": "tree(2)"}).params
    )
    assert state.forming.missing == [0, 2]
    assert state.current is None


def test_the_last_rank_completes_the_group_and_makes_the_plan() -> None:
    state, instructions = play([join(1, "b"), join(0, "a")])
    assert state.current is not None
    plan = state.current.plan
    assert instructions == (Seated(0, opening=1, ready=True), PlanReady(plan))
    assert (plan.group, plan.opening, plan.world_size, plan.options.timeout) == (GROUP, 1, 2, 30.0)
    assert {member.node: member.ranks for member in plan.members} == {"a": (0,), "b": (1,)}
    assert sorted(plan.tree_order) == [0, 1]
    assert state.forming is None
    assert state.last_opening == 1


def test_a_group_of_one_is_complete_at_once() -> None:
    state, instructions = play([join(0, of=1)])
    assert instructions[0] == Seated(0, opening=1, ready=True)
    assert state.current is not None
    assert state.current.plan.members[0].ranks == (0,)


def test_nodes_may_hold_different_numbers_of_ranks() -> None:
    state, _ = play([join(r, "b" if r == 2 else "a", of=4) for r in range(4)])
    assert state.current is not None
    assert {m.node: m.ranks for m in state.current.plan.members} == {"a": (0, 1, 3), "b": (2,)}


def test_the_plan_does_not_depend_on_the_order_of_the_joins() -> None:
    joins = [join(0, "b", of=4), join(1, "a", of=4), join(2, "c", of=4), join(3, "a", of=4)]
    plans = [play(order)[0].current for order in permutations(joins)]
    assert len(plans) == 24
    assert all(each is not None and each.plan == plans[0].plan for each in plans if plans[0])


def test_the_plan_carries_addresses_devices_and_zones() -> None:
    info = node("a", device_type="cuda", zone="rack1")
    state, _ = play([join(0, info, of=1)])
    assert state.current is not None
    (member,) = state.current.plan.members
    assert (member.control_url, member.data_address) == ("http://a:7401", "a:7402")
    assert (member.device_type, member.zone) == ("cuda", "rack1")


def test_the_plan_says_what_a_loss_means_and_names_the_sessions_by_rank() -> None:
    state, _ = play(
        join(rank, on, on_loss="shrink", min_world=2, session=f"session of {rank}")
        for rank, on in ((1, "b"), (0, "a"))
    )
    assert state.current is not None
    plan = state.current.plan
    assert (plan.options.on_loss, plan.options.min_world) == ("shrink", 2)
    assert plan.sessions == ("session of 0", "session of 1")
    assert state.current.params == join(0, on_loss="shrink", min_world=2).params


# Registrations that cannot be granted. Each changes nothing, so a retry or the others go on.


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (join(1, "b", of=3), {"world_size": {"expected": 2, "got": 3}}),
        (join(1, "b", timeout=5.0), {"timeout": {"expected": 30.0, "got": 5.0}}),
        (
            join(1, "b", strategies={"all_reduce": "ring"}),
            {"strategies": {"expected": {}, "got": {"all_reduce": "ring"}}},
        ),
        (
            join(1, "b", on_loss="shrink"),
            {"on_loss": {"expected": "raise", "got": "shrink"}},
        ),
        (join(1, "b", min_world=2), {"min_world": {"expected": 1, "got": 2}}),
        (
            join(1, "b", of=4, timeout=5.0),
            {
                "world_size": {"expected": 2, "got": 4},
                "timeout": {"expected": 30.0, "got": 5.0},
            },
        ),
    ],
)
def test_other_parameters_are_refused_with_both_values_and_the_formation_goes_on(
    other: Event, differing: object
) -> None:
    state, _ = play([join(0)])
    error = refused(state, other)
    assert type(error) is RegisterParamsMismatch
    assert error.details["differing"] == differing
    assert "b" in error.message
    completed, _ = play([join(1, "b")], state)
    assert completed.current is not None


@pytest.mark.parametrize("rank", [2, 3, -1])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    error = refused(EMPTY, join(rank, of=2))
    assert type(error) is InvalidArgument
    assert "0 to 1" in error.message


@pytest.mark.parametrize("min_world", [0, 3])
def test_a_smallest_world_outside_the_group_is_refused(min_world: int) -> None:
    error = refused(EMPTY, join(0, of=2, min_world=min_world))
    assert type(error) is InvalidArgument
    assert f"min_world={min_world}: it must be between 1 and the world_size, which is 2" in str(
        error
    )


@pytest.mark.parametrize(("max_world", "says"), [(None, False), (8, True)])
def test_a_rank_that_could_only_join_a_group_is_told_that_it_is_not_open(
    max_world: int | None, says: bool
) -> None:
    error = refused(EMPTY, join(0, of=1, min_world=2, max_world=max_world))
    assert ("The group is not open" in error.message) is says


def test_a_taken_rank_is_refused_before_anything_changes_and_names_the_holder() -> None:
    # Upstream inserted the session and counted the peer, and found the duplicate afterwards.
    state, _ = play([join(0, "a", of=3)])
    error = refused(state, join(0, "b", of=3, session="other"))
    assert type(error) is MultipleRegister
    assert error.details["holder"] == "a"
    assert error.details["requester"] == "b"


def test_a_rank_beyond_a_complete_group_is_refused_and_does_not_wait() -> None:
    # Upstream compared the count with "==", so peer n+1 waited without end.
    state = ready(2)
    error = refused(state, join(2, "c", of=3))
    assert type(error) is RegisterParamsMismatch
    assert error.details["differing"] == {"world_size": {"expected": 2, "got": 3}}


def test_those_that_wait_are_told_of_the_last_rank_that_was_refused() -> None:
    state, _ = play([join(0, of=4)])
    for event in (join(1, of=3), join(2, of=5)):
        state, _ = step(state, event)
    assert state.forming is not None
    assert "world_size: the group has 4, rank 2 came with 5" in state.forming.refused
    again, _ = step(state, join(2, of=5))
    assert again is state


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_taken_rank_of_a_complete_group_is_refused(world_size: int) -> None:
    error = refused(ready(2), join(1, "c", of=world_size, session="other"))
    assert type(error) is MultipleRegister
    assert error.details["holder"] == "b"


# Retries after a lost reply


def test_the_same_join_again_gets_the_same_answer_and_changes_nothing() -> None:
    state, first = step(EMPTY, join(0))
    again, second = step(state, join(0))
    assert again is state
    assert second == first


def test_the_same_join_again_after_completion_learns_that_the_group_is_ready() -> None:
    state, instructions = step(ready(2), join(0))
    assert instructions == (Seated(0, opening=1, ready=True),)
    assert state.forming is None


def test_a_retry_finds_its_opening_even_if_another_rank_has_left_it_already() -> None:
    closing, _ = play([leave(1)], ready(2))
    _, instructions = step(closing, join(0))
    assert instructions == (Seated(0, opening=1, ready=True),)


def test_a_second_join_of_a_session_with_other_parameters_is_no_retry() -> None:
    forming, _ = play([join(0)])
    assert type(refused(forming, join(0, of=3))) is RegisterParamsMismatch
    assert type(refused(ready(2), join(0, of=3))) is RegisterParamsMismatch


def test_leaving_again_changes_nothing() -> None:
    state, _ = play([leave(0)], ready(2))
    after, instructions = step(state, leave(0, Reason.LOST))
    assert after is state
    assert instructions == ()


# Leaving


@pytest.mark.parametrize("reason", list(Reason))
def test_leaving_a_formation_frees_the_seat(reason: Reason) -> None:
    state, instructions = play([join(0, of=3), join(1, of=3), leave(0, reason)])
    assert instructions == (SeatsFreed(1, (0,), reason),)
    assert state.forming is not None
    assert state.forming.missing == [0, 2]
    assert state.forming.gave_up == ([0] if reason is Reason.WITHDRAWN else [])
    retried, _ = play([join(0, "b", of=3, session="another process")], state)
    assert retried.forming is not None
    assert retried.forming.missing == [2]
    assert retried.forming.gave_up == []


def test_the_last_to_leave_a_formation_unlocks_its_parameters() -> None:
    state, _ = play([join(0, of=2), leave(0, Reason.WITHDRAWN)])
    assert state == EMPTY
    other, _ = play([join(0, of=5)], state)
    assert other.forming is not None
    assert other.forming.params.world_size == 5


def test_finishing_one_rank_leaves_the_others_as_they_were() -> None:
    # Upstream set the number of peers to 0 for everybody.
    before = ready(3)
    after, instructions = play([leave(1)], before)
    assert instructions == (RanksDeparted(1, (1,), Reason.FINISHED),)
    assert before.current is not None
    assert after.current is not None
    assert after.current.departed == {1: Reason.FINISHED}
    assert after.current.plan is before.current.plan
    assert after.current.seats is before.current.seats


def test_the_last_rank_to_leave_closes_the_opening() -> None:
    state, instructions = play([leave(0), leave(1, Reason.LOST)], ready(2))
    assert instructions == (RanksDeparted(1, (1,), Reason.LOST),)
    assert state.idle


def test_an_unknown_session_cannot_finish() -> None:
    error = refused(ready(2), leave(0, session="stranger"))
    assert type(error) is MultipleUnregister
    assert type(refused(EMPTY, leave(0))) is MultipleUnregister


@pytest.mark.parametrize("reason", [Reason.LOST, Reason.WITHDRAWN])
def test_reports_about_unknown_sessions_are_ignored(reason: Reason) -> None:
    state = ready(2)
    assert step(state, leave(0, reason, session="stranger")) == (state, ())


# Nodes


def test_a_lost_node_gives_its_seats_in_a_formation_back() -> None:
    state, _ = play([join(0, "a", of=4), join(1, "b", of=4), join(2, "a", of=4)])
    after, instructions = play([lost("a")], state)
    assert instructions == (SeatsFreed(1, (0, 2), Reason.NODE_LOST),)
    assert after.forming is not None
    assert list(after.forming.seats) == [1]


def test_a_lost_node_that_sat_alone_takes_the_formation_along() -> None:
    state, _ = play([join(0, "a"), lost("a")])
    assert state == EMPTY


def test_a_lost_node_takes_its_ranks_out_of_the_opening_and_the_others_stay() -> None:
    state, instructions = play([lost("b")], ready(3))
    assert instructions == (RanksDeparted(1, (1,), Reason.NODE_LOST),)
    assert state.current is not None
    assert sorted(state.current.present) == [0, 2]


def test_a_lost_node_does_not_change_why_a_rank_left() -> None:
    state, _ = play([leave(1)], ready(2))
    after, instructions = step(state, lost("b"))
    assert instructions == ()
    assert after.current is state.current


def test_losing_another_incarnation_means_nothing() -> None:
    state, _ = play([join(0, node("a", "2"))])
    assert step(state, lost("a")) == (state, ())


def test_a_lost_node_is_lost_in_the_opening_that_runs_and_in_the_one_that_forms() -> None:
    state, _ = play([leave(0), join(0), join(1, "b", session="new")], ready(3))
    after, instructions = step(state, lost("b"))
    assert instructions == (
        RanksDeparted(1, (1,), Reason.NODE_LOST),
        SeatsFreed(2, (1,), Reason.NODE_LOST),
    )
    assert after.current is not None
    assert sorted(after.current.present) == [2]


def test_a_lost_rank_makes_room_for_the_next_opening() -> None:
    state, _ = play([lost("b")], ready(2))
    state, _ = play([leave(0), join(0), join(1, "c")], state)
    assert state.current is not None
    assert state.current.plan.opening == 2


# An orchestrator that lost its memory


def test_openings_that_agents_hold_are_not_used_again() -> None:
    state, instructions = step(EMPTY, NodeHolds("a", 7))
    assert instructions == ()
    state, instructions = play([join(0), join(1, "b")], state)
    assert instructions[0] == Seated(1, opening=8, ready=True)


def test_a_store_that_has_lost_all_opens_no_group_by_a_number_of_an_earlier_generation() -> None:
    """A group that it has forgotten may still run, and its nodes tell of it later."""
    numbers = []
    for generation in (1, 2, 3):
        _, (seated, *_) = step(EMPTY, join(0, of=1, generation=generation))
        assert isinstance(seated, Seated)
        numbers.append(seated.opening)
    assert numbers == [1, 1025, 2049]


@pytest.mark.parametrize("held", [1, 7])
def test_a_report_that_comes_while_a_group_forms_moves_its_opening(held: int) -> None:
    state, _ = play([join(0), NodeHolds("b", held)])
    state, instructions = play([join(1, "b")], state)
    assert instructions[0] == Seated(1, opening=held + 1, ready=True)
    assert state.last_opening == held + 1


def test_a_report_of_an_earlier_opening_does_not_move_the_one_that_forms() -> None:
    state, _ = play([join(0), join(1, "b"), leave(0), join(0), NodeHolds("c", 1)])
    assert state.forming is not None
    assert state.forming.opening == 2


def test_a_report_of_a_known_opening_changes_nothing() -> None:
    state = ready(2)
    assert step(state, NodeHolds("a", 1)) == (state, ())
    assert step(state, NodeHolds("a", 0)) == (state, ())


def test_a_report_of_a_later_opening_does_not_rename_the_one_that_is_complete() -> None:
    state, _ = play([NodeHolds("a", 7)], ready(2))
    assert step(state, join(0)) == (state, (Seated(0, opening=1, ready=True),))


def test_ranks_of_a_forgotten_opening_can_finish() -> None:
    state, _ = play([NodeHolds("a", 7)])
    assert step(state, leave(0)) == (state, ())


def test_tolerance_for_forgotten_openings_ends_with_the_next_opening() -> None:
    state, _ = play([NodeHolds("a", 7), join(0), join(1, "b")])
    assert type(refused(state, leave(0, session="stranger"))) is MultipleUnregister
