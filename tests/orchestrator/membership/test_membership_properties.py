"""Invariants of every sequence of events, and that a state survives being stored at any point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allfold_orchestrator.membership.group_state import (
    AgentRegisters,
    Event,
    GroupState,
    Instruction,
    Join,
    Leave,
    NodeHolds,
    NodesLost,
    PlanReady,
    RanksDeparted,
    Reason,
    Rejected,
    Seated,
    StoreLife,
)
from allfold_orchestrator.membership.membership import step
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.store import codec
from tests.orchestrator.builders import GROUP, join, node, play, with_refusal

T = TypeVar("T")

NODES = [node("a"), node("b"), node("a", "2")]

# A small world, so that random events do meet: groups complete, break and come again. Lists of
# whole events are one choice per event, which is quickly made and shrinks well.
JOINS = [
    join(rank, info, of=size, session=f"s{rank}{life}")
    for rank, info, life in product(range(2), NODES, "xxy")
    for size in (2, 2, 2, 2, 3)
]
LEAVES = [
    Leave(rank, f"s{rank}{life}", reason) for rank, life, reason in product(range(2), "xy", Reason)
]
LIVES = [(info.node, info.incarnation) for info in NODES]
LOSSES = [NodesLost(dict.fromkeys(lives, "refused")) for lives in ([LIVES[0]], [LIVES[1]], LIVES)]
REPORTS: list[Event] = [
    *(NodeHolds("a", opening) for opening in range(4)),
    *(
        AgentRegisters(
            ("a", "1"),
            0,
            replace(held, opening=opening),
            StoreLife(generation, ""),
            until=5.0,
            is_out=is_out,
        )
        for held in [term_record(play([join(0), join(1, "b")])[0])]
        if held is not None
        for opening, generation, is_out in product((1, 2), (0, 1), (False, True))
    ),
]
KINDS: tuple[Sequence[Event], ...] = (
    JOINS,
    JOINS,
    JOINS,
    JOINS,
    JOINS,
    LEAVES,
    LEAVES,
    LOSSES,
    REPORTS,
)
EVENTS = st.one_of(*(st.sampled_from(kind) for kind in KINDS))
HISTORIES = st.lists(EVENTS, min_size=15, max_size=60)

# On a busy machine an example may take long; that is no failure.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Moment:
    """One step of a history."""

    before: GroupState
    event: Event
    after: GroupState
    instructions: tuple[Instruction, ...]

    def all_of(self, kind: type[T]) -> list[T]:
        return [each for each in self.instructions if isinstance(each, kind)]


def history(events: list[Event]) -> list[Moment]:
    state = GroupState(GROUP)
    moments = []
    for event in events:
        after, instructions = step(state, event)
        moments.append(Moment(state, event, after, instructions))
        state = after
    return moments


# Rules


def no_opening_is_ever_used_twice(moments: list[Moment]) -> None:
    highest = 0
    for moment in moments:
        for ready in moment.all_of(PlanReady):
            assert ready.plan.opening > highest
            highest = ready.plan.opening
        if isinstance(moment.event, NodeHolds | AgentRegisters):
            highest = max(highest, moment.after.last_opening)
        assert moment.after.last_opening == highest
        assert moment.after.forming is None or moment.after.forming.opening > highest


def every_plan_has_each_rank_of_its_world_exactly_once(moments: list[Moment]) -> None:
    for moment in moments:
        for ready in moment.all_of(PlanReady):
            plan = ready.plan
            held = sorted(rank for member in plan.members for rank in member.ranks)
            assert held == list(range(plan.world_size))
            assert sorted(plan.tree_order) == list(range(len(plan.members)))
            assert len({member.node for member in plan.members}) == len(plan.members)


def a_refusal_changes_only_what_the_others_are_told_and_comes_alone(moments: list[Moment]) -> None:
    for moment in moments:
        for rejected in moment.all_of(Rejected):
            if moment.after is not moment.before:
                assert moment.after == with_refusal(moment.before, rejected.error)
            assert len(moment.instructions) == 1


def a_seat_never_changes_hands_without_being_free_in_between(moments: list[Moment]) -> None:
    for moment in moments:
        before, after = moment.before.forming, moment.after.forming
        if before and after:
            for rank in before.seats.keys() & after.seats.keys():
                assert after.seats[rank] is before.seats[rank]


def whoever_is_told_that_it_has_a_seat_has_it(moments: list[Moment]) -> None:
    for moment in moments:
        for told in moment.all_of(Seated):
            assert isinstance(moment.event, Join)
            forming = moment.after.forming
            current = moment.after.current
            seats = {current.plan.opening: current.seats} if current else {}
            if forming:
                seats[forming.opening] = forming.seats
            assert seats[told.opening][told.rank].session == moment.event.seat.session
            assert told.ready is not (forming is not None and told.opening == forming.opening)


def nobody_comes_back_into_an_opening_it_left(moments: list[Moment]) -> None:
    for moment in moments:
        before, after = moment.before.current, moment.after.current
        if before and after and before.plan is after.plan:
            assert before.departed.items() <= after.departed.items()


def a_lost_node_sits_nowhere(moments: list[Moment]) -> None:
    for moment in moments:
        lost = moment.event
        if isinstance(lost, NodesLost):
            forming = moment.after.forming
            seated = list(forming.seats.values()) if forming else []
            if moment.after.current:
                seated += moment.after.current.present.values()
            lives = {(seat.node.node, seat.node.incarnation) for seat in seated}
            assert not lives & lost.lives.keys()


def a_formation_has_somebody_and_waits_for_somebody(moments: list[Moment]) -> None:
    for moment in moments:
        forming = moment.after.forming
        assert forming is None or (forming.seats and (forming.missing or not moment.after.is_free))


def an_opening_ends_only_when_its_last_rank_has_left(moments: list[Moment]) -> None:
    left: set[int] = set()
    for moment in moments:
        current = moment.before.current
        for departed in moment.all_of(RanksDeparted):
            assert current
            assert departed.opening == current.plan.opening
            left |= set(departed.ranks)
        if moment.all_of(PlanReady):
            assert current is None or left == set(current.seats)
            left = set()


@given(HISTORIES)
@settings(UNHURRIED, max_examples=150)
def test_every_history_keeps_every_rule(events: list[Event]) -> None:
    moments = history(events)
    no_opening_is_ever_used_twice(moments)
    every_plan_has_each_rank_of_its_world_exactly_once(moments)
    a_refusal_changes_only_what_the_others_are_told_and_comes_alone(moments)
    a_seat_never_changes_hands_without_being_free_in_between(moments)
    whoever_is_told_that_it_has_a_seat_has_it(moments)
    nobody_comes_back_into_an_opening_it_left(moments)
    a_lost_node_sits_nowhere(moments)
    a_formation_has_somebody_and_waits_for_somebody(moments)
    an_opening_ends_only_when_its_last_rank_has_left(moments)


@given(HISTORIES)
@settings(UNHURRIED, max_examples=50)
def test_a_record_that_gets_only_the_changes_holds_the_whole_state(events: list[Event]) -> None:
    record: dict[str, str] = {}
    for moment in history(events):
        before, after = moment.before, moment.after
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
