"""The verifier catches every planted bug in a schedule of blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
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
from tests.core.cases import BLOCKED, SIZES, block_count, blocks_of, labels_of, pairs_of

ALL = pairs_of(BLOCKED, 3)
each_strategy = pytest.mark.parametrize(("kind", "name"), ALL, ids=labels_of(ALL))
NODES = (2, 3, 5, 8)
Where = tuple[int, int]


def compiled(kind: Kind, name: str, nodes: int, sizes: str = "unequal") -> Schedule:
    blocks = blocks_of(SIZES[sizes](block_count(kind, nodes)))
    return compile_schedule(
        kind,
        name,
        nodes=nodes,
        numel=blocks[-1].stop,
        root=nodes - 1 if kind.has_root else -1,
        blocks=blocks,
    )


def schedule(kind: Kind, *programs: Program, root: int = -1) -> Schedule:
    """Two elements per block."""
    blocks = blocks_of([2] * block_count(kind, len(programs)))
    return Schedule(kind, "planted", blocks[-1].stop, root, programs, blocks)


def refused(bad: Schedule, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        verify(bad)


def messages(original: Schedule) -> Iterator[tuple[Where, Where]]:
    """For each message, who sends and who takes it: the node, and the step in its program."""
    sent: dict[tuple[int, int], list[Where]] = defaultdict(list)
    taken: dict[tuple[int, int], list[Where]] = defaultdict(list)
    for node, program in enumerate(original.programs):
        for position, step in enumerate(program):
            match step:
                case Send(to=to) | Signal(to=to):
                    sent[node, to].append((node, position))
                case Receive(source=source) | Await(source=source):
                    taken[source, node].append((node, position))
                case Fold(operands=operands):
                    for operand in operands:
                        if operand != node:
                            taken[operand, node].append((node, position))
    for edge, senders in sent.items():
        yield from zip(senders, taken[edge], strict=True)


def step_at(original: Schedule, where: Where) -> Step:
    return original.programs[where[0]][where[1]]


def put(original: Schedule, where: Where, *steps: Step) -> Schedule:
    """The schedule with other steps in place of one."""
    node, position = where
    programs = list(original.programs)
    programs[node] = (*programs[node][:position], *steps, *programs[node][position + 1 :])
    return replace(original, programs=tuple(programs))


def without(original: Schedule, sender: Where, taker: Where) -> Schedule:
    """The schedule without a message, at both ends."""
    step = step_at(original, taker)
    if isinstance(step, Fold):
        operands = tuple(each for each in step.operands if each != sender[0])
        rest: tuple[Step, ...] = (Fold(step.slice, operands),) if len(operands) > 1 else ()
    else:
        rest = ()
    return put(put(original, sender), taker, *rest)


def moving(original: Schedule) -> list[tuple[Where, Where]]:
    return [pair for pair in messages(original) if isinstance(step_at(original, pair[0]), Send)]


@each_strategy
@pytest.mark.parametrize("nodes", NODES)
def test_no_block_can_be_missing(kind: Kind, name: str, nodes: int) -> None:
    """Both ends forget the message, so it is the values that give it away."""
    original = compiled(kind, name, nodes)
    for sender, taker in moving(original):
        refused(without(original, sender, taker), "^node .* ends without")


@each_strategy
@pytest.mark.parametrize("nodes", NODES)
def test_no_element_can_come_or_be_folded_twice(kind: Kind, name: str, nodes: int) -> None:
    original = compiled(kind, name, nodes)
    for sender, taker in moving(original):
        send, take = step_at(original, sender), step_at(original, taker)
        again = take
        if isinstance(take, Fold):
            again = Fold(take.slice, (taker[0], sender[0]))
        twice = put(put(original, sender, send, send), taker, take, again)
        refused(twice, "which it has already|folds a contribution .* twice")


@each_strategy
@pytest.mark.parametrize("nodes", NODES)
def test_no_part_of_a_block_can_be_left_out(kind: Kind, name: str, nodes: int) -> None:
    original = compiled(kind, name, nodes, "all equal")
    for sender, taker in moving(original):
        send, take = step_at(original, sender), step_at(original, taker)
        assert not isinstance(send, Signal | Await)
        assert not isinstance(take, Signal | Await)
        part = Slice(send.slice.start, send.slice.stop - 1)
        short = put(
            put(original, sender, replace(send, slice=part)), taker, replace(take, slice=part)
        )
        # What is folded from several nodes does not come in equal slices then.
        refused(short, "^node .* ends without|takes another message than")


@each_strategy
def test_no_block_can_come_in_place_of_another(kind: Kind, name: str) -> None:
    """Both ends agree on the wrong one, so the slices of the message still match."""
    original = compiled(kind, name, 5, "all equal")
    edges: dict[tuple[int, int], list[tuple[Where, Where]]] = defaultdict(list)
    for sender, taker in moving(original):
        if isinstance(step_at(original, taker), Receive):
            edges[sender[0], taker[0]].append((sender, taker))
    for (source, to), found in edges.items():
        sent = step_at(original, found[0][0])
        assert isinstance(sent, Send)
        for block in original.blocks:
            if len(block) == len(sent.slice) and block != sent.slice:
                sender, taker = found[0]
                bad = put(original, sender, Send(block, to))
                refused(put(bad, taker, Receive(block, source)), "ends without|already")


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize("sizes", ["some empty", "first alone", "last alone", "all empty"])
def test_a_mesh_cannot_do_without_any_of_its_signals(kind: Kind, sizes: str) -> None:
    original = compiled(kind, "direct", 5, sizes)
    signals = [pair for pair in messages(original) if pair not in moving(original)]
    assert signals
    for sender, taker in signals:
        bad = without(original, sender, taker)
        refused(bad, f"node {taker[0]} can finish without having heard from node {sender[0]}")


@each_strategy
@pytest.mark.parametrize("sizes", ["some empty", "first alone", "all empty"])
def test_no_strategy_can_do_without_all_its_signals(kind: Kind, name: str, sizes: str) -> None:
    original = compiled(kind, name, 6, sizes)
    silent = tuple(
        tuple(step for step in program if not isinstance(step, Signal | Await))
        for program in original.programs
    )
    refused(replace(original, programs=silent), "can finish without having heard from")


@pytest.mark.parametrize("name", ["tree(2)", "centralized", "chain"])
@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER])
def test_a_rooted_kind_needs_each_signal_of_its_other_wave(kind: Kind, name: str) -> None:
    original = compiled(kind, name, 6)
    signals = [pair for pair in messages(original) if pair not in moving(original)]
    assert len(signals) == 5
    for sender, taker in signals:
        refused(without(original, sender, taker), "can finish without having heard from")


B0, B1, B2 = blocks_of([2, 2, 2])


def test_blocks_that_go_to_each_others_nodes_are_caught() -> None:
    bad = schedule(
        Kind.SCATTER,
        (Await(1), Await(2), Send(B2, 1), Send(B1, 2)),
        (Signal(0), Receive(B2, 0)),
        (Signal(0), Receive(B1, 0)),
        root=0,
    )
    refused(bad, r"node 1 ends without the root's content in elements \[2, 4\)")


def test_a_block_of_another_node_is_caught() -> None:
    """Node 1 sends what it has itself where node 2's block lies."""
    bad = schedule(
        Kind.GATHER,
        (Receive(B1, 1), Receive(B2, 1), Await(2), Signal(1), Signal(2)),
        (Send(B1, 0), Send(B2, 0), Await(0)),
        (Signal(0), Await(0)),
        root=0,
    )
    refused(bad, r"node 0 ends without node 2's content in elements \[4, 6\)")


