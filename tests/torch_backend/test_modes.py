"""Modes of torch that a script sets, by default or around calls: results are the same in them."""

from __future__ import annotations

import pytest

from tests.torch_backend import mode_programs as programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize("mode", programs.MODES)
def test_a_mode_of_the_script_changes_no_result(one_node: TorchJob, mode: str) -> None:
    one_node.run(programs.reduced_in, modes=[mode])


def test_all_modes_at_once_change_no_result(one_node: TorchJob) -> None:
    one_node.run(programs.reduced_in, modes=[*programs.MODES])


def test_results_of_inference_mode_are_brought_home_outside_of_it(one_node: TorchJob) -> None:
    one_node.run(programs.means_of_inference)


def test_what_is_built_on_collectives_minds_no_defaults(one_node: TorchJob) -> None:
    one_node.run(programs.everything_else)
