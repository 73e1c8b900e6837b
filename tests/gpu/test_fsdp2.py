"""FSDP2 on GPUs: the losses and weights of a single process."""

from __future__ import annotations

import pytest

from tests.gpu import training_programs as programs
from tests.gpu.conftest import TEST_SECONDS
from tests.torch_backend.conftest import TorchJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_SECONDS)]


@pytest.mark.parametrize("mesh", [[4], [2, 2]], ids=["sharded", "replicated and sharded"])
def test_fsdp2_has_the_losses_and_weights_of_a_single_process(
    two_nodes: TorchJob, path: str, mesh: list[int]
) -> None:
    assert two_nodes.run(programs.fsdp2, device="cuda", mesh=mesh) == [path] * 4


def test_fsdp2_averages_gradients_of_bfloat16(two_nodes: TorchJob, path: str) -> None:
    two_nodes.run(programs.fsdp2_in_half_precision, device="cuda")
