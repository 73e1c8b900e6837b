"""Weights come through an exchange in float32 with 48 bits, and their sum has a fixed order."""

from __future__ import annotations

from math import fsum

import numpy as np
import pytest

from allfold_agent.arithmetic.weights import Weights
from allfold_core.operations import GREATEST_WEIGHT, LEAST_WEIGHT
from allfold_core.schedules.parts import End

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
SPREAD = [0.0, 1.0, 1 / 3, 2.0**48 - 1, 12_345_678_901_234.0, LEAST_WEIGHT, GREATEST_WEIGHT]


def exchanged(weights: list[float], nodes: int, dtype: np.dtype[np.generic]) -> Weights:
    """Weights of ranks that are dealt out to nodes, after the nodes' sums."""
    of_nodes = [
        Weights({rank: w for rank, w in enumerate(weights) if rank % nodes == node}, len(weights))
        for node in range(nodes)
    ]
    total = np.sum([each.elements(dtype) for each in of_nodes], 0, dtype)
    for each in of_nodes:
        each.learn(total)
    assert all(each.of_ranks == of_nodes[0].of_ranks for each in of_nodes)
    assert all(each.total == of_nodes[0].total for each in of_nodes)
    return of_nodes[0]


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_whole_weights_of_48_bits_are_exact_and_others_have_as_many_digits(nodes: int) -> None:
    got = exchanged(SPREAD, nodes, FLOAT32).of_ranks
    assert got == pytest.approx(SPREAD, rel=2**-48, abs=0)
    whole = [each for each in SPREAD if each == int(each) < 2**48]
    assert set(whole) <= set(got)
    assert exchanged(SPREAD, nodes, FLOAT64).of_ranks == tuple(SPREAD)


def test_the_sum_is_that_of_float64_in_the_order_of_the_ranks() -> None:
    weights = [1e16, 1.0, 1.0, 1.0, 1.0]
    assert exchanged(weights, 2, FLOAT64).total == 1e16 != fsum(weights)


def test_a_node_with_all_ranks_knows_the_weights_at_once() -> None:
    assert Weights({1: 2.0, 0: 3.0}, 2).of_ranks == (3.0, 2.0)
    assert Weights({1: 2.0, 0: 3.0}, 2).total == 5.0
    assert Weights({1: 2.0}, 2).of_ranks == ()
    assert Weights({1: 2.0, 2: 0.5}, 4).of_node == 2.5


def test_an_input_without_weight_does_not_count() -> None:
    weights = Weights({0: 2.0, 1: 0.0, 2: 3.0}, 4)
    ends = [End(rank, 0) for rank in range(3)]
    inputs = [np.full(2, value) for value in (1.0, np.nan, 4.0)]
    counted, factors = weights.taking_part(ends, inputs)
    assert [each.tolist() for each in counted] == [[1.0, 1.0], [4.0, 4.0]]
    assert factors == [2.0, 3.0]
