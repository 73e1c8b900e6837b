"""Handles of ops: whatever says that one is over, its result is in place."""

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
