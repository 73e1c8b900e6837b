"""Handles of ops: whatever says that one is over, its result is there, and DDP's kept handles."""

from __future__ import annotations

import pytest

from tests.torch_backend import handle_programs as programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize("way", programs.WAYS)
def test_what_is_known_to_be_over_is_in_place_and_stays(one_node: TorchJob, way: str) -> None:
    one_node.run(programs.known_to_be_over, way=way)


def test_a_mean_of_integers_is_divided_where_the_handle_was_dropped(one_node: TorchJob) -> None:
    one_node.run(programs.means_of_dropped_handles)


def test_a_group_that_is_destroyed_leaves_the_results_of_its_ops(one_node: TorchJob) -> None:
    one_node.run(programs.left_in_flight)


def test_a_graph_waits_for_an_op_that_was_called_before_it(one_node: TorchJob) -> None:
    one_node.run(programs.inputs_in_flight)


def test_gradients_that_ddp_delays_are_there_at_the_end_of_backward(one_node: TorchJob) -> None:
    first, second = one_node.run(programs.delayed_gradients)
    assert first == second


def test_ddp_divides_by_the_number_of_ranks_that_have_not_joined(two_nodes: TorchJob) -> None:
    # In step n, only the ranks from n on are left, and rank r brings a gradient of r + 1.
    means = [2.5, 3.0, 3.5, 4.0]
    for rank, gradients in enumerate(two_nodes.run(programs.gradients_of_those_left)):
        assert gradients == pytest.approx(means[: rank + 1])


def test_ddp_trains_on_while_ranks_join(one_node: TorchJob) -> None:
    first, second = one_node.run(programs.joined)
    assert first == second
