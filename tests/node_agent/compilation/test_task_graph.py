"""The task graph, run in random orders, must do what the programs say."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from itertools import pairwise

import pytest

from allfold_agent.compilation.task_graph import (
    CONTENT,
    FOLD_WINDOW,
    INPUTS,
    Task,
    TaskGraph,
    TaskKind,
    build,
)
from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import strategies_for
from allfold_core.schedules.schedule import Fold, Receive, Schedule, Send, Slice

RECEIVES = (TaskKind.RECEIVE, TaskKind.RECEIVE_OPERAND, TaskKind.AWAIT)
SENDS = (TaskKind.SEND, TaskKind.SIGNAL)


class Node:
    """One node that runs its ready tasks in any order, its edges in theirs."""

    def __init__(self, index: int, graph: TaskGraph, content: list[int]) -> None:
        self.index = index
        self.graph = graph
        self.inputs: list[int | None] = list(content)
        self.work: list[int | None] = [None] * len(content)
        self.handed_out: list[list[int | None]] = [[] for _ in content]
        self.waits = [task.waits_for for task in graph.tasks]
        self.done = [False] * len(graph.tasks)
        self.scratch: dict[int, list[int | None]] = {}
        self.codes: dict[int, list[int | None]] = {}
        self.send_position: dict[int, int] = defaultdict(int)
        self.receive_position: dict[int, int] = defaultdict(int)

    def ready(self, wires: dict[tuple[int, int], deque[list[int | None]]]) -> list[Task]:
        """The tasks that may run now."""
        found = []
        for task in self.graph.tasks:
            if self.done[task.index] or self.waits[task.index]:
                continue
            if task.kind in SENDS:
                order = self.graph.sends[task.peer]
                if order[self.send_position[task.peer]] != task.index:
                    continue
            elif task.kind in RECEIVES:
                order = self.graph.receives[task.peer]
                if order[self.receive_position[task.peer]] != task.index:
                    continue
                if not wires[task.peer, self.index]:
                    continue
            found.append(task)
        return found

    def run(self, task: Task, wires: dict[tuple[int, int], deque[list[int | None]]]) -> None:
        part = slice(task.start, task.stop)
        match task.kind:
            case TaskKind.CONTRIBUTE:
                self.work[part] = self.inputs[part]
            case TaskKind.SEND | TaskKind.SIGNAL:
                self.send_position[task.peer] += 1
                code = self.work[part] if task.code < 0 else self.codes[task.code]
                assert code == self.work[part], "what is sent is not what this node keeps"
                wires[self.index, task.peer].append(code)
            case TaskKind.RECEIVE | TaskKind.RECEIVE_OPERAND | TaskKind.AWAIT:
                self.receive_position[task.peer] += 1
                got = wires[task.peer, self.index].popleft()
                assert len(got) == task.stop - task.start, "the two ends cut other frames"
                if task.kind is TaskKind.RECEIVE:
                    self.work[part] = self.codes[task.index] = got
                elif task.kind is TaskKind.RECEIVE_OPERAND:
                    self.scratch[task.index] = got
            case TaskKind.FOLD:
                own = {CONTENT: self.work, INPUTS: self.inputs}
                operands = [
                    own[index][part] if index in own else self.scratch.pop(index)
                    for index in task.operands
                ]
                self.work[part] = [sum(column) for column in zip(*operands, strict=True)]
            case TaskKind.ENCODE:
                self.codes[task.index] = self.work[part]
            case TaskKind.FENCE:
                pass
        self.done[task.index] = True
        if task.final:
            self.hand_out(task.start, task.stop)
        for successor in task.successors:
            self.waits[successor] -= 1

    def hand_out(self, start: int, stop: int) -> None:
        """Note what the ranks get."""
        for element in range(start, stop):
            self.handed_out[element].append(self.work[element])


def run(
    schedule: Schedule,
    chunk: int,
    order: random.Random,
    *,
    encoded: bool = False,
) -> list[Node]:
    """Run all nodes' graphs to the end, always choosing any of the ready tasks."""
    nodes = [
        Node(
            index,
            build(
                program,
                node=index,
                numel=schedule.numel,
                chunk=chunk,
                results=results(schedule, index),
                encoded=encoded,
            ),
            [given(index, element) for element in range(schedule.numel)],
        )
        for index, program in enumerate(schedule.programs)
    ]
    wires: dict[tuple[int, int], deque[list[int | None]]] = defaultdict(deque)
    while ready := [(node, task) for node in nodes for task in node.ready(wires)]:
        node, task = order.choice(ready)
        node.run(task, wires)
        assert len(node.scratch) <= (FOLD_WINDOW + 1) * len(nodes)
    assert all(all(node.done) for node in nodes), "the graphs wait for each other"
    assert not any(wires.values()), "a frame was never received"
    for node in nodes:
        for bounds in node.graph.rest:
            node.hand_out(*bounds)
    return nodes


