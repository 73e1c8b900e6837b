"""The cost of ops of blocks: the formulas against the simulated clock."""

from __future__ import annotations

from math import isfinite, log2

import pytest

from allfold_core.operations import Kind
from allfold_core.pricing.predict import closed_form
from allfold_core.pricing.price import price
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.topology import LinkModel
from tests.core.cases import BLOCKED, labels_of, pairs_of

LINKS = LinkModel()
ALPHA, OVERHEAD = LINKS.latency, LINKS.overhead
BETA, GAMMA = LINKS.seconds_per_byte, LINKS.fold_seconds_per_byte
EXACT = 1e-9
ALL = pairs_of(BLOCKED, 3, 8)
each_strategy = pytest.mark.parametrize(("kind", "name"), ALL, ids=labels_of(ALL))
BLOCK_BYTES = [4, 4000, 1_000_000]
NODES = [2, 3, 4, 7, 8, 16, 31]


def priced(kind: Kind, name: str, nodes: int, block: int) -> float:
    """The simulated time of equal blocks of ``block`` bytes; an all-to-all has one per pair."""
    numel = block // 4 * (nodes * nodes if kind is Kind.ALL_TO_ALL else nodes)
    root = 0 if kind.has_root else -1
    return price(compile_schedule(kind, name, nodes=nodes, numel=numel, root=root), LINKS)


def assert_exact(kind: Kind, name: str, nodes: int, block: int, seconds: float) -> None:
    """The simulation, the formula and the textbook say the same."""
    assert priced(kind, name, nodes, block) == pytest.approx(seconds, rel=EXACT)
    formula = closed_form(kind, name, nodes, block * nodes, LINKS)
    assert formula == pytest.approx(seconds, rel=EXACT)


@pytest.mark.parametrize("block", BLOCK_BYTES)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL])
def test_the_mesh_and_the_ring_are_exact(kind: Kind, nodes: int, block: int) -> None:
    moved = (nodes - 1) * block * (BETA + GAMMA if kind.reduces else BETA)
    burst = ALPHA + (nodes - 2) * OVERHEAD
    if kind is Kind.ALL_TO_ALL:
        assert_exact(kind, "direct", nodes, block, 2 * burst + moved)
    else:
        assert_exact(kind, "direct", nodes, block, burst + moved)
        assert_exact(kind, "ring", nodes, block, (nodes - 1) * ALPHA + moved)


@pytest.mark.parametrize("block", BLOCK_BYTES)
@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_halving_or_doubling_is_exact_at_powers_of_two(kind: Kind, nodes: int, block: int) -> None:
    moved = (nodes - 1) * block * (BETA + GAMMA if kind.reduces else BETA)
    assert_exact(kind, "halving_doubling", nodes, block, log2(nodes) * ALPHA + moved)


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_halving_or_doubling_is_near_the_formula_elsewhere(kind: Kind) -> None:
    for nodes in (3, 5, 6, 7, 9, 12, 13, 24, 31):
        for block in BLOCK_BYTES:
            formula = closed_form(kind, "halving_doubling", nodes, block * nodes, LINKS)
            ratio = priced(kind, "halving_doubling", nodes, block) / formula
            assert 0.75 < ratio < 1.5, (nodes, block)


@pytest.mark.parametrize("block", BLOCK_BYTES)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER])
def test_stars_and_chains_are_exact(kind: Kind, nodes: int, block: int) -> None:
    """One wave of signals, and one of blocks, all of which pass the port of the root."""
    moved = (nodes - 1) * block * BETA
    burst = ALPHA + (nodes - 2) * OVERHEAD
    assert_exact(kind, "centralized", nodes, block, 2 * burst + moved)
    along = (nodes - 1) * ALPHA
    if kind is Kind.GATHER:
        assert_exact(kind, "chain", nodes, block, 2 * along + moved)
    else:  # The last block that leaves the root is the one for the far end.
        last = (nodes - 2) * (ALPHA + block * BETA)
        assert_exact(kind, "chain", nodes, block, along + burst + moved + last)


@pytest.mark.parametrize("block", BLOCK_BYTES)
@pytest.mark.parametrize(("arity", "depth"), [(2, 1), (2, 2), (2, 4), (3, 2), (3, 3), (4, 2)])
def test_a_scatter_down_a_full_tree_is_exact(arity: int, depth: int, block: int) -> None:
    nodes = sum(arity**level for level in range(depth + 1))
    up = depth * (ALPHA + (arity - 1) * OVERHEAD)
    root = ALPHA + (nodes - 2) * OVERHEAD + (nodes - 1) * block * BETA
    seconds = up + root + (depth - 1) * (ALPHA + block * BETA)
    assert_exact(Kind.SCATTER, f"tree({arity})", nodes, block, seconds)


@pytest.mark.parametrize("arity", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER])
def test_gathers_and_scatters_in_other_trees_are_near_the_formula(kind: Kind, arity: int) -> None:
    for nodes in range(2, 40):
        for block in (4, 40_000):
            formula = closed_form(kind, f"tree({arity})", nodes, block * nodes, LINKS)
            ratio = priced(kind, f"tree({arity})", nodes, block) / formula
            assert 0.49 < ratio < 1.11, (nodes, block)


@each_strategy
def test_predictions_are_finite_and_more_bytes_never_cost_less(kind: Kind, name: str) -> None:
    sizes = [first * 10**power for power in range(10) for first in (1, 2, 5, 9)]
    for nodes in (*range(1, 65), 10_000):
        times = [closed_form(kind, name, nodes, nbytes, LINKS) for nbytes in sizes]
        assert all(isfinite(time) and (time > 0) == (nodes > 1) for time in times)
        assert times == sorted(times)


@each_strategy
def test_without_bytes_an_op_costs_what_a_barrier_of_its_strategy_does(
    kind: Kind, name: str
) -> None:
    for nodes in (1, 2, 3, 8, 64):
        root = 0 if kind.has_root else -1
        schedule = compile_schedule(kind, name, nodes=nodes, numel=0, root=root)
        barrier = closed_form(Kind.BARRIER, name, nodes, 0, LINKS)
        formula = closed_form(kind, name, nodes, 0, LINKS)
        assert formula == barrier
        assert 0.6 * formula <= price(schedule, LINKS) <= formula * (1 + EXACT)


def test_all_gathers_and_reduce_scatters_are_half_an_all_reduce() -> None:
    for nodes in (2, 8, 64):
        halves = sum(
            closed_form(kind, "ring", nodes, 1 << 20, LINKS)
            for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        )
        whole = closed_form(Kind.ALL_REDUCE, "ring", nodes, 1 << 20, LINKS, chunks=1)
        assert halves == pytest.approx(whole, rel=EXACT)