def test_an_all_to_all_that_mixes_up_two_pairs_is_caught() -> None:
    """Elements [2, 4) are of the pair 0, 1 and [4, 6) of the pair 1, 0."""
    there, back = B1, B2
    right = schedule(
        Kind.ALL_TO_ALL,
        (Send(there, 1), Receive(back, 1)),
        (Send(back, 0), Receive(there, 0)),
    )
    verify(right)
    bad = schedule(
        Kind.ALL_TO_ALL,
        (Send(back, 1), Receive(there, 1)),
        (Send(there, 0), Receive(back, 0)),
    )
    refused(bad, r"node 1, step 1, .*: gets elements \[4, 6\), which it has already")


def test_a_reduce_scatter_without_one_contribution_is_caught() -> None:
    bad = schedule(
        Kind.REDUCE_SCATTER,
        (Send(B1, 1), Send(B2, 2), Fold(B0, (0, 1)), Await(2)),
        (Send(B0, 0), Send(B2, 2), Fold(B1, (0, 1, 2))),
        (Signal(0), Send(B1, 1), Fold(B2, (0, 1, 2))),
    )
    refused(bad, r"node 0 ends without the contribution of node 2 in elements \[0, 2\)")


def test_only_the_owner_of_a_block_needs_the_whole_fold() -> None:
    """The same programs are a reduce-scatter, but no all-reduce."""
    programs = (
        (Send(B1, 1), Fold(B0, (0, 1))),
        (Send(B0, 0), Fold(B1, (0, 1))),
    )
    verify(schedule(Kind.REDUCE_SCATTER, *programs))
    refused(
        Schedule(Kind.ALL_REDUCE, "planted", 4, -1, programs),
        r"node 0 ends without the contribution of node 1 in elements \[2, 4\)",
    )


def test_what_lies_between_blocks_is_nobodys_result() -> None:
    apart = (Slice(1, 3), Slice(5, 6))
    programs: tuple[Program, ...] = (
        (Send(apart[0], 1), Receive(apart[1], 1)),
        (Send(apart[1], 0), Receive(apart[0], 0)),
    )
    verify(Schedule(Kind.ALL_GATHER, "planted", 9, -1, programs, apart))
    wider = (Slice(1, 4), Slice(5, 6))
    refused(
        Schedule(Kind.ALL_GATHER, "planted", 9, -1, programs, wider),
        r"node 1 ends without node 0's content in elements \[3, 4\)",
    )
