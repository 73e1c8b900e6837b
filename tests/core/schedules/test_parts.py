"""Parts: what is brought by whom ends where each collective promises, on any placement of ranks.

Every example runs an op as agents do: each node folds what its ranks bring into its work buffer,
the nodes run their programs, and each hands its ranks what is theirs. The reference is what the
collectives mean, one rank after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_core.dtypes import DType
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.schedules.compiler import compile_program, compile_schedule
from allfold_core.schedules.parts import (
    OWN,
    PAIR_STRIDE,
    End,
    NodeParts,
    Part,
    Placement,
    block_numels,
    check_counts,
    even_exchange,
    exchange_layout,
    input_numel,
    layout,
    output_numel,
    received,
    with_weights,
)
from allfold_core.schedules.schedule import Program, Slice
from allfold_core.schedules.verify import verify
from tests.core.cases import names_for
from tests.core.executor import Row, Worker, execute, fold_rows

# Fills whatever nobody has written: any use of it makes a result wrong.
UNWRITTEN = -(10**15)


@dataclass(frozen=True)
class Case:
    """One op of a group.

    Attributes:
        calls: the fingerprint of each rank; they differ in the counts of an all-to-all alone.
        placement: the ranks of each node.
        strategy: what the nodes run.
        order: the tree order.
        rounded: whether the wire rounds what is broadcast.
    """

    calls: tuple[Fingerprint, ...]
    placement: Placement
    strategy: str
    order: tuple[int, ...]
    rounded: bool

    @property
    def call(self) -> Fingerprint:
        return self.calls[0]

    @property
    def world(self) -> int:
        return len(self.calls)

    @property
    def root_node(self) -> int:
        root = self.call.root
        return next((n for n, ranks in enumerate(self.placement) if root in ranks), -1)

    def layouts(self) -> list[NodeParts]:
        return [self._layout(node) for node in range(len(self.placement))]

    def _layout(self, node: int) -> NodeParts:
        call = self.call
        if call.kind is Kind.ALL_TO_ALL:
            row = call.numel
            local = self.placement[node]
            return exchange_layout(
                sent={rank: [row * n for n in self.calls[rank].sent()] for rank in local},
                received={rank: [row * n for n in self.calls[rank].received()] for rank in local},
                placement=self.placement,
                node=node,
            )
        sizes = block_numels(call, self.world) if call.kind.has_blocks else (call.numel,)
        return layout(call.kind, sizes, call.root, self.placement, node, self.rounded)


def calls_of(
    kind: Kind, shape: tuple[int, ...], root: int, counts: list[tuple[int, ...]]
) -> tuple[Fingerprint, ...]:
    op = ReduceOp.SUM if kind.reduces else None
    return tuple(Fingerprint(kind, op, DType.INT64, shape, root, "auto", counts=c) for c in counts)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """One to seven ranks in any order on one to four nodes, none of which is empty."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 7)))))
    most = min(3, len(ranks) - 1)
    cuts = draw(st.sets(st.integers(1, max(1, len(ranks) - 1)), max_size=most))
    return tuple(tuple(ranks[a:b]) for a, b in pairwise([0, *sorted(cuts), len(ranks)]))


@st.composite
def cases(draw: st.DrawFn, kind: Kind) -> Case:
    placement = draw(placements())
    nodes, world = len(placement), sum(map(len, placement))
    root = draw(st.integers(0, world - 1)) if kind.has_root else -1
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    rows = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    counts: list[tuple[int, ...]] = [()] * world
    if kind is Kind.ALL_TO_ALL:
        matrix = [draw(rows) for _ in range(world)]
        counts = [(*matrix[r], *(row[r] for row in matrix)) for r in range(world)]
    elif kind.has_blocks and draw(st.booleans()):
        counts = [tuple(draw(rows))] * world
    return Case(
        calls_of(kind, shape, root, counts),
        placement,
        draw(st.sampled_from(names_for(kind, 3))),
        tuple(draw(st.permutations(range(nodes)))),
        draw(st.booleans()),
    )


def run(case: Case, inputs: list[Row], random: Random) -> list[Row]:
    """The ranks' outputs after the op."""
    layouts = case.layouts()
    outputs = [
        np.full(output_numel(call, rank, case.world), UNWRITTEN)
        for rank, call in enumerate(case.calls)
    ]
    workers = [worker_of(case, node, placed, inputs) for node, placed in enumerate(layouts)]
    execute(workers, random)
    for placed, worker in zip(layouts, workers, strict=True):
        for part in placed.parts:
            for end in part.targets:
                place = outputs[end.rank][end.offset : end.offset + len(part.slice)]
                assert (place == UNWRITTEN).all(), "an element is written twice"
                place[:] = worker.view(part.slice)
    return outputs


