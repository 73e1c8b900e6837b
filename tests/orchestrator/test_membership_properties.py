"""What holds for every sequence of events, and that a state survives being stored at any point."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_orchestrator import codec
from allfold_orchestrator.group_state import (
    Event,
    GroupState,
    Instruction,
    Leave,
    NodeHolds,
    NodeLost,
    PlanReady,
    Reason,
    Rejected,
    Seated,
)
from allfold_orchestrator.membership import step
from tests.orchestrator.builders import GROUP, join, node

NODES = [node("a"), node("b"), node("a", "2")]

# A small world, so that random events do meet: groups complete, break and come again. Lists of
# whole events are one choice per event, which is quickly made and shrinks well.
JOINS = [
    join(rank, info, of=size, session=f"s{rank}{life}")
    for rank, info, life in product(range(2), NODES, "xxy")
    for size in (2, 2, 2, 2, 3)
]
LEAVES = [
    Leave(rank, f"s{rank}{life}", reason, epoch)
    for rank, life, reason, epoch in product(range(2), "xy", Reason, [None, None, None, 1, 2])
]
LOSSES = [NodeLost(info.node, info.incarnation) for info in NODES]
REPORTS = [NodeHolds("a", epoch) for epoch in range(7)]
KINDS = (JOINS, JOINS, JOINS, JOINS, LEAVES, LEAVES, LOSSES, [*REPORTS, *JOINS])
EVENTS = st.one_of(*map(st.sampled_from, KINDS))
HISTORIES = st.lists(EVENTS, min_size=15, max_size=60)

Moment = tuple[GroupState, tuple[Instruction, ...]]


def history(events: list[Event]) -> list[Moment]:
    moments: list[Moment] = [(GroupState(GROUP), ())]
    for event in events:
        moments.append(step(moments[-1][0], event))
    return moments


@given(HISTORIES)
def test_no_epoch_is_ever_used_twice(events: list[Event]) -> None:
    highest = 0
    for event, (state, instructions) in zip(events, history(events)[1:], strict=True):
        for instruction in instructions:
            if isinstance(instruction, PlanReady):
                assert instruction.plan.epoch > highest
                highest = instruction.plan.epoch
        if isinstance(event, NodeHolds):
            highest = max(highest, event.epoch)
        assert state.last_epoch == highest
        assert state.forming is None or state.forming.epoch > highest


@given(HISTORIES)
def test_every_plan_has_each_rank_of_its_world_exactly_once(events: list[Event]) -> None:
    for _, instructions in history(events):
        for instruction in instructions:
            if isinstance(instruction, PlanReady):
                plan = instruction.plan
                held = sorted(rank for member in plan.members for rank in member.ranks)
                assert held == list(range(plan.world_size))
                assert sorted(plan.tree_order) == list(range(len(plan.members)))
                assert len({member.node for member in plan.members}) == len(plan.members)


@given(HISTORIES)
def test_a_refusal_changes_nothing_and_comes_alone(events: list[Event]) -> None:
    for (before, _), (after, instructions) in pairwise(history(events)):
        if any(isinstance(instruction, Rejected) for instruction in instructions):
            assert after is before
            assert len(instructions) == 1


@given(HISTORIES)
def test_a_seat_never_changes_hands_without_being_free_in_between(events: list[Event]) -> None:
    for (before, _), (after, _) in pairwise(history(events)):
        if before.forming and after.forming:
            for rank in before.forming.seats.keys() & after.forming.seats.keys():
                assert after.forming.seats[rank] is before.forming.seats[rank]


@given(HISTORIES)
def test_whoever_is_told_it_has_a_seat_has_it(events: list[Event]) -> None:
    for event, (state, instructions) in zip(events, history(events)[1:], strict=True):
        for told in instructions:
            if isinstance(told, Seated):
                seats = {e.plan.epoch: e.seats for e in state.epochs}
                if state.forming:
                    seats[state.forming.epoch] = state.forming.seats
                assert seats[told.epoch][told.rank].session == event.seat.session  # type: ignore[union-attr]
                forming = state.forming is not None and told.epoch == state.forming.epoch
                assert told.ready is not forming


@given(HISTORIES)
def test_nobody_comes_back_into_an_epoch_it_left(events: list[Event]) -> None:
    for (before, _), (after, _) in pairwise(history(events)):
        departed = {epoch.plan.epoch: epoch.departed for epoch in after.epochs}
        for epoch in before.epochs:
            known = departed.get(epoch.plan.epoch)
            assert known is None or epoch.departed.items() <= known.items()


@given(HISTORIES)
def test_a_formation_always_has_somebody_and_always_lacks_somebody(events: list[Event]) -> None:
    for state, _ in history(events):
        assert state.forming is None or (state.forming.seats and state.forming.missing)
        assert not any(epoch.closed for epoch in state.older)


@given(HISTORIES)
@settings(max_examples=200)
def test_a_record_that_gets_only_the_changes_holds_the_whole_state(events: list[Event]) -> None:
    record: dict[str, str] = {}
    for (before, _), (after, _) in pairwise(history(events)):
        if after is before:
            continue
        changes = codec.changes(before, after)
        for field in changes.delete:
            assert field in record
            assert field not in changes.write
            del record[field]
        record |= changes.write
        assert codec.patch(before, changes) == after
        assert codec.decode(GROUP, record) == after
        assert record.keys() == codec.changes(GroupState(GROUP), after).write.keys()
