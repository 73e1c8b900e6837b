"""Proofs that data stays unchanged after a send until its receiver has surely taken it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import strategies_for
from allfold_core.schedules.schedule import Fold, Receive, Schedule, Send, Slice
from allfold_core.schedules.step_graph import StepGraph
from allfold_core.schedules.verify import ScheduleError, check_overwrites, verify

ALL = [(kind, name) for kind in Kind for name in strategies_for(kind)]
NAMES = [f"{kind.label}-{name}" for kind, name in ALL]
# Here no node gets anything where it has sent something else from before.
NEVER_OVERWRITE = {
    Kind.REDUCE,
    Kind.BROADCAST,
    Kind.BARRIER,
    Kind.ALL_GATHER,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.ALL_TO_ALL,
}
WHOLE = Slice(0, 4)


def compiled(kind: Kind, name: str, nodes: int) -> Schedule:
    root = nodes - 1 if kind.has_root else -1
    return compile_schedule(kind, name, nodes=nodes, numel=13, root=root)


def overwritten(schedule: Schedule) -> int:
    """Count the messages that the rule was proved for; any order of the steps will do."""
    graph = StepGraph(schedule)
    waits = list(graph.waits)
    order = [number for number, count in enumerate(waits) if not count]
    for number in order:
        after = [*graph.unblocks[number], graph.takers[number]]
        for later in (each for each in after if each >= 0):
            waits[later] -= 1
            if not waits[later]:
                order.append(later)
    return check_overwrites(graph, order)


def overwrites(schedule: Schedule) -> list[tuple[int, int, Receive]]:
    """The receives into what the same node has sent before: node, position, step."""
    return [
        (node, position, step)
        for node, program in enumerate(schedule.programs)
        for position, step in enumerate(program)
        if isinstance(step, Receive)
        and any(isinstance(s, Send) and s.slice == step.slice for s in program[:position])
    ]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_every_strategy_keeps_the_rule(kind: Kind, name: str, nodes: int) -> None:
    count = overwritten(compiled(kind, name, nodes))
    assert count == 0 or kind not in NEVER_OVERWRITE


@pytest.mark.parametrize("name", sorted({*strategies_for(Kind.ALL_REDUCE)} - {"direct"}))
@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_a_message_that_nobody_waits_for_breaks_it_in_every_strategy(name: str, nodes: int) -> None:
    """One more node gets a copy of what is about to be overwritten, and tells nobody."""
    original = compiled(Kind.ALL_REDUCE, name, nodes)
    assert overwritten(original) > 0
    found = overwrites(original)
    assert found
    for node, position, step in found:
        programs = [*original.programs, (Receive(step.slice, node),)]
        program = programs[node]
        programs[node] = (*program[:position], Send(step.slice, nodes), *program[position:])
        bad = replace(original, programs=tuple(programs))
        with pytest.raises(ScheduleError, match=rf"overwrites elements .*Send.*to={nodes}"):
            overwritten(bad)


def test_a_result_from_another_node_than_the_slow_receiver_is_refused() -> None:
    """All values are right, but node 2 may still be reading when node 1 sends the result back."""
    sum_ = Fold(WHOLE, (0, 1, 2))
    bad = Schedule(
        Kind.ALL_REDUCE,
        "planted",
        4,
        -1,
        (
            (Send(WHOLE, 1), Send(WHOLE, 2), Receive(WHOLE, 1)),
            (Send(WHOLE, 2), sum_, Send(WHOLE, 0)),
            (Send(WHOLE, 1), sum_),
        ),
    )
    message = (
        r"^node 0, step 2, Receive.*: overwrites elements \[0, 4\), which node 0, step 1, "
        r"Send\(slice=Slice\(start=0, stop=4\), to=2\) sent and which its receiver may not have "
        "taken yet"
    )
    with pytest.raises(ScheduleError, match=message):
        verify(bad)


def test_a_result_that_went_through_every_receiver_is_proved() -> None:
    good = Schedule(
        Kind.ALL_REDUCE,
        "planted",
        4,
        -1,
        (
            (Send(WHOLE, 1), Receive(WHOLE, 2)),
            (Fold(WHOLE, (1, 0)), Send(WHOLE, 2), Receive(WHOLE, 2)),
            (Fold(WHOLE, (2, 1)), Send(WHOLE, 0), Send(WHOLE, 1)),
        ),
    )
    verify(good)
    assert overwritten(good) == 2


def test_an_earlier_message_of_the_same_sender_proves_nothing() -> None:
    """Node 1 may have sent its answer before it took the message: edges have room."""
    bad = Schedule(
        Kind.BROADCAST,
        "planted",
        4,
        1,
        ((Send(WHOLE, 1), Receive(WHOLE, 1)), (Send(WHOLE, 0), Receive(WHOLE, 0))),
    )
    with pytest.raises(ScheduleError, match="overwrites"):
        overwritten(bad)
