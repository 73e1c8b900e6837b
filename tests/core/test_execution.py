"""Schedules run with numbers: by an executor that knows nothing of the verifier.

It takes each program strictly in order, with unbounded edges, and a random node goes next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.compiler import compile_schedule, strategies_for
from allfold_core.operations import Kind
from allfold_core.schedule import Await, Fold, Receive, Schedule, Send, Signal

ALL = [(kind, name) for kind in Kind for name in (*strategies_for(kind), "tree(3)")]
NAMES = [f"{kind.label}-{name}" for kind, name in ALL]


class Node:
    """One node's program, content and place in it."""

    def __init__(self, me: int, schedule: Schedule, content: list[float]) -> None:
        self.me = me
        self.program = schedule.programs[me]
        self.content = list(content)
        self.done = 0

    def runnable(self, edges: dict[tuple[int, int], deque[list[float]]]) -> bool:
        if self.done == len(self.program):
            return False
        match self.program[self.done]:
            case Receive(source=source) | Await(source):
                return bool(edges[source, self.me])
            case Fold(operands=operands):
                return all(one == self.me or edges[one, self.me] for one in operands)
        return True

    def step(self, edges: dict[tuple[int, int], deque[list[float]]]) -> None:
        step = self.program[self.done]
        self.done += 1
        match step:
            case Send(part, to):
                edges[self.me, to].append(self.content[part.start : part.stop])
            case Signal(to):
                edges[self.me, to].append([])
            case Await(source):
                assert edges[source, self.me].popleft() == []
            case Receive(part, source):
                data = edges[source, self.me].popleft()
                assert len(data) == len(part)
                self.content[part.start : part.stop] = data
            case Fold(part, operands):
                own = self.content[part.start : part.stop]
                rows = [
                    own if one == self.me else edges[one, self.me].popleft() for one in operands
                ]
                self.content[part.start : part.stop] = fold_rows(rows)


def fold_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    total = list(rows[0])
    for row in rows[1:]:
        total = [one + two for one, two in zip(total, row, strict=True)]
    return total


def execute(schedule: Schedule, inputs: list[list[float]], random: Random) -> list[list[float]]:
    nodes = [Node(me, schedule, inputs[me]) for me in range(schedule.nodes)]
    edges: dict[tuple[int, int], deque[list[float]]] = defaultdict(deque)
    while ready := [node for node in nodes if node.runnable(edges)]:
        random.choice(ready).step(edges)
    assert all(node.done == len(node.program) for node in nodes), "the programs hang"
    assert not any(edges.values()), "messages are left over"
    return [node.content for node in nodes]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_integers_are_exact_whatever_the_timing(kind: Kind, name: str) -> None:
    random = Random(20)
    for nodes in (1, 2, 3, 5, 8, 11):
        for numel in (0, 1, nodes - 1, nodes, 2 * nodes + 1):
            root = random.randrange(nodes) if kind.has_root else -1
            inputs = [[random.randrange(1000) for _ in range(numel)] for _ in range(nodes)]
            schedule = compile_schedule(kind, name, nodes=nodes, numel=numel, root=root)
            results = execute(schedule, [list(map(float, row)) for row in inputs], random)
            expected = inputs[root] if kind is Kind.BROADCAST else fold_rows(inputs)
            for node, result in enumerate(results):
                if kind is not Kind.BARRIER and schedule.has_result(node):
                    assert result == expected


@pytest.mark.parametrize("name", [*strategies_for(Kind.ALL_REDUCE), "tree(3)"])
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(2, 9), numel=st.integers(1, 30))
def test_floats_have_the_same_bits_on_all_nodes_and_in_all_runs(
    name: str, seed: int, nodes: int, numel: int
) -> None:
    random = Random(seed)
    inputs = [
        [random.uniform(-1, 1) * 10 ** random.randrange(9) for _ in range(numel)]
        for _ in range(nodes)
    ]
    schedule = compile_schedule(Kind.ALL_REDUCE, name, nodes=nodes, numel=numel)
    first = execute(schedule, inputs, random)
    second = execute(schedule, inputs, random)
    assert all(result == first[0] for result in (*first, *second))
    assert first[0] == pytest.approx(fold_rows(inputs), rel=1e-6, abs=1e-3)
