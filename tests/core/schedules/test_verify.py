"""The verifier catches every planted bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import strategies_for
from allfold_core.schedules.schedule import (
    Await,
    Fold,
    Program,
    Receive,
    Schedule,
    Send,
    Signal,
    Slice,
    Step,
)
from allfold_core.schedules.verify import ScheduleError, verify

ALL = [(kind, name) for kind in Kind for name in strategies_for(kind)]
NAMES = [f"{kind.label}-{name}" for kind, name in ALL]
WHOLE = Slice(0, 4)
LOW, HIGH = Slice(0, 2), Slice(2, 4)


def compiled(kind: Kind, name: str, nodes: int, numel: int = 13) -> Schedule:
    root = nodes - 1 if kind.has_root else -1
    return compile_schedule(kind, name, nodes=nodes, numel=numel, root=root)


def schedule(*programs: Program, kind: Kind = Kind.ALL_REDUCE, root: int = -1) -> Schedule:
    return Schedule(kind, "planted", 0 if kind is Kind.BARRIER else 4, root, programs)


def changed(original: Schedule, node: int, change: Callable[[Program], Program]) -> Schedule:
    programs = list(original.programs)
    programs[node] = change(programs[node])
    return replace(original, programs=tuple(programs))


def positions(original: Schedule) -> Iterator[tuple[int, int, Step]]:
    for node, program in enumerate(original.programs):
        for position, step in enumerate(program):
            yield node, position, step


def put(node: int, position: int, original: Schedule, *steps: Step) -> Schedule:
    """The schedule with other steps in place of one."""
    return changed(original, node, lambda p: (*p[:position], *steps, *p[position + 1 :]))


def refused(bad: Schedule, match: str = ".") -> None:
    with pytest.raises(ScheduleError, match=match):
        verify(bad)


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_no_step_can_be_left_out(kind: Kind, name: str, nodes: int) -> None:
    original = compiled(kind, name, nodes)
    for node, position, _ in positions(original):
        refused(put(node, position, original))


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_no_step_can_be_done_twice(kind: Kind, name: str, nodes: int) -> None:
    original = compiled(kind, name, nodes)
    for node, position, step in positions(original):
        refused(put(node, position, original, step, step))


@pytest.mark.parametrize("name", strategies_for(Kind.ALL_REDUCE))
def test_no_message_can_be_sent_and_folded_or_received_twice(name: str) -> None:
    """The doubled message is taken, so it is the values that give it away."""
    original = compiled(Kind.ALL_REDUCE, name, 5)
    for node, position, step in positions(original):
        if isinstance(step, Send):
            twice = put(node, position, original, step, step)
            index = sum(
                isinstance(s, Send) and s.to == step.to for s in original.programs[node][:position]
            )
            taker = [
                place
                for place, s in enumerate(original.programs[step.to])
                if (isinstance(s, Receive) and s.source == node)
                or (isinstance(s, Fold) and node in s.operands)
            ][index]
            take = original.programs[step.to][taker]
            again = replace(take, operands=(step.to, node)) if isinstance(take, Fold) else take
            refused(put(step.to, taker, twice, take, again), "twice|already")


@given(
    pair=st.sampled_from([pair for pair in ALL if pair[0] is not Kind.BARRIER]),
    nodes=st.integers(2, 9),
    data=st.data(),
)
def test_no_slice_can_be_another_one(
    pair: tuple[Kind, str], nodes: int, data: st.DataObject
) -> None:
    original = compiled(*pair, nodes)
    moving = [p for p in positions(original) if not isinstance(p[2], Signal | Await)]
    node, position, step = data.draw(st.sampled_from(moving))
    assert not isinstance(step, Signal | Await)
    start = data.draw(st.integers(0, 13))
    other = Slice(start, data.draw(st.integers(start, 14)))
    if other != step.slice:
        refused(put(node, position, original, replace(step, slice=other)))


@given(pair=st.sampled_from(ALL), nodes=st.integers(2, 9), data=st.data())
def test_no_message_can_go_to_or_come_from_another_node(
    pair: tuple[Kind, str], nodes: int, data: st.DataObject
) -> None:
    original = compiled(*pair, nodes)
    node, position, step = data.draw(st.sampled_from(list(positions(original))))
    peer = data.draw(st.integers(-1, nodes))
    match step:
        case Send(to=old) | Signal(to=old):
            other: Step = replace(step, to=peer)
        case Receive(source=old) | Await(source=old):
            other = replace(step, source=peer)
        case Fold(operands=operands):
            old = operands[-1]
            other = replace(step, operands=(*operands[:-1], peer))
    if peer != old:
        refused(put(node, position, original, other))


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_nodes_that_fold_in_different_orders_are_caught(nodes: int) -> None:
    original = compiled(Kind.ALL_REDUCE, "direct", nodes)
    order = (1, 0, *range(2, nodes))
    for node, position, step in positions(original):
        if isinstance(step, Fold):
            bad = put(node, position, original, Fold(step.slice, order))
            refused(bad, r"another order of folds in elements \[0, 13\)")


def test_two_messages_of_one_edge_cannot_change_places() -> None:
    original = compiled(Kind.ALL_REDUCE, "ring", 4)
    first, fold, second, *rest = original.programs[0]
    refused(changed(original, 0, lambda _: (second, fold, first, *rest)))


def test_a_contribution_folded_twice_is_caught() -> None:
    twice = (Fold(WHOLE, (0, 1)), Fold(WHOLE, (0, 1)))
    bad = schedule(twice, (Send(WHOLE, 0), Send(WHOLE, 0)), kind=Kind.REDUCE, root=0)
    refused(bad, "folds a contribution to elements .* twice")


def test_a_contribution_that_never_arrives_is_caught() -> None:
    bad = schedule(
        (Fold(LOW, (0, 1)), Send(LOW, 1)),
        (Send(LOW, 0), Receive(LOW, 0)),
    )
    refused(bad, r"node 0 ends without the contribution of node 1 in elements \[2, 4\)")


def test_a_result_that_comes_twice_is_caught() -> None:
    bad = schedule(
        (Send(WHOLE, 1), Fold(WHOLE, (0, 1)), Send(WHOLE, 1)),
        (Send(WHOLE, 0), Fold(WHOLE, (0, 1)), Receive(WHOLE, 0)),
    )
    refused(bad, r"gets elements \[0, 4\), which it has already")


def test_a_broadcast_that_delivers_something_else_is_caught() -> None:
    bad = schedule(
        (Await(1), Send(LOW, 1), Send(HIGH, 1)),
        (Signal(0), Receive(LOW, 0)),
        kind=Kind.BROADCAST,
        root=0,
    )
    refused(put(0, 2, bad), r"node 1 ends without the root's content in elements \[2, 4\)")


def test_nodes_that_wait_for_each_other_are_caught() -> None:
    bad = schedule(
        (Receive(LOW, 1), Send(LOW, 1)),
        (Receive(LOW, 0), Send(LOW, 0)),
    )
    refused(bad, "node 0, step 0, Receive.*: waits forever, with 3 others: node 0, step 1")


def test_signals_that_wait_for_each_other_are_caught() -> None:
    bad = schedule((Await(1), Signal(1)), (Await(0), Signal(0)), kind=Kind.BARRIER)
    refused(bad, "waits forever")


def test_an_edge_with_too_little_room_is_caught() -> None:
    """Node 0 can go on only when its second message is on the edge whose first waits for it."""
    bad = schedule(
        (Send(LOW, 1), Send(HIGH, 1), Fold(HIGH, (0, 2)), Send(HIGH, 2)),
        (Receive(WHOLE, 2), Fold(LOW, (1, 0)), Fold(HIGH, (1, 0))),
        (Send(HIGH, 0), Receive(HIGH, 0), Send(WHOLE, 1)),
    )
    with pytest.raises(ScheduleError, match="waits forever"):
        verify(bad, capacity=1)
    with pytest.raises(ScheduleError, match="folds a contribution"):
        verify(bad, capacity=2)


@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.REDUCE])
@pytest.mark.parametrize("name", ["tree(2)", "centralized", "chain"])
def test_a_rooted_kind_without_its_signals_is_caught(kind: Kind, name: str) -> None:
    original = compiled(kind, name, 6)
    silent = tuple(
        tuple(step for step in program if not isinstance(step, Signal | Await))
        for program in original.programs
    )
    refused(replace(original, programs=silent), "can finish without having heard from")


def test_a_signal_vouches_only_for_what_came_before_it() -> None:
    early = schedule(
        (Signal(1), Await(1)),
        (Signal(0), Await(0), Await(2)),
        (Signal(1), Await(0)),
        kind=Kind.BARRIER,
    )
    refused(early, "never sends")
    early = schedule(
        (Await(1), Signal(2)),
        (Signal(0), Await(2)),
        (Signal(1), Await(0)),
        kind=Kind.BARRIER,
    )
    refused(early, "node 0 can finish without having heard from node 2")


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (Send(WHOLE, 0), "own node"),
        (Signal(0), "own node"),
        (Receive(WHOLE, 2), "beyond the 2"),
        (Await(-1), "beyond the 2"),
        (Fold(WHOLE, (0,)), "two or more operands"),
        (Fold(WHOLE, (0, 1, 1)), "two or more operands"),
        (Send(Slice(3, 3), 1), "empty slice"),
        (Send(Slice(3, 5), 1), "beyond 4 elements"),
        (Send(WHOLE, 1), "its receiver never takes"),
        (Receive(WHOLE, 1), "what node 1 never sends"),
    ],
)
def test_steps_that_make_no_sense_are_named(step: Step, match: str) -> None:
    refused(schedule((step,), ()), f"^node 0, step 0, .*{match}")


def test_a_message_taken_for_another_slice_shows_both() -> None:
    bad = schedule((Send(LOW, 1),), (Receive(HIGH, 0),))
    refused(bad, r"node 1, step 0.*takes another message than node 0, step 0")
    refused(schedule((Signal(1),), (Receive(HIGH, 0),)), "takes another message")


def test_a_proof_needs_room_for_one_message() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        verify(schedule((), ()), capacity=0)