def program_of(case: Case, node: int, placed: NodeParts) -> Program:
    return compile_program(
        case.call.kind,
        case.strategy,
        nodes=len(case.placement),
        numel=placed.numel,
        node=node,
        root=case.root_node,
        tree_order=case.order,
        blocks=placed.blocks,
    )


def worker_of(case: Case, node: int, placed: NodeParts, inputs: list[Row]) -> Worker:
    """A node whose work buffer holds the fold of what its ranks bring."""
    program = program_of(case, node, placed)
    worker = Worker(node, program, np.full(placed.held, UNWRITTEN), placed.place)
    for part in placed.parts:
        if part.sources:
            size = len(part.slice)
            rows = [inputs[end.rank][end.offset : end.offset + size] for end in part.sources]
            worker.view(part.slice)[:] = fold_rows(rows)
    return worker


def reference(case: Case, inputs: list[Row]) -> list[Row]:
    """Return the right result of each rank, from the meaning of the kinds."""
    call, world = case.call, case.world
    nothing = np.empty(0, int)
    match call.kind:
        case Kind.ALL_REDUCE:
            return [fold_rows(inputs)] * world
        case Kind.REDUCE:
            return [fold_rows(inputs) if r == call.root else nothing for r in range(world)]
        case Kind.BROADCAST:
            return [inputs[call.root]] * world
        case Kind.ALL_GATHER:
            return [np.concatenate(inputs)] * world
        case Kind.GATHER:
            return [np.concatenate(inputs) if r == call.root else nothing for r in range(world)]
        case Kind.REDUCE_SCATTER:
            return cut(fold_rows(inputs), sizes_of(call, world))
        case Kind.SCATTER:
            return cut(inputs[call.root], sizes_of(call, world))
    given = [
        cut(row, [call.numel * n for n in c.sent()])
        for row, c in zip(inputs, case.calls, strict=True)
    ]
    return [np.concatenate([blocks[taker] for blocks in given]) for taker in range(world)]


def sizes_of(call: Fingerprint, world: int) -> list[int]:
    row = int(np.prod(call.shape, dtype=int))
    return [row * count for count in call.counts] if call.counts else [row] * world


def cut(row: Row, sizes: list[int]) -> list[Row]:
    assert len(row) == sum(sizes)
    return np.split(row, np.cumsum(sizes)[:-1])


def inputs_of(case: Case, random: Random) -> list[Row]:
    sizes = [input_numel(call, rank, case.world) for rank, call in enumerate(case.calls)]
    return [np.array([random.randrange(10**6) for _ in range(size)], int) for size in sizes]


MOVING = [kind for kind in Kind if kind is not Kind.BARRIER]


@pytest.mark.parametrize("kind", MOVING)
@given(data=st.data(), seed=st.integers(0, 1 << 32))
def test_every_rank_gets_what_the_collective_promises(
    kind: Kind, data: st.DataObject, seed: int
) -> None:
    case, random = data.draw(cases(kind)), Random(seed)
    inputs = inputs_of(case, random)
    outputs, expected = run(case, inputs, random), reference(case, inputs)
    if kind is Kind.BROADCAST and not case.rounded:
        assert (outputs[case.call.root] == UNWRITTEN).all(), "the root has it already"
        outputs[case.call.root] = inputs[case.call.root]
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", MOVING)
@settings(max_examples=40)
@given(data=st.data())
def test_the_nodes_together_run_one_proved_schedule(kind: Kind, data: st.DataObject) -> None:
    """Although of an all-to-all no node knows all blocks."""
    case = data.draw(cases(kind))
    layouts = case.layouts()
    blocks = layouts[0].blocks
    if kind is Kind.ALL_TO_ALL:
        views = zip(*[placed.blocks or () for placed in layouts], strict=True)
        blocks = tuple(max(view, key=len) for view in views)
    whole = compile_schedule(
        kind,
        case.strategy,
        nodes=len(layouts),
        numel=layouts[0].numel,
        root=case.root_node,
        tree_order=case.order,
        blocks=blocks,
    )
    programs = [program_of(case, node, placed) for node, placed in enumerate(layouts)]
    assert tuple(programs) == whole.programs
    verify(whole)


