"""The simulated price of a schedule is that of the textbook."""

from __future__ import annotations

from math import log2

import pytest

from allfold_core.operations import Kind
from allfold_core.pricing.predict import closed_form
from allfold_core.pricing.price import chunked, price
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import strategies_for
from allfold_core.schedules.schedule import SMALLEST_CHUNK, Fold, Send, Slice
from allfold_core.topology import LinkModel
from tests.core.cases import bytes_sent

LINKS = LinkModel()
ALPHA, OVERHEAD = LINKS.latency, LINKS.overhead
BETA, GAMMA = LINKS.seconds_per_byte, LINKS.fold_seconds_per_byte
EXACT = 1e-9


def priced(kind: Kind, name: str, nodes: int, nbytes: int, chunks: int = 1) -> float:
    root = 0 if kind.has_root else -1
    schedule = compile_schedule(kind, name, nodes=nodes, numel=nbytes // 4, root=root)
    return price(schedule, LINKS, itemsize=4, chunks=chunks)


def all_reduce(name: str, nodes: int, nbytes: int) -> float:
    """The unpipelined time, simulated; the closed form must say the same."""
    simulated = priced(Kind.ALL_REDUCE, name, nodes, nbytes)
    formula = closed_form(Kind.ALL_REDUCE, name, nodes, nbytes, LINKS, chunks=1)
    assert simulated == pytest.approx(formula, rel=EXACT)
    return simulated


SIZES = [1, 1000, 250_000]
NODES = [2, 3, 4, 7, 8, 16, 31]


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("nodes", NODES)
def test_the_flat_rows_of_the_cost_model_are_exact(nodes: int, elements: int) -> None:
    m = 4 * nodes * elements
    part = (nodes - 1) / nodes * m
    burst = ALPHA + (nodes - 2) * OVERHEAD
    whole = (nodes - 1) * m
    expected = {
        "centralized": 2 * burst + 2 * whole * BETA + whole * GAMMA,
        "direct": burst + whole * BETA + whole * GAMMA,
        "direct2": 2 * burst + 2 * part * BETA + part * GAMMA,
        "ring": 2 * (nodes - 1) * ALPHA + 2 * part * BETA + part * GAMMA,
        "chain": 2 * (nodes - 1) * (ALPHA + m * BETA) + (nodes - 1) * m * GAMMA,
    }
    for name, seconds in expected.items():
        assert all_reduce(name, nodes, m) == pytest.approx(seconds, rel=EXACT), name


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
def test_halving_and_doubling_is_exact_at_powers_of_two(nodes: int, elements: int) -> None:
    m = 4 * nodes * elements
    part = (nodes - 1) / nodes * m
    seconds = 2 * log2(nodes) * ALPHA + 2 * part * BETA + part * GAMMA
    assert all_reduce("halving_doubling", nodes, m) == pytest.approx(seconds, rel=EXACT)


@pytest.mark.parametrize("nodes", [3, 5, 6, 7, 9, 12, 24, 31])
def test_halving_and_doubling_costs_little_more_than_the_formula_elsewhere(nodes: int) -> None:
    """The first half comes while the extra node's contribution does, and shares the port."""
    m = 4 * 100_000 * nodes
    formula = closed_form(Kind.ALL_REDUCE, "halving_doubling", nodes, m, LINKS, chunks=1)
    assert 1 <= priced(Kind.ALL_REDUCE, "halving_doubling", nodes, m) / formula < 1.15


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize(
    ("arity", "depth"), [(1, 1), (1, 6), (2, 1), (2, 2), (2, 4), (3, 2), (3, 3), (4, 2), (8, 1)]
)
def test_full_trees_are_exact(arity: int, depth: int, elements: int) -> None:
    nodes = sum(arity**level for level in range(depth + 1))
    m = 4 * elements
    step = ALPHA + (arity - 1) * OVERHEAD + arity * m * BETA
    seconds = 2 * depth * step + depth * arity * m * GAMMA
    assert all_reduce(f"tree({arity})", nodes, m) == pytest.approx(seconds, rel=EXACT)


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST, Kind.BARRIER])
@pytest.mark.parametrize("arity", [2, 3, 4])
def test_other_trees_cost_at_most_the_formula(kind: Kind, arity: int) -> None:
    for nodes in range(2, 40):
        for m in (400, 4_000_000):
            formula = closed_form(kind, f"tree({arity})", nodes, m, LINKS, chunks=1)
            ratio = priced(kind, f"tree({arity})", nodes, m) / formula
            assert 0.49 < ratio < 1 + EXACT, nodes


@pytest.mark.parametrize("nodes", NODES)
def test_a_rooted_kind_pays_one_wave_with_data_and_one_with_signals(nodes: int) -> None:
    m = 4_000_000
    burst = ALPHA + (nodes - 2) * OVERHEAD
    moved = (nodes - 1) * m * BETA
    star = 2 * burst + moved
    assert priced(Kind.BROADCAST, "centralized", nodes, m) == pytest.approx(star, rel=EXACT)
    star += (nodes - 1) * m * GAMMA
    assert priced(Kind.REDUCE, "centralized", nodes, m) == pytest.approx(star, rel=EXACT)
    for kind in (Kind.BROADCAST, Kind.REDUCE):
        formula = closed_form(kind, "centralized", nodes, m, LINKS, chunks=1)
        assert priced(kind, "centralized", nodes, m) == pytest.approx(formula, rel=EXACT)


