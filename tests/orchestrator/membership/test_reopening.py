"""Groups that are opened again under their name, while ranks of the opening before leave."""

from __future__ import annotations

import pytest

from allfold_orchestrator.membership.group_state import (
    GroupState,
    PlanReady,
    RanksDeparted,
    Reason,
    Seated,
)
from tests.orchestrator.builders import GROUP, join, leave, lost, play, ready

EMPTY = GroupState(GROUP)


def test_once_a_rank_has_left_the_next_opening_can_form() -> None:
    state, instructions = play([leave(0), join(0)], ready(2))
    assert instructions == (Seated(0, opening=2, ready=False),)
    assert state.current is not None
    assert state.current.plan.opening == 1


@pytest.mark.parametrize("reason", list(Reason))
def test_a_group_goes_on_without_a_rank_that_leaves_and_its_name_stays_taken(
    reason: Reason,
) -> None:
    state, _ = play([leave(0, reason)], ready(3))
    assert state.current is not None
    assert sorted(state.current.present) == [1, 2]
    assert not state.is_free
    assert reason.is_loss is (reason in (Reason.LOST, Reason.NODE_LOST))


def test_a_formation_with_all_its_ranks_waits_for_the_last_one_of_the_opening_before() -> None:
    state, instructions = play([leave(0), join(0), join(1, "b", session="new")], ready(2))
    assert instructions == (Seated(1, opening=2, ready=False),)
    assert state.forming is not None
    assert state.forming.full
    assert state.current is not None
    assert state.current.plan.opening == 1
    after, instructions = play([leave(1)], state)
    assert after.forming is None
    assert after.current is not None
    assert after.current.plan.opening == 2
    assert instructions == (
        RanksDeparted(1, (1,), Reason.FINISHED),
        PlanReady(after.current.plan),
    )


def test_a_formation_with_all_its_ranks_also_begins_when_the_last_one_before_is_lost() -> None:
    state, _ = play([leave(0), join(0), join(1, "c", session="new")], ready(2))
    after, instructions = play([lost("b")], state)
    assert after.current is not None
    assert instructions == (
        RanksDeparted(1, (1,), Reason.NODE_LOST),
        PlanReady(after.current.plan),
    )
    assert [member.node for member in after.current.plan.members] == ["a", "c"]


def test_a_node_that_is_lost_with_the_last_old_rank_and_a_new_one_completes_nothing() -> None:
    state, _ = play([leave(0), join(0), join(1, "b", session="new")], ready(2))
    after, _ = play([lost("b")], state)
    assert after.is_free
    assert after.forming is not None
    assert after.forming.missing == [1]


def test_a_rank_that_waits_for_the_name_may_give_up() -> None:
    state, _ = play([leave(0), join(0), join(1, "b", session="new")], ready(2))
    state, _ = play([leave(1, Reason.WITHDRAWN, session="new"), leave(1)], state)
    assert state.forming is not None
    assert state.forming.gave_up == [1]
    assert state.current is not None
    assert state.current.closed


def test_a_group_registers_again_with_another_size() -> None:
    # Upstream never reset its count of nodes, and node ids collided.
    state, _ = play([leave(0), leave(1)], ready(2))
    state, instructions = play([join(r, "ab"[r % 2], of=5) for r in range(5)], state)
    assert instructions[0] == Seated(4, opening=2, ready=True)
    assert state.current is not None
    assert state.current.plan.world_size == 5