@pytest.mark.parametrize("kind", MOVING)
@settings(max_examples=40)
@given(data=st.data())
def test_parts_lie_in_order_without_overlap_and_inside_the_work_buffer(
    kind: Kind, data: st.DataObject
) -> None:
    case = data.draw(cases(kind))
    for placed in case.layouts():
        slices = [part.slice for part in placed.parts]
        assert all(slices), "a part is empty"
        assert all(one.stop <= two.start for one, two in pairwise(slices))
        places = [(placed.place(one.start), len(one)) for one in slices]
        assert all(start + size <= other for (start, size), (other, _) in pairwise(places))
        assert not places or sum(places[-1]) <= placed.held <= placed.numel
        if kind is Kind.ALL_TO_ALL:
            assert sum(size for _, size in places) == placed.held, "the buffer has a hole"
        assert all(part.sources or part.targets for part in placed.parts)
        assert list(placed.results) == [part.slice for part in placed.parts if part.targets]


@pytest.mark.parametrize("kind", MOVING)
@settings(max_examples=40)
@given(data=st.data())
def test_a_nodes_block_is_one_slice_that_its_ranks_blocks_fill(
    kind: Kind, data: st.DataObject
) -> None:
    case = data.draw(cases(kind))
    for node, placed in enumerate(case.layouts()):
        if not kind.has_blocks:
            assert placed.blocks is None
        elif kind is not Kind.ALL_TO_ALL:
            sizes = block_numels(case.call, case.world)
            assert placed.blocks is not None
            lengths = [sum(sizes[rank] for rank in ranks) for ranks in case.placement]
            assert [len(block) for block in placed.blocks] == lengths
            assert all(one.stop == two.start for one, two in pairwise(placed.blocks))
            assert placed.blocks[-1].stop == placed.numel == placed.held == sum(sizes)
        else:
            nodes = len(case.placement)
            for number, block in enumerate(placed.blocks or ()):
                source, destination = divmod(number, nodes)
                assert not block or (node in (source, destination) and source != destination)
                assert not block or block.start == number * PAIR_STRIDE


@pytest.mark.parametrize("kind", MOVING)
@settings(max_examples=40)
@given(data=st.data())
def test_the_parts_in_a_range_are_those_that_overlap_it(kind: Kind, data: st.DataObject) -> None:
    for placed in data.draw(cases(kind)).layouts():
        bounds = {0, placed.numel}
        for part in placed.parts:
            bounds.update((part.slice.start, part.slice.start + 1, part.slice.stop))
        choice = st.sampled_from(sorted(bounds))
        start, stop = sorted((data.draw(choice), data.draw(choice)))
        expected = [
            (part, max(start, part.slice.start), min(stop, part.slice.stop))
            for part in placed.parts
            if max(start, part.slice.start) < min(stop, part.slice.stop)
        ]
        assert list(placed.parts_in(start, stop)) == expected


def test_ranks_of_one_node_lie_next_to_each_other_whatever_their_numbers() -> None:
    placed = layout(Kind.ALL_GATHER, (2, 3, 4), -1, ((2, 0), (1,)), 0)
    assert placed.blocks == (Slice(0, 6), Slice(6, 9))
    assert placed.parts == (
        Part(Slice(0, 4), (End(2, 0),), (End(2, 5), End(0, 5))),
        Part(Slice(4, 6), (End(0, 0),), (End(2, 0), End(0, 0))),
        Part(Slice(6, 9), (), (End(2, 2), End(0, 2))),
    )


def test_a_node_holds_only_the_blocks_of_an_all_to_all_that_concern_it() -> None:
    """Rank r sends r + 1 elements to each of three ranks, each on a node of its own."""
    placed = exchange_layout(
        sent={1: [2, 2, 2]}, received={1: [1, 2, 3]}, placement=((0,), (1,), (2,)), node=1
    )
    own = Part(Slice(4 * PAIR_STRIDE, 4 * PAIR_STRIDE + 2), (End(1, 2),), (End(1, 1),))
    assert own in placed.parts
    assert placed.held == 1 + 2 + 2 + 2 + 3
    assert [placed.place(number * PAIR_STRIDE) for number in (1, 3, 4, 5, 7)] == [0, 1, 3, 5, 7]
    assert placed.blocks is not None
    assert [len(block) for block in placed.blocks] == [0, 1, 0, 2, 0, 2, 0, 3, 0]


