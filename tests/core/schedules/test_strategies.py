"""Every strategy, proved; and the shapes that the proof does not look at."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.operations import Kind
from allfold_core.pricing.price import chunked
from allfold_core.schedules.compiler import compile_program, compile_schedule
from allfold_core.schedules.registry import strategies_for
from allfold_core.schedules.schedule import (
    Await,
    Fold,
    Receive,
    Schedule,
    Send,
    Signal,
    Slice,
    balanced_slices,
)
from allfold_core.schedules.strategies.double_tree import first_place, second_place
from allfold_core.schedules.strategies.phases import TreePlace, place_in_heap
from allfold_core.schedules.strategies.tree import preorder_ranks
from allfold_core.schedules.verify import verify
from tests.core.cases import FEW, PLAIN, bytes_sent, labels_of, names_for, pairs_of, roots_of
from tests.core.proofs import prove
from tests.support.tiers import long

VALUES = (3, 4)
MOST_STEPS = 30_000
ALL = pairs_of(list(Kind), *VALUES)
WHOLE = pairs_of(PLAIN, *VALUES)
ALL_REDUCES = names_for(Kind.ALL_REDUCE, *VALUES)
NAMES = labels_of(ALL)


def numels_of(nodes: int) -> tuple[int, ...]:
    """Without elements, without a slice for every node, and with slices of several sizes."""
    if nodes < FEW:
        return 0, 1, nodes - 1, nodes, nodes + 1, 3 * nodes + 2
    return nodes - 1, nodes + 1


def schedules(kind: Kind, name: str, nodes: int, numel: int) -> list[Schedule]:
    return [
        compile_schedule(kind, name, nodes=nodes, numel=numel, root=root)
        for root in roots_of(kind, nodes)
    ]


def data_steps(schedule: Schedule) -> list[Send | Receive | Fold]:
    return [
        step
        for program in schedule.programs
        for step in program
        if isinstance(step, Send | Receive | Fold)
    ]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("counts", [range(1, 13), long(range(13, 65))], ids=["1-12", "13-64"])
@pytest.mark.parametrize(("kind", "name"), WHOLE, ids=labels_of(WHOLE))
def test_every_strategy_is_right_for_1_to_64_nodes(kind: Kind, name: str, counts: range) -> None:
    for nodes in counts:
        for numel in (0,) if kind is Kind.BARRIER else numels_of(nodes):
            for schedule in schedules(kind, name, nodes, numel):
                prove(schedule)


@pytest.mark.long
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("kind", "name"), WHOLE, ids=labels_of(WHOLE))
def test_every_strategy_is_right_for_many_nodes(kind: Kind, name: str) -> None:
    """As many as a proof of moderate length has: few where everybody sends to everybody."""
    for nodes in (79, 128, 257):
        for numel in (3, nodes + 1):
            root = nodes // 3 if kind.has_root else -1
            programs = [
                compile_program(kind, name, nodes=nodes, numel=numel, node=node, root=root)
                for node in (0, nodes // 2)
            ]
            if nodes * max(map(len, programs)) <= MOST_STEPS:
                prove(compile_schedule(kind, name, nodes=nodes, numel=numel, root=root))
            assert nodes != 79 or nodes * max(map(len, programs)) <= MOST_STEPS


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_every_strategy_stays_right_when_its_slices_are_cut_into_chunks(
    kind: Kind, name: str
) -> None:
    for nodes in (2, 3, 5, 8, 13):
        for schedule in schedules(kind, name, nodes, 7 * nodes + 3):
            for chunks in (2, 5):
                verify(chunked(schedule, chunks), capacity=1)


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_any_order_of_the_tree_is_right(kind: Kind, name: str) -> None:
    nodes = 11
    order = (4, 0, 9, 10, 2, 7, 1, 3, 8, 6, 5)
    for root in roots_of(kind, nodes):
        verify(compile_schedule(kind, name, nodes=nodes, numel=30, root=root, tree_order=order))


@given(
    nodes=st.integers(1, 40),
    numel=st.integers(0, 1 << 40),
    pair=st.sampled_from(ALL),
    data=st.data(),
)
def test_any_size_is_right(
    nodes: int, numel: int, pair: tuple[Kind, str], data: st.DataObject
) -> None:
    kind, name = pair
    root = data.draw(st.integers(0, nodes - 1)) if kind.has_root else -1
    verify(compile_schedule(kind, name, nodes=nodes, numel=numel, root=root), capacity=2)


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_one_node_has_nothing_to_do(kind: Kind, name: str) -> None:
    for numel in (0, 1, 1000):
        root = 0 if kind.has_root else -1
        assert compile_program(kind, name, nodes=1, numel=numel, node=0, root=root) == ()


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_without_elements_there_are_only_signals(kind: Kind, name: str) -> None:
    for nodes in (2, 3, 7, 8):
        for schedule in schedules(kind, name, nodes, 0):
            assert data_steps(schedule) == []
            assert all(
                any(isinstance(step, Signal) for step in program)
                and any(isinstance(step, Await) for step in program)
                for program in schedule.programs
            )


def test_a_barrier_moves_nothing_whatever_its_shape_says() -> None:
    for name in strategies_for(Kind.BARRIER):
        schedule = compile_schedule(Kind.BARRIER, name, nodes=5, numel=1)
        assert data_steps(schedule) == []
        assert schedule.numel == 0


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_no_slice_is_empty(kind: Kind, name: str) -> None:
    for nodes in range(2, 20):
        for numel in (1, nodes - 1, nodes + 1):
            for schedule in schedules(kind, name, nodes, numel):
                assert all(len(step.slice) for step in data_steps(schedule))


@pytest.mark.parametrize(("kind", "name"), ALL, ids=NAMES)
def test_a_program_is_the_schedules_part_of_its_node(kind: Kind, name: str) -> None:
    nodes, order = 6, (3, 1, 0, 5, 4, 2)
    root = 4 if kind.has_root else -1
    whole = compile_schedule(kind, name, nodes=nodes, numel=20, root=root, tree_order=order)
    for node in range(nodes):
        program = compile_program(
            kind, name, nodes=nodes, numel=20, node=node, root=root, tree_order=order
        )
        assert program == whole.programs[node]


@given(numel=st.integers(0, 1 << 50), parts=st.integers(1, 500))
def test_slices_are_contiguous_cover_everything_and_differ_by_at_most_one(
    numel: int, parts: int
) -> None:
    slices = balanced_slices(numel, parts)
    sizes = [len(part) for part in slices]
    assert len(slices) == parts
    assert slices[0].start == 0
    assert slices[-1].stop == numel
    assert all(one.stop == two.start for one, two in pairwise(slices))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("nodes", "numel"), [(4, 5), (5, 6), (5, 7), (6, 7), (8, 9), (3, 4), (4, 6), (4, 9)]
)
def test_the_ring_has_no_range_that_ends_before_it_starts(nodes: int, numel: int) -> None:
    """Rounding every slice up, as burn-collective did, makes such ranges (its defect 3)."""
    schedule = compile_schedule(Kind.ALL_REDUCE, "ring", nodes=nodes, numel=numel)
    assert all(step.slice.start < step.slice.stop for step in data_steps(schedule))
    verify(schedule)


def test_a_slice_that_ends_before_it_starts_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r"\[6, 5\)"):
        Slice(6, 5)
    with pytest.raises(ValueError, match="0 parts"):
        balanced_slices(4, 0)


def test_a_ring_with_fewer_elements_than_nodes_is_a_binary_tree() -> None:
    """By the number of elements, not by any one dimension: 9 elements do for 4 nodes."""
    for nodes in (2, 5, 16):
        small = compile_schedule(Kind.ALL_REDUCE, "ring", nodes=nodes, numel=nodes - 1)
        assert len(small.programs[nodes - 1]) == 2
        ring = compile_schedule(Kind.ALL_REDUCE, "ring", nodes=nodes, numel=nodes)
        assert len(ring.programs[nodes - 1]) == 4 * (nodes - 1)


@pytest.mark.parametrize("name", ["ring", "direct2", "halving_doubling"])
@pytest.mark.parametrize("nodes", [2, 4, 8, 32])
def test_bandwidth_optimal_strategies_send_twice_all_but_their_own_slice(
    name: str, nodes: int
) -> None:
    numel = 64 * nodes
    schedule = compile_schedule(Kind.ALL_REDUCE, name, nodes=nodes, numel=numel)
    for program in schedule.programs:
        assert bytes_sent(program, itemsize=4) == 2 * (nodes - 1) * numel * 4 // nodes


@pytest.mark.parametrize("nodes", range(2, 20))
def test_the_whole_group_sends_the_textbook_bytes(nodes: int) -> None:
    numel = 24 * nodes
    flat = 2 * (nodes - 1) * numel
    for name in ALL_REDUCES:
        programs = compile_schedule(Kind.ALL_REDUCE, name, nodes=nodes, numel=numel).programs
        sent = sum(bytes_sent(program, itemsize=1) for program in programs)
        assert sent == (nodes * (nodes - 1) * numel if name == "direct" else flat), name


def test_the_hub_of_a_star_sends_the_tensor_to_everybody() -> None:
    schedule = compile_schedule(Kind.ALL_REDUCE, "centralized", nodes=9, numel=10)
    assert [bytes_sent(program) for program in schedule.programs] == [8 * 40] + [40] * 8


@pytest.mark.parametrize("name", ["direct", "direct2"])
def test_meshes_fold_in_node_order_in_one_step(name: str) -> None:
    schedule = compile_schedule(Kind.ALL_REDUCE, name, nodes=7, numel=20)
    for program in schedule.programs:
        folds = [step for step in program if isinstance(step, Fold)]
        assert [fold.operands for fold in folds] == [tuple(range(7))]


@pytest.mark.parametrize("name", ["direct", "direct2"])
def test_in_each_step_of_a_mesh_no_two_nodes_send_to_the_same_one(name: str) -> None:
    nodes = 9
    programs = compile_schedule(Kind.ALL_REDUCE, name, nodes=nodes, numel=nodes).programs
    targets = [[step.to for step in program if isinstance(step, Send)] for program in programs]
    for step in zip(*targets, strict=True):
        assert sorted(step) == list(range(nodes))


def test_a_heap_of_arity_two_is_the_binary_tree_of_seven() -> None:
    places = [place_in_heap(7, 2, me) for me in range(7)]
    assert places[:3] == [TreePlace(-1, (1, 2)), TreePlace(0, (3, 4)), TreePlace(0, (5, 6))]
    assert places[3:] == [TreePlace(1, ()), TreePlace(1, ()), TreePlace(2, ()), TreePlace(2, ())]


@given(nodes=st.integers(1, 300), arity=st.integers(1, 400))
def test_in_a_heap_children_and_parents_agree(nodes: int, arity: int) -> None:
    assert_tree([place_in_heap(nodes, arity, me) for me in range(nodes)], arity)


@given(nodes=st.integers(1, 300), arity=st.integers(1, 400))
def test_in_preorder_every_subtree_is_contiguous(nodes: int, arity: int) -> None:
    ranks = preorder_ranks(nodes, arity)
    assert sorted(ranks) == list(range(nodes))
    members: list[list[int]] = [[rank] for rank in ranks]
    for me in reversed(range(1, nodes)):
        members[place_in_heap(nodes, arity, me).parent] += members[me]
    assert all(max(ranks) - min(ranks) == len(ranks) - 1 for ranks in members)
    assert all(min(ranks) == ranks[0] for ranks in members)


def test_an_arity_of_nodes_or_more_is_a_star_and_one_a_chain() -> None:
    def programs(name: str) -> tuple[object, ...]:
        return compile_schedule(Kind.ALL_REDUCE, name, nodes=6, numel=9).programs

    assert programs("tree(5)") == programs("tree(6)") == programs("tree(1000)")
    assert programs("tree(1000)") == programs("centralized")
    assert programs("tree(1)") == programs("chain")


def assert_tree(places: list[TreePlace], arity: int) -> None:
    """Parents and children agree, and everybody is below the one root."""
    roots = [me for me, place in enumerate(places) if place.parent < 0]
    assert len(roots) == 1
    reached = roots
    for me in reached:
        assert len(places[me].children) <= arity
        assert all(places[child].parent == me for child in places[me].children)
        reached.extend(places[me].children)
    assert sorted(reached) == list(range(len(places)))


def test_in_the_double_tree_every_node_is_inner_in_at_most_one_tree() -> None:
    for nodes in (*range(1, 260), 510, 511, 512, 513, 1000, 1023, 1024, 1025):
        first = [first_place(nodes, me) for me in range(nodes)]
        second = [second_place(nodes, me) for me in range(nodes)]
        assert_tree(first, 2)
        assert_tree(second, 2)
        assert not any(
            one.children and two.children for one, two in zip(first, second, strict=True)
        ), nodes


@pytest.mark.parametrize("nodes", [2, 3, 16, 100, 1000])
def test_the_trees_of_a_double_tree_are_as_deep_as_a_balanced_one(nodes: int) -> None:
    for place_of in (first_place, second_place):
        for me in range(nodes):
            depth = 0
            while (me := place_of(nodes, me).parent) >= 0:
                depth += 1
            assert depth <= nodes.bit_length() - 1


@pytest.mark.parametrize("numel", [1, 2, 3, 10, 11])
def test_the_halves_of_a_double_tree_differ_by_at_most_one_element(numel: int) -> None:
    schedule = compile_schedule(Kind.ALL_REDUCE, "double_tree", nodes=6, numel=numel)
    halves = {step.slice for step in data_steps(schedule)}
    assert sum(map(len, halves)) == numel
    assert len(halves) == min(numel, 2)
    assert max(map(len, halves)) - min(map(len, halves)) <= 1


def test_a_ring_of_ten_thousand_nodes_needs_one_program_at_a_time() -> None:
    program = compile_program(Kind.ALL_REDUCE, "ring", nodes=10_000, numel=1 << 30, node=4711)
    assert len(program) == 4 * 9999
    assert bytes_sent(program) == pytest.approx(2 * 9999 / 10_000 * (4 << 30), rel=1e-6)
