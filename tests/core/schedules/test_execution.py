"""Schedules run with numbers give what each kind promises."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.schedule import Schedule, Slice
from tests.core.cases import SIZES, block_count, blocks_of, labels_of, names_for, pairs_of
from tests.core.executor import Row, Worker, execute, fold_rows

ALL = pairs_of(list(Kind), 3)
BLOCKS = [(kind, name) for kind, name in ALL if kind.has_blocks]
SMALL = [name for name in SIZES if name != "one huge"]


def run(schedule: Schedule, inputs: list[Row], random: Random) -> list[Row]:
    """Every node's work buffer after the op."""
    results = [row.copy() for row in inputs]
    programs = zip(schedule.programs, results, strict=True)
    execute([Worker(me, *each) for me, each in enumerate(programs)], random)
    return results


def promised(schedule: Schedule, inputs: list[Row], node: int) -> list[tuple[Slice, Row]]:
    """The slices that must end as results on a node, and what they must hold."""
    nodes, root, blocks = schedule.nodes, schedule.root, schedule.blocks
    whole, total = Slice(0, schedule.numel), fold_rows(inputs)
    match schedule.kind:
        case Kind.ALL_REDUCE:
            return [(whole, total)]
        case Kind.REDUCE:
            return [(whole, total)] if node == root else []
        case Kind.BROADCAST:
            return [(whole, inputs[root])]
        case Kind.ALL_GATHER:
            return list(zip(blocks, inputs, strict=True))
        case Kind.GATHER:
            return list(zip(blocks, inputs, strict=True)) if node == root else []
        case Kind.REDUCE_SCATTER:
            return [(blocks[node], total)]
        case Kind.SCATTER:
            return [(blocks[node], inputs[root])]
        case Kind.ALL_TO_ALL:
            return list(zip(blocks[node::nodes], inputs, strict=True))
    return []


def assert_promised(schedule: Schedule, inputs: list[Row], results: list[Row]) -> None:
    for node, result in enumerate(results):
        for part, row in promised(schedule, inputs, node):
            assert np.array_equal(result[part.start : part.stop], row[part.start : part.stop])


def integers(random: Random, nodes: int, numel: int) -> list[Row]:
    return [np.array([random.randrange(1000) for _ in range(numel)], float) for _ in range(nodes)]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=labels_of(ALL))
def test_integers_are_exact_whatever_the_timing(kind: Kind, name: str) -> None:
    random = Random(20)
    for nodes in (1, 2, 3, 5, 8, 11):
        for numel in (0, 1, nodes - 1, nodes, 2 * nodes + 1):
            root = random.randrange(nodes) if kind.has_root else -1
            inputs = integers(random, nodes, numel)
            schedule = compile_schedule(kind, name, nodes=nodes, numel=numel, root=root)
            assert_promised(schedule, inputs, run(schedule, inputs, random))


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize(("kind", "name"), BLOCKS, ids=labels_of(BLOCKS))
def test_blocks_of_any_size_come_where_they_belong(kind: Kind, name: str, sizes: str) -> None:
    random = Random(21)
    for nodes in (1, 2, 3, 5, 8):
        blocks = blocks_of(SIZES[sizes](block_count(kind, nodes)))
        numel = blocks[-1].stop
        root = random.randrange(nodes) if kind.has_root else -1
        order = random.sample(range(nodes), nodes)
        inputs = integers(random, nodes, numel)
        schedule = compile_schedule(
            kind, name, nodes=nodes, numel=numel, root=root, tree_order=order, blocks=blocks
        )
        assert_promised(schedule, inputs, run(schedule, inputs, random))


def floats(random: Random, nodes: int, numel: int) -> list[Row]:
    return [
        np.array([random.uniform(-1, 1) * 10 ** random.randrange(9) for _ in range(numel)])
        for _ in range(nodes)
    ]


@pytest.mark.parametrize("name", names_for(Kind.ALL_REDUCE, 3))
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(2, 9), numel=st.integers(1, 30))
def test_floats_have_the_same_bits_on_all_nodes_and_in_all_runs(
    name: str, seed: int, nodes: int, numel: int
) -> None:
    random = Random(seed)
    inputs = floats(random, nodes, numel)
    schedule = compile_schedule(Kind.ALL_REDUCE, name, nodes=nodes, numel=numel)
    first = run(schedule, inputs, random)
    second = run(schedule, inputs, random)
    assert len({result.tobytes() for result in (*first, *second)}) == 1
    assert first[0] == pytest.approx(fold_rows(inputs), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("name", names_for(Kind.REDUCE_SCATTER, 3))
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(2, 9), size=st.integers(1, 5))
def test_a_reduce_scatter_has_the_same_bits_in_all_runs(
    name: str, seed: int, nodes: int, size: int
) -> None:
    random = Random(seed)
    inputs = floats(random, nodes, nodes * size)
    schedule = compile_schedule(Kind.REDUCE_SCATTER, name, nodes=nodes, numel=nodes * size)
    first = run(schedule, inputs, random)
    second = run(schedule, inputs, random)
    total = fold_rows(inputs)
    for block, one, two in zip(schedule.blocks, first, second, strict=True):
        mine = slice(block.start, block.stop)
        assert one[mine].tobytes() == two[mine].tobytes()
        assert one[mine] == pytest.approx(total[mine], rel=1e-6, abs=1e-3)