def given(node: int, element: int) -> int:
    return int(10**node) * (1 + element % 3)


def blocks_of(schedule: Schedule) -> list[tuple[int, Slice]]:
    return list(enumerate(schedule.blocks or (Slice(0, schedule.numel),)))


def results(schedule: Schedule, node: int) -> list[Slice]:
    return [
        block for index, block in blocks_of(schedule) if schedule.has_result(node, index) and block
    ]


def expected(schedule: Schedule, block: int, element: int) -> int:
    origin = schedule.origin(block)
    if origin >= 0:
        return given(origin, element)
    return sum(given(node, element) for node in range(schedule.nodes))


def cut(kind: Kind, numel: int, nodes: int, order: random.Random) -> tuple[Slice, ...] | None:
    """Random blocks that make up ``numel`` elements; ``None`` for a kind that has none."""
    if not kind.has_blocks:
        return None
    count = nodes * nodes if kind is Kind.ALL_TO_ALL else nodes
    inner = sorted(order.randrange(numel + 1) for _ in range(count - 1))
    bounds = [0, *inner, numel]
    blocks = [Slice(start, stop) for start, stop in pairwise(bounds)]
    if kind is Kind.ALL_TO_ALL:  # what stays on a node is not moved
        blocks = [
            Slice(each.start, each.start) if index % (nodes + 1) == 0 else each
            for index, each in enumerate(blocks)
        ]
    return tuple(blocks)


CASES = [(kind, strategy) for kind in Kind for strategy in strategies_for(kind)]


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(("kind", "strategy"), CASES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 8])
def test_any_order_of_ready_tasks_gives_the_result_of_the_program(
    kind: Kind, strategy: str, nodes: int, encoded: bool
) -> None:
    """Every element of it is handed out once, chunk by chunk or with the rest, when it is right."""
    order = random.Random(f"{kind} {strategy} {nodes}")
    for numel, chunk in [(0, 4), (1, 4), (nodes, 1), (nodes + 1, 2), (29, 3), (29, 64)]:
        root = order.randrange(nodes) if kind.has_root else -1
        blocks = cut(kind, numel, nodes, order)
        schedule = compile_schedule(
            kind, strategy, nodes=nodes, numel=numel, root=root, blocks=blocks
        )
        for node in run(schedule, chunk, order, encoded=encoded):
            handed_out: list[list[int]] = [[] for _ in range(schedule.numel)]
            for index, block in blocks_of(schedule):
                if schedule.has_result(node.index, index):
                    right = [
                        expected(schedule, index, element)
                        for element in range(block.start, block.stop)
                    ]
                    assert node.work[block.start : block.stop] == right
                    handed_out[block.start : block.stop] = [[each] for each in right]
            assert node.handed_out == handed_out


def test_a_chunk_is_final_when_all_of_it_is_a_result_that_nothing_overwrites() -> None:
    program = (Receive(Slice(0, 12), 1), Receive(Slice(4, 6), 2))
    graph = build(program, node=0, numel=12, chunk=4, results=[Slice(0, 10)])
    assert [graph.tasks[index].final for index in graph.receives[1]] == [True, False, False]
    assert [graph.tasks[index].final for index in graph.receives[2]] == [True]
    assert sorted(graph.rest) == [(6, 8), (8, 10)]


def test_a_send_waits_only_for_the_chunks_that_it_sends() -> None:
    graph = build((Fold(Slice(0, 8), (1, 0)), Send(Slice(0, 8), 1)), node=0, numel=8, chunk=4)
    sends = [graph.tasks[index] for index in graph.sends[1]]
    folds = [task for task in graph.tasks if task.kind is TaskKind.FOLD]
    assert [fold.successors for fold in folds] == [[send.index] for send in sends]


def test_a_chunk_is_overwritten_only_after_it_was_sent() -> None:
    graph = build((Send(Slice(0, 4), 1), Receive(Slice(0, 4), 1)), node=0, numel=4, chunk=4)
    send, receive = graph.tasks[graph.sends[1][0]], graph.tasks[graph.receives[1][0]]
    assert receive.index in send.successors
    assert not send.snapshot, "the peer's answer proves that the frame arrived"


def test_a_send_that_is_folded_over_keeps_a_copy() -> None:
    graph = build((Send(Slice(0, 4), 1), Fold(Slice(0, 4), (0, 1))), node=0, numel=4, chunk=4)
    assert graph.tasks[graph.sends[1][0]].snapshot


def contributed(graph: TaskGraph) -> list[tuple[int, int]]:
    return [(task.start, task.stop) for task in graph.tasks if task.kind is TaskKind.CONTRIBUTE]


def operands(graph: TaskGraph) -> list[tuple[int, ...]]:
    """Of the folds; what other nodes send as 0."""
    folds = [task for task in graph.tasks if task.kind is TaskKind.FOLD]
    return [tuple(min(each, 0) for each in fold.operands) for fold in folds]


