"""The number of elements that each node sends, by the textbook."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.schedule import Send
from allfold_core.schedules.strategies.phases import place_in_heap
from tests.core.cases import blocks_of, bytes_sent, names_for

SIZES = st.lists(st.integers(1, 1000), min_size=2, max_size=20)
SPARSE = st.lists(st.integers(0, 3), min_size=2, max_size=20)
ARITIES = {"chain": 1, "tree(2)": 2, "tree(3)": 3, "centralized": 1000}


def sent_by_node(kind: Kind, name: str, sizes: list[int], nodes: int, root: int = -1) -> list[int]:
    blocks = blocks_of(sizes)
    schedule = compile_schedule(
        kind, name, nodes=nodes, numel=blocks[-1].stop, root=root, blocks=blocks
    )
    return [bytes_sent(program, itemsize=1) for program in schedule.programs]


@pytest.mark.parametrize("name", ["ring", "direct", "halving_doubling"])
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize("nodes", [2, 4, 8, 32])
def test_with_equal_blocks_every_node_sends_all_but_one(kind: Kind, name: str, nodes: int) -> None:
    """(P-1)/P of the total: half of what an all-reduce sends."""
    assert sent_by_node(kind, name, [7] * nodes, nodes) == [7 * (nodes - 1)] * nodes


@given(sizes=SIZES)
def test_in_a_ring_everybody_sends_all_but_one_block(sizes: list[int]) -> None:
    nodes, total = len(sizes), sum(sizes)
    gathered = sent_by_node(Kind.ALL_GATHER, "ring", sizes, nodes)
    assert gathered == [total - sizes[(node + 1) % nodes] for node in range(nodes)]
    scattered = sent_by_node(Kind.REDUCE_SCATTER, "ring", sizes, nodes)
    assert scattered == [total - size for size in sizes]


@given(sizes=SPARSE)
def test_a_mesh_sends_what_is_needed_and_nothing_else(sizes: list[int]) -> None:
    nodes, total = len(sizes), sum(sizes)
    gathered = sent_by_node(Kind.ALL_GATHER, "direct", sizes, nodes)
    assert gathered == [(nodes - 1) * size for size in sizes]
    scattered = sent_by_node(Kind.REDUCE_SCATTER, "direct", sizes, nodes)
    assert scattered == [total - size for size in sizes]


@given(sizes=SIZES)
def test_an_all_gather_brings_everybody_what_they_have_not(sizes: list[int]) -> None:
    """No node gets anything twice, so all strategies send the same in total."""
    nodes = len(sizes)
    for name in names_for(Kind.ALL_GATHER, 3):
        sent = sent_by_node(Kind.ALL_GATHER, name, sizes, nodes)
        assert sum(sent) == (nodes - 1) * sum(sizes), name


@given(sizes=SIZES)
def test_beyond_a_power_of_two_halving_returns_the_extra_nodes_their_blocks(
    sizes: list[int],
) -> None:
    nodes = len(sizes)
    core = 1 << (nodes.bit_length() - 1)
    sent = sent_by_node(Kind.REDUCE_SCATTER, "halving_doubling", sizes, nodes)
    assert sum(sent) == (nodes - 1) * sum(sizes) + sum(sizes[core:])


def depths(nodes: int, arity: int) -> list[int]:
    found = [0] * nodes
    for position in range(1, nodes):
        found[position] = found[place_in_heap(nodes, arity, position).parent] + 1
    return found


@pytest.mark.parametrize("name", ARITIES)
@given(nodes=st.integers(2, 20), size=st.integers(0, 9))
def test_in_a_tree_a_block_passes_every_edge_between_its_node_and_the_root(
    name: str, nodes: int, size: int
) -> None:
    """Equal blocks, because which node stands where does not matter then."""
    passed = size * sum(depths(nodes, ARITIES[name]))
    for kind in (Kind.GATHER, Kind.SCATTER):
        sent = sent_by_node(kind, name, [size] * nodes, nodes, root=0)
        assert sum(sent) == passed, kind
    if name != "chain":
        sent = sent_by_node(Kind.REDUCE_SCATTER, name, [size] * nodes, nodes)
        assert sum(sent) == (nodes - 1) * nodes * size + passed


@given(sizes=SPARSE, data=st.data())
def test_in_a_star_only_blocks_of_others_travel(sizes: list[int], data: st.DataObject) -> None:
    nodes = len(sizes)
    root = data.draw(st.integers(0, nodes - 1))
    gathered = sent_by_node(Kind.GATHER, "centralized", sizes, nodes, root)
    assert gathered == [0 if node == root else size for node, size in enumerate(sizes)]
    scattered = sent_by_node(Kind.SCATTER, "centralized", sizes, nodes, root)
    assert scattered == [sum(sizes) - sizes[root] if node == root else 0 for node in range(nodes)]


@given(sizes=SPARSE)
def test_along_a_chain_a_node_passes_the_blocks_of_those_behind_it(sizes: list[int]) -> None:
    nodes = len(sizes)
    behind = list(accumulate(reversed(sizes)))[::-1]
    assert sent_by_node(Kind.GATHER, "chain", sizes, nodes, root=0) == [0, *behind[1:]]
    assert sent_by_node(Kind.SCATTER, "chain", sizes, nodes, root=0) == [*behind[1:], 0]


@given(nodes=st.integers(2, 9), data=st.data())
def test_an_all_to_all_sends_every_block_once_and_straight(nodes: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=nodes**2, max_size=nodes**2))
    blocks = blocks_of(sizes)
    schedule = compile_schedule(
        Kind.ALL_TO_ALL, "direct", nodes=nodes, numel=sum(sizes), blocks=blocks
    )
    for node, program in enumerate(schedule.programs):
        sent = {step.to: step.slice for step in program if isinstance(step, Send)}
        mine = blocks[node * nodes : (node + 1) * nodes]
        assert sent == {to: block for to, block in enumerate(mine) if block and to != node}
        assert bytes_sent(program, itemsize=1) == sum(map(len, mine)) - len(mine[node])
