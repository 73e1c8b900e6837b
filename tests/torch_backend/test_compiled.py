"""``torch.compile`` breaks the graph at a collective, and leaves Allfold's own code alone."""

from __future__ import annotations

import pytest

from tests.support.processes.ranks import Program
from tests.torch_backend import compiled_programs as programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize("program", [programs.collectives, programs.movement, programs.training])
def test_compiled_programs_give_what_they_give_uncompiled(
    one_node: TorchJob, program: Program
) -> None:
    one_node.run(program)


def test_a_compiled_step_calls_the_hook_of_another_backend(one_node: TorchJob) -> None:
    one_node.run(programs.training_with_the_hook, backend="gloo")
