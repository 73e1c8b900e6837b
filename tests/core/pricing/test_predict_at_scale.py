"""Predictions for thousands of nodes: sane where no schedule is run, exact where one can be."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, log2

import pytest

from allfold_core.operations import Kind
from allfold_core.pricing.predict import closed_form
from allfold_core.pricing.price import price
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.registry import candidates
from allfold_core.topology import LinkModel

LINKS = LinkModel()
STRATEGIES = candidates(Kind.ALL_REDUCE)
MANY_NODES = [1_000, 4_096, 10_000]
SIZES = [4 << shift for shift in range(0, 29, 2)]
EXACT = 1e-9


def predicted(strategy: str, nodes: int, nbytes: int, chunks: int | None = None) -> float:
    return closed_form(Kind.ALL_REDUCE, strategy, nodes, nbytes, LINKS, chunks)


@pytest.mark.parametrize("nodes", MANY_NODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_beats_the_lower_bounds(strategy: str, nodes: int) -> None:
    """One latency, and each byte out of and into every node once in each half of the op."""
    for nbytes in SIZES:
        seconds = predicted(strategy, nodes, nbytes)
        assert isfinite(seconds)
        assert seconds >= LINKS.latency
        assert seconds >= 2 * (nodes - 1) / nodes * nbytes * LINKS.seconds_per_byte * (1 - EXACT)


@pytest.mark.parametrize("nodes", MANY_NODES)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "direct"])
def test_more_bytes_take_longer(strategy: str, nodes: int) -> None:
    # A ring is a tree below an element per node, so its times begin where it does.
    sizes = [size for size in SIZES if strategy != "ring" or size >= nodes]
    times = [predicted(strategy, nodes, size) for size in sizes]
    assert all(less < more * (1 + EXACT) for less, more in pairwise(times))


@pytest.mark.parametrize("nodes", MANY_NODES)
def test_what_passes_one_hub_or_one_line_is_far_from_the_best_below_64_mib(nodes: int) -> None:
    for nbytes in [size for size in SIZES if size < 1 << 26]:
        best = min(predicted(strategy, nodes, nbytes) for strategy in STRATEGIES)
        for strategy in ("centralized", "chain", "direct"):
            assert predicted(strategy, nodes, nbytes) > 5 * best


def test_small_tensors_need_some_latencies_only_even_with_ten_thousand_nodes() -> None:
    steps = 2 * log2(10_000)
    best = min(predicted(strategy, 10_000, 4096) for strategy in STRATEGIES)
    assert best < steps * (LINKS.latency + LINKS.overhead)


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        ("halving_doubling", 256),
        ("tree(2)", 255),
        ("tree(8)", 585),
        ("chain", 300),
        ("centralized", 300),
        ("direct2", 48),
        ("ring", 48),
    ],
)
@pytest.mark.parametrize("elements", [8, 20_000])
def test_the_simulation_confirms_the_formula_for_many_nodes(
    strategy: str, nodes: int, elements: int
) -> None:
    numel = nodes * elements
    schedule = compile_schedule(Kind.ALL_REDUCE, strategy, nodes=nodes, numel=numel)
    formula = predicted(strategy, nodes, 4 * numel, chunks=1)
    assert price(schedule, LINKS) == pytest.approx(formula, rel=EXACT)
