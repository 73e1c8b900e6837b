"""Schedules of blocks, proved: every kind and strategy, and blocks of all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.pricing.price import chunked
from allfold_core.schedules.compiler import compile_program, compile_schedule
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
    balanced_slices,
)
from allfold_core.schedules.strategies.phases import place_in_heap
from allfold_core.schedules.strategies.tree_blocks import subtree
from allfold_core.schedules.verify import verify
from tests.core.cases import (
    BLOCKED,
    SIZES,
    block_count,
    blocks_of,
    labels_of,
    pairs_of,
    roots_of,
)
from tests.core.proofs import prove
from tests.support.tiers import long

ALL = pairs_of(BLOCKED, 3)
FEW_SIZES = ("unequal", "some empty")
each_strategy = pytest.mark.parametrize(("kind", "name"), ALL, ids=labels_of(ALL))


def compiled(
    kind: Kind,
    name: str,
    sizes: Sequence[int],
    nodes: int,
    root: int = -1,
    order: Sequence[int] | None = None,
) -> Schedule:
    blocks = blocks_of(sizes)
    return compile_schedule(
        kind,
        name,
        nodes=nodes,
        numel=blocks[-1].stop,
        root=root,
        tree_order=order,
        blocks=blocks,
    )


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("counts", [range(1, 10), long(range(10, 34))], ids=["1-9", "10-33"])
@each_strategy
def test_every_strategy_is_right_for_1_to_33_nodes_and_blocks_of_any_size(
    kind: Kind, name: str, counts: range
) -> None:
    for nodes in counts:
        shown = SIZES if nodes < 12 or nodes == 33 else FEW_SIZES
        for sizes in shown:
            for root in roots_of(kind, nodes):
                sized = SIZES[sizes](block_count(kind, nodes))
                prove(compiled(kind, name, sized, nodes, root))


@pytest.mark.long
@pytest.mark.usefixtures("no_collector")
@each_strategy
def test_every_strategy_is_right_for_48_and_64_nodes(kind: Kind, name: str) -> None:
    for nodes in (48, 64):
        root = nodes - 1 if kind.has_root else -1
        for sizes in FEW_SIZES:
            prove(compiled(kind, name, SIZES[sizes](block_count(kind, nodes)), nodes, root))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("nodes", [100, 129])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.ALL_GATHER, "halving_doubling"),
        (Kind.REDUCE_SCATTER, "halving_doubling"),
        (Kind.GATHER, "tree(8)"),
        (Kind.SCATTER, "tree(8)"),
    ],
)
def test_what_suits_many_nodes_is_right_there(kind: Kind, name: str, nodes: int) -> None:
    root = 7 if kind.has_root else -1
    verify(compiled(kind, name, SIZES["unequal"](nodes), nodes, root))


@given(pair=st.sampled_from(ALL), nodes=st.integers(1, 14), data=st.data())
def test_any_blocks_are_right(pair: tuple[Kind, str], nodes: int, data: st.DataObject) -> None:
    kind, name = pair
    count = block_count(kind, nodes)
    size = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 1 << 40))
    sizes = data.draw(st.lists(size, min_size=count, max_size=count))
    root = data.draw(st.integers(0, nodes - 1)) if kind.has_root else -1
    order = data.draw(st.permutations(range(nodes)))
    verify(compiled(kind, name, sizes, nodes, root, order))


@each_strategy
def test_without_blocks_they_are_balanced(kind: Kind, name: str) -> None:
    for nodes in (1, 2, 3, 7, 8):
        for numel in (0, 1, nodes, 5 * nodes + 3):
            root = nodes // 2 if kind.has_root else -1
            plain = compile_schedule(kind, name, nodes=nodes, numel=numel, root=root)
            assert plain.blocks == balanced_slices(numel, block_count(kind, nodes))
            verify(plain)


@each_strategy
def test_every_strategy_stays_right_when_its_slices_are_cut_into_chunks(
    kind: Kind, name: str
) -> None:
    for nodes in (2, 3, 5, 8, 13):
        for sizes in (SIZES["unequal"], SIZES["some empty"]):
            root = 1 if kind.has_root else -1
            whole = compiled(kind, name, sizes(block_count(kind, nodes)), nodes, root)
            for chunks in (2, 5):
                verify(chunked(whole, chunks))


@each_strategy
def test_a_program_is_the_schedules_part_of_its_node(kind: Kind, name: str) -> None:
    """For an all-to-all, even if the node does not know the blocks of other pairs."""
    nodes, order = 6, (3, 1, 0, 5, 4, 2)
    root = 4 if kind.has_root else -1
    blocks = blocks_of(SIZES["some empty"](block_count(kind, nodes)))
    whole = compiled(kind, name, [len(block) for block in blocks], nodes, root, order)
    for node in range(nodes):
        known = [
            Slice(0, 0) if kind is Kind.ALL_TO_ALL and node not in divmod(number, nodes) else block
            for number, block in enumerate(blocks)
        ]
        program = compile_program(
            kind,
            name,
            nodes=nodes,
            numel=whole.numel,
            node=node,
            root=root,
            tree_order=order,
            blocks=known,
        )
        assert program == whole.programs[node]


@each_strategy
def test_no_slice_is_empty_and_none_leaves_the_tensor(kind: Kind, name: str) -> None:
    for nodes in range(2, 12):
        for sizes in SIZES.values():
            root = nodes - 1 if kind.has_root else -1
            schedule = compiled(kind, name, sizes(block_count(kind, nodes)), nodes, root)
            for program in schedule.programs:
                for step in program:
                    if isinstance(step, Send | Receive | Fold):
                        assert len(step.slice) > 0
                        assert step.slice.stop <= schedule.numel


@each_strategy
def test_where_all_blocks_are_empty_there_are_only_signals(kind: Kind, name: str) -> None:
    for nodes in (2, 3, 8):
        root = 0 if kind.has_root else -1
        schedule = compiled(kind, name, [0] * block_count(kind, nodes), nodes, root)
        steps = [step for program in schedule.programs for step in program]
        assert steps
        assert not any(isinstance(step, Send | Receive | Fold) for step in steps)


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize("name", ["ring", "halving_doubling"])
def test_where_a_block_is_empty_the_mesh_takes_over(kind: Kind, name: str) -> None:
    def programs(strategy: str, sizes: Sequence[int]) -> tuple[Program, ...]:
        return compiled(kind, strategy, sizes, 5).programs

    for hole in range(5):
        sizes = [0 if block == hole else 4 for block in range(5)]
        assert programs(name, sizes) == programs("direct", sizes)
    assert programs(name, [4] * 5) != programs("direct", [4] * 5)


def test_the_mesh_folds_in_node_order_wherever_it_folds() -> None:
    """A direct reduce-scatter has the bits of a direct all-reduce."""
    for sizes in ([3] * 7, SIZES["some empty"](7)):
        schedule = compiled(Kind.REDUCE_SCATTER, "direct", sizes, 7)
        for block, program in zip(schedule.blocks, schedule.programs, strict=True):
            folds = [step for step in program if isinstance(step, Fold)]
            assert folds == ([Fold(block, tuple(range(7)))] if block else [])


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL])
def test_in_each_step_of_a_mesh_no_two_nodes_send_to_the_same_one(kind: Kind) -> None:
    nodes = 9
    schedule = compiled(kind, "direct", [2] * block_count(kind, nodes), nodes)
    targets = [[step.to for step in one if isinstance(step, Send)] for one in schedule.programs]
    for step in zip(*targets, strict=True):
        assert sorted(step) == list(range(nodes))


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_TO_ALL])
def test_a_mesh_takes_messages_in_the_order_in_which_they_are_sent(kind: Kind) -> None:
    nodes = 9
    programs = compiled(kind, "direct", [2] * block_count(kind, nodes), nodes).programs
    targets = [[step.to for step in one if isinstance(step, Send)] for one in programs]
    for me, program in enumerate(programs):
        sources = [step.source for step in program if isinstance(step, Receive)]
        assert [targets[source][turn] for turn, source in enumerate(sources)] == [me] * (nodes - 1)


def test_nobody_ends_an_all_to_all_before_everybody_has_received() -> None:
    """Two nodes may disagree on a size that no other one knows of."""
    sizes = [0 if block % 4 == 2 else 1 for block in range(36)]
    for program in compiled(Kind.ALL_TO_ALL, "direct", sizes, 6).programs:
        steps = [type(step) for step in program]
        assert steps[-10:] == [Signal] * 5 + [Await] * 5
        assert set(steps[:-10]) == {Send, Receive}


@given(nodes=st.integers(1, 60), arity=st.integers(1, 9))
def test_a_subtree_is_a_position_and_the_subtrees_of_its_children(nodes: int, arity: int) -> None:
    for position in range(nodes):
        children = place_in_heap(nodes, arity, position).children
        below = [each for child in children for each in subtree(nodes, arity, child)]
        assert sorted(subtree(nodes, arity, position)) == sorted([position, *below])
    assert sorted(subtree(nodes, arity, 0)) == list(range(nodes))


def test_each_kind_says_whose_content_ends_where() -> None:
    """Of two nodes: for each block, whose content it is and which nodes get it."""
    expected = {
        Kind.ALL_GATHER: [(0, {0, 1}), (1, {0, 1})],
        Kind.REDUCE_SCATTER: [(-1, {0}), (-1, {1})],
        Kind.GATHER: [(0, {1}), (1, {1})],
        Kind.SCATTER: [(1, {0}), (1, {1})],
        Kind.ALL_TO_ALL: [(0, {0}), (0, {1}), (1, {0}), (1, {1})],
    }
    for kind, blocks in expected.items():
        root = 1 if kind.has_root else -1
        schedule = compiled(kind, strategies_for(kind)[0], [1] * len(blocks), 2, root)
        for number, (origin, getters) in enumerate(blocks):
            assert schedule.origin(number) == origin, kind
            found = {node for node in range(2) if schedule.has_result(node, number)}
            assert found == getters, kind


@pytest.mark.parametrize("kind", BLOCKED)
def test_blocks_in_another_number_than_the_nodes_need_are_refused(kind: Kind) -> None:
    count = block_count(kind, 3)
    root = 0 if kind.has_root else -1
    for wrong in (0, count - 1, count + 1):
        with pytest.raises(InvalidArgument, match=rf"3 nodes has {count} blocks, not {wrong}"):
            compile_program(
                kind,
                strategies_for(kind)[0],
                nodes=3,
                numel=wrong,
                node=0,
                root=root,
                blocks=blocks_of([1] * wrong),
            )


def test_kinds_without_blocks_have_none_whatever_is_given() -> None:
    blocks = blocks_of([1, 2, 3])
    given_some = compile_schedule(Kind.ALL_REDUCE, "ring", nodes=3, numel=6, blocks=blocks)
    assert given_some == compile_schedule(Kind.ALL_REDUCE, "ring", nodes=3, numel=6)
    assert given_some.blocks == ()


@each_strategy
def test_blocks_may_lie_in_any_order_and_apart(kind: Kind, name: str) -> None:
    """Those of an all-to-all do lie apart, because no node knows the sizes of all."""
    random = Random(5)
    for nodes in (2, 3, 5, 8):
        count, root = block_count(kind, nodes), nodes - 1 if kind.has_root else -1
        places = blocks_of([2] * (3 * count))
        blocks = random.sample(places, count)
        numel = places[-1].stop
        verify(compile_schedule(kind, name, nodes=nodes, numel=numel, root=root, blocks=blocks))