@pytest.mark.parametrize("name", strategies_for(Kind.BARRIER))
def test_barriers_cost_latencies_only(name: str) -> None:
    for nodes in (2, 3, 7, 8, 15, 31):
        formula = closed_form(Kind.BARRIER, name, nodes, 0, LINKS)
        simulated = priced(Kind.BARRIER, name, nodes, 0)
        assert 0.75 * formula < simulated < formula * (1 + EXACT)
    assert priced(Kind.BARRIER, "direct", 9, 0) == pytest.approx(ALPHA + 7 * OVERHEAD)


# How far the simulation of chunks may be from the closed form, below and above: the formula is
# the bound that the busiest port sets, and pipelines have start-up and unused gaps.
PIPELINED = {
    "direct": (1 - EXACT, 1 + EXACT),
    "direct2": (0.99, 1.08),
    "ring": (0.99, 1.17),
    "double_tree": (0.72, 1 + EXACT),
    "chain": (0.80, 1 + EXACT),
    "centralized": (0.99, 1.01),
    "tree(2)": (0.63, 1.03),
    "tree(4)": (0.75, 1.08),
    "halving_doubling": (0.57, 1.10),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", PIPELINED)
@pytest.mark.parametrize("chunks", [4, 16])
@pytest.mark.parametrize("chunk_bytes", [SMALLEST_CHUNK, 16 * SMALLEST_CHUNK])
def test_pipelined_prices_stay_within_bounds_of_the_formula(
    name: str, chunks: int, chunk_bytes: int
) -> None:
    low, high = PIPELINED[name]
    for nodes in (2, 3, 5, 8, 16):
        slices = {"direct2": nodes, "ring": nodes, "halving_doubling": 2, "double_tree": 2}
        m = slices.get(name, 1) * chunks * chunk_bytes
        formula = closed_form(Kind.ALL_REDUCE, name, nodes, m, LINKS, chunks)
        assert low < priced(Kind.ALL_REDUCE, name, nodes, m, chunks) / formula < high, nodes


@pytest.mark.parametrize("nodes", [8, 16, 32])
def test_the_double_tree_tends_to_twice_the_bytes_and_the_binary_tree_to_three_times(
    nodes: int,
) -> None:
    m = 64 << 20
    double = priced(Kind.ALL_REDUCE, "double_tree", nodes, m, chunks=64)
    assert 2 * m * BETA < double < 2.45 * m * BETA
    single = priced(Kind.ALL_REDUCE, "tree(2)", nodes, m, chunks=64)
    assert 3 * m * BETA < single < 3.35 * m * BETA


def test_chunks_hide_the_folds_of_a_ring_and_the_return_of_a_star() -> None:
    m = 64 << 20
    for name in ("ring", "centralized", "chain", "double_tree", "tree(2)"):
        cut = priced(Kind.ALL_REDUCE, name, 8, m, chunks=16)
        assert cut < 0.95 * priced(Kind.ALL_REDUCE, name, 8, m)


def test_the_star_loses_to_the_ring_by_the_number_of_nodes() -> None:
    m = 64 << 20
    for nodes in (4, 8, 16):
        ring = closed_form(Kind.ALL_REDUCE, "ring", nodes, m, LINKS, chunks=1)
        star = closed_form(Kind.ALL_REDUCE, "centralized", nodes, m, LINKS, chunks=1)
        assert star / ring == pytest.approx(nodes, rel=0.1)


def test_one_node_costs_nothing() -> None:
    for kind in Kind:
        for name in strategies_for(kind):
            assert priced(kind, name, 1, 400) == 0
            assert closed_form(kind, name, 1, 400, LINKS) == 0


def test_no_bytes_cost_what_a_barrier_does() -> None:
    for name in strategies_for(Kind.ALL_REDUCE):
        empty = closed_form(Kind.ALL_REDUCE, name, 9, 0, LINKS)
        assert empty == closed_form(Kind.BARRIER, name, 9, 0, LINKS)


def test_a_ring_with_less_than_a_byte_per_node_costs_what_its_tree_does() -> None:
    tree = closed_form(Kind.ALL_REDUCE, "tree(2)", 100, 40, LINKS)
    assert closed_form(Kind.ALL_REDUCE, "ring", 100, 40, LINKS) == tree


@pytest.mark.parametrize("name", strategies_for(Kind.ALL_REDUCE))
def test_more_bytes_never_cost_less(name: str) -> None:
    for nodes in (2, 5, 64, 10_000):
        times = [
            closed_form(Kind.ALL_REDUCE, name, nodes, 1 << power, LINKS) for power in range(13, 35)
        ]
        assert times == sorted(times)


def test_ten_thousand_nodes_have_a_price() -> None:
    ring = closed_form(Kind.ALL_REDUCE, "ring", 10_000, 1 << 30, LINKS, chunks=1)
    assert ring == pytest.approx(2 * 9999 * ALPHA + 0.9999 * (1 << 30) * (2 * BETA + GAMMA))
    tree = closed_form(Kind.ALL_REDUCE, "double_tree", 10_000, 1 << 20, LINKS)
    assert tree < ring / 100


def test_only_sends_count_as_bytes() -> None:
    program = (Send(Slice(0, 3), 1), Fold(Slice(0, 9), (0, 1)), Send(Slice(2, 9), 1))
    assert bytes_sent(program, itemsize=2) == 20


def test_chunks_cover_their_slices_and_are_never_empty() -> None:
    original = compile_schedule(Kind.ALL_REDUCE, "direct2", nodes=3, numel=7)
    assert chunked(original, 1) == original
    pieces = chunked(original, 2)
    assert pieces.programs[1][:2] == (Send(Slice(5, 6), 2), Send(Slice(6, 7), 2))
    assert chunked(original, 100) == chunked(original, 3)
    sent = [sum(map(bytes_sent, schedule.programs)) for schedule in (original, pieces)]
    assert sent[0] == sent[1]
