"""DDP on GPUs: the gradients, losses and weights of a single process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import training_programs as programs
from tests.gpu.conftest import TEST_SECONDS
from tests.torch_backend.conftest import TorchJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_SECONDS)]


@pytest.mark.parametrize("options", [{}, {"sometimes": True}, {"no_sync": True}], ids=str)
def test_ddp_has_the_gradients_of_a_single_process(
    two_nodes: TorchJob, path: str, options: dict[str, Any]
) -> None:
    assert two_nodes.run(programs.ddp, device="cuda", **options) == [path] * 4


@pytest.mark.parametrize("hooked", [False, True], ids=["its own", "hooked"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_buckets_lie_in_the_arena_on_the_gpu_from_their_first_op_on(
    two_nodes: TorchJob, path: str, views: bool, hooked: bool
) -> None:
    got = two_nodes.run(programs.ddp_in_the_arena, device="cuda", views=views, hooked=hooked)
    assert [found["path"] for found in got] == [path] * 4
    can_move = all(found["can move"] for found in got)
    expected = views and path == "ipc" and can_move
    assert [found["in the arena"] for found in got] == [[expected] * 4] * 4
    if views and path == "ipc" and not can_move:
        pytest.skip("gradients are right, but this torch cannot exchange the memory of a storage")


@pytest.mark.parametrize(("wire", "within"), [(None, 1e-5), ("bfloat16", 1e-2), ("int8", 3e-2)])
def test_the_hook_averages_gradients(
    two_nodes: TorchJob, path: str, wire: str | None, within: float
) -> None:
    apart = two_nodes.run(programs.ddp_hook, device="cuda", wire=wire)
    assert max(apart) < within
    if wire is not None:
        assert max(apart) > 1e-6, "nothing was rounded"