def test_what_a_node_gets_in_an_even_exchange_lies_in_the_order_of_the_nodes() -> None:
    call = Fingerprint(Kind.ALL_TO_ALL, None, DType.INT32, (2,), -1, "auto", counts=(3,) * 6)
    placed = even_exchange(call, ((0, 2), (1,)), 1)
    assert placed.held == 3 * (2 * 2 + 1) * 2
    row = received(placed, 2, 1)
    assert row.parts is placed.parts
    assert row.held == 3 * 3 * 2
    assert [row.place(number * PAIR_STRIDE) for number in (1, 3)] == [0, 12]
    assert row.place(PAIR_STRIDE + 7) == 7


def test_of_any_other_kind_a_node_gets_the_index_space() -> None:
    placed = layout(Kind.ALL_GATHER, (2, 3), -1, ((0,), (1,)), 0)
    assert received(placed, 2, 0) is placed


def test_only_a_wire_that_rounds_gives_the_root_its_own_broadcast() -> None:
    for rounded, targets in ((False, {1}), (True, {0, 1})):
        (part,) = layout(Kind.BROADCAST, (5,), 0, ((0, 1), (2,)), 0, rounded).parts
        assert {end.rank for end in part.targets} == targets
        assert part.sources == (End(0, 0),)
        (part,) = layout(Kind.BROADCAST, (5,), 0, ((0, 1), (2,)), 1, rounded).parts
        assert part == Part(Slice(0, 5), (), (End(2, 0),))


def test_inputs_and_outputs_have_the_sizes_of_their_blocks() -> None:
    """Three ranks, the root is rank 1, rows of two elements: 1, 0 and 4 of them."""
    counts = (1, 0, 4)
    expected = {
        Kind.ALL_REDUCE: ([2, 2, 2], [2, 2, 2]),
        Kind.REDUCE: ([2, 2, 2], [0, 2, 0]),
        Kind.BROADCAST: ([0, 2, 0], [2, 2, 2]),
        Kind.ALL_GATHER: ([2, 0, 8], [10, 10, 10]),
        Kind.REDUCE_SCATTER: ([10, 10, 10], [2, 0, 8]),
        Kind.GATHER: ([2, 0, 8], [0, 10, 0]),
        Kind.SCATTER: ([0, 10, 0], [2, 0, 8]),
    }
    for kind, (brought, got) in expected.items():
        root = 1 if kind.has_root else -1
        (call,) = calls_of(kind, (2,), root, [counts if kind.has_blocks else ()])
        assert [input_numel(call, rank, 3) for rank in range(3)] == brought, kind
        assert [output_numel(call, rank, 3) for rank in range(3)] == got, kind
    (call,) = calls_of(Kind.ALL_TO_ALL, (2,), -1, [(1, 0, 4, 3, 3, 3)])
    assert (input_numel(call, 0, 3), output_numel(call, 0, 3)) == (10, 18)


def test_without_counts_all_blocks_have_the_shape() -> None:
    (call,) = calls_of(Kind.ALL_GATHER, (2, 3), -1, [()])
    assert block_numels(call, 4) == (6, 6, 6, 6)
    (scalar,) = calls_of(Kind.ALL_GATHER, (), -1, [()])
    assert block_numels(scalar, 2) == (1, 1)


def test_a_barrier_has_no_parts() -> None:
    placed = layout(Kind.BARRIER, (0,), -1, ((0,), (1,)), 0)
    assert (placed.parts, placed.blocks, placed.held) == ((), None, 0)


@pytest.mark.parametrize("kind", Kind)
def test_counts_must_fit_the_group(kind: Kind) -> None:
    """One per rank; for an all-to-all two; none for kinds without blocks."""
    fitting = {Kind.ALL_TO_ALL: {6}}.get(kind, {0, 3} if kind.has_blocks else {0})
    for given_counts in range(8):
        (call,) = calls_of(kind, (2,), -1, [(1,) * given_counts])
        if given_counts in fitting:
            check_counts(call, 3)
        else:
            match = f"{kind.label} of 3 ranks with {given_counts} counts"
            with pytest.raises(InvalidArgument, match=match):
                check_counts(call, 3)


def test_the_weights_of_a_round_lie_behind_its_elements_and_no_rank_brings_or_gets_them() -> None:
    whole = layout(Kind.ALL_REDUCE, (10,), -1, ((0, 1), (2,)), 0)
    placed = with_weights(whole, 3)
    assert placed.weights == Slice(10, 16)
    assert (placed.numel, placed.held) == (16, 16)
    assert placed.parts == (*whole.parts, Part(Slice(10, 16), (End(OWN, 0),), ()))
    assert [*placed.results] == [Slice(0, 10)]