def test_inputs_that_are_only_folded_are_not_copied_into_the_work_buffer_first() -> None:
    program = (Fold(Slice(0, 8), (1, 0, 2)), Send(Slice(0, 8), 1))
    graph = build(program, node=0, numel=8, chunk=4, results=[Slice(0, 8)])
    assert contributed(graph) == []
    assert operands(graph) == [(0, INPUTS, 0)] * 2


def test_a_range_that_is_sent_as_it_was_given_is_contributed_also_where_it_is_folded_later() -> (
    None
):
    program = (Send(Slice(0, 4), 1), Fold(Slice(0, 8), (1, 0)))
    graph = build(program, node=0, numel=8, chunk=4, results=[Slice(0, 8)])
    assert contributed(graph) == [(0, 4)]
    assert operands(graph) == [(0, CONTENT), (0, INPUTS)]
    [send] = graph.sends[1]
    assert [graph.tasks[send].waits_for, graph.tasks[send].snapshot] == [1, True]


def test_a_chunk_of_which_a_part_was_sent_is_contributed_as_a_whole_before_its_fold() -> None:
    program = (Send(Slice(0, 3), 1), Fold(Slice(0, 8), (0, 1)))
    graph = build(program, node=0, numel=8, chunk=8)
    assert contributed(graph) == [(0, 3), (3, 8)]
    assert operands(graph) == [(CONTENT, 0)]


def test_what_was_folded_once_is_folded_again_from_the_work_buffer() -> None:
    """Its inputs are in it already, and must not be added a second time."""
    program = (Fold(Slice(0, 4), (0, 1)), Fold(Slice(0, 4), (0, 2)))
    graph = build(program, node=0, numel=4, chunk=4)
    assert contributed(graph) == []
    assert operands(graph) == [(INPUTS, 0), (CONTENT, 0)]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_in_a_ring_a_node_contributes_the_slice_that_it_sends_first_and_no_other(
    nodes: int,
) -> None:
    schedule = compile_schedule(Kind.ALL_REDUCE, "ring", nodes=nodes, numel=nodes * 10)
    for node, program in enumerate(schedule.programs):
        whole = Slice(0, schedule.numel)
        graph = build(program, node=node, numel=schedule.numel, chunk=100, results=[whole])
        first = next(step for step in program if isinstance(step, Send))
        assert contributed(graph) == [(first.slice.start, first.slice.stop)]


def test_received_operands_that_wait_for_their_fold_are_bounded() -> None:
    graph = build((Fold(Slice(0, 100), (0, 1, 2)),), node=0, numel=100, chunk=1, results=[])
    first = [graph.tasks[index] for index in graph.receives[1]]
    assert [task.waits_for for task in first[:FOLD_WINDOW]] == [0] * FOLD_WINDOW
    assert all(task.waits_for == 1 for task in first[FOLD_WINDOW:])


def test_what_came_in_a_code_is_passed_on_in_the_same_one() -> None:
    program = (Receive(Slice(0, 8), 1), Send(Slice(0, 8), 2), Send(Slice(0, 4), 3))
    graph = build(program, node=0, numel=8, chunk=4, encoded=True)
    assert not [task for task in graph.tasks if task.kind is TaskKind.ENCODE]
    assert [graph.tasks[index].code for index in graph.sends[2]] == list(graph.receives[1])
    assert [graph.tasks[index].code for index in graph.sends[3]] == [graph.receives[1][0]]


def test_one_code_serves_all_nodes_that_it_is_sent_to() -> None:
    graph = build(
        (Send(Slice(0, 8), 1), Send(Slice(0, 8), 2)), node=0, numel=8, chunk=4, encoded=True
    )
    encodes = [task.index for task in graph.tasks if task.kind is TaskKind.ENCODE]
    assert [graph.tasks[index].code for index in graph.sends[1]] == encodes
    assert [graph.tasks[index].code for index in graph.sends[2]] == encodes


def test_a_chunk_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 element, got 0"):
        build((), node=0, numel=1, chunk=0, results=[])


@pytest.mark.parametrize("strategy", strategies_for(Kind.ALL_REDUCE))
@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_what_is_exact_is_in_chunks_of_its_own_that_have_no_code(strategy: str, nodes: int) -> None:
    numel, border, chunk = 1000, 930, 64
    programs = compile_schedule(Kind.ALL_REDUCE, strategy, nodes=nodes, numel=numel).programs
    exact = 0
    for node, program in enumerate(programs):
        graph = build(program, node=node, numel=numel, chunk=chunk, encoded=True, exact_from=border)
        for task in graph.tasks:
            assert not task.start < border < task.stop or task.kind is TaskKind.CONTRIBUTE
            if task.kind is TaskKind.SEND:
                assert (task.code < 0) == (task.start >= border)
                exact += task.start >= border
    assert exact >= nodes
