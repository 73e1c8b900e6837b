"""Trainings with DDP, FSDP2 and DTensor on Allfold, against the same ones on Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allfold.torch.hook import HookState
from tests.support.processes.ranks import Program
from tests.torch_backend import (
    checkpoint_programs,
    ddp_programs,
    functional_programs,
    hook_programs,
)
from tests.torch_backend import training_programs as programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize("options", [{}, {"sometimes": True}, {"no_sync": True}], ids=str)
def test_ddp_has_the_gradients_of_gloo(torch_job: TorchJob, options: dict[str, Any]) -> None:
    torch_job.run(programs.ddp, **options)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("views", [False, True])
def test_buckets_of_ddp_lie_in_the_arena_from_their_first_op_on(
    torch_job: TorchJob, views: bool, hooked: bool
) -> None:
    for found in torch_job.run(programs.ddp_in_the_arena, views=views, hooked=hooked):
        assert found == [views] * 4  # else the gradients are copies of what is in the buckets


def test_workers_of_a_data_loader_do_not_write_to_the_gradients_of_their_parent(
    one_node: TorchJob,
) -> None:
    assert one_node.run(programs.loading_beside_gradients) == [True, True]


def test_memory_that_a_script_brings_is_not_taken_from_it(torch_job: TorchJob) -> None:
    torch_job.run(programs.memory_of_scripts)


def test_ddp_goes_on_where_ranks_run_out_of_inputs(two_nodes: TorchJob) -> None:
    two_nodes.run(programs.ddp_with_uneven_inputs)


def test_gradients_that_ddp_delays_are_there_at_the_end_of_backward(one_node: TorchJob) -> None:
    first, second = one_node.run(ddp_programs.delayed_gradients)
    assert first == second


def test_ddp_divides_by_the_number_of_ranks_that_have_not_joined(two_nodes: TorchJob) -> None:
    # In step n, only the ranks from n on are left, and rank r brings a gradient of r + 1.
    means = [2.5, 3.0, 3.5, 4.0]
    for rank, gradients in enumerate(two_nodes.run(ddp_programs.gradients_of_those_left)):
        assert gradients == pytest.approx(means[: rank + 1])


def test_ddp_trains_on_while_ranks_join(one_node: TorchJob) -> None:
    first, second = one_node.run(ddp_programs.joined)
    assert first == second


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_fsdp2_has_the_losses_of_gloo(torch_job: TorchJob, compute: str) -> None:
    torch_job.run(programs.fsdp2, compute=compute)


def test_fsdp2_rounds_the_mean_of_bfloat16_gradients_once(torch_job: TorchJob) -> None:
    torch_job.run(programs.fsdp2_in_half_precision)


def test_fsdp2_over_a_mesh_of_two_dimensions(two_nodes: TorchJob) -> None:
    two_nodes.run(programs.hybrid_fsdp2)


def test_dtensor(torch_job: TorchJob) -> None:
    torch_job.run(programs.dtensor)


def test_functional_collectives(torch_job: TorchJob) -> None:
    torch_job.run(programs.functional)


def test_functional_collectives_that_ask_for_a_backend_do_without_one(one_node: TorchJob) -> None:
    one_node.run(functional_programs.asking_for_a_backend)


def test_functional_collectives_of_gloo_go_on_while_its_threads_drop_tensors(
    one_node: TorchJob,
) -> None:
    one_node.run(functional_programs.one_after_another_on_gloo)


def test_a_batch_of_messages_that_cannot_be_is_refused(one_node: TorchJob) -> None:
    for uneven, unknown in one_node.run(functional_programs.refused_batches):
        assert "1 operations, 2 peers, 2 tags, 2 tensors" in uneven
        assert "'isend' and 'irecv', got get" in unknown


def test_a_distributed_checkpoint_is_saved_and_loaded(two_nodes: TorchJob, tmp_path: Path) -> None:
    two_nodes.run(checkpoint_programs.checkpoint, folder=str(tmp_path))


def test_a_distributed_checkpoint_is_saved_in_the_background(
    two_nodes: TorchJob, tmp_path: Path
) -> None:
    two_nodes.run(checkpoint_programs.checkpoint_in_the_background, folder=str(tmp_path))


def test_checkpoints_are_saved_in_the_background_while_the_training_goes_on(
    two_nodes: TorchJob, tmp_path: Path
) -> None:
    two_nodes.run(checkpoint_programs.checkpoints_beside_a_training, folder=str(tmp_path))


def test_a_sharded_model_takes_the_weights_of_rank_0(two_nodes: TorchJob) -> None:
    two_nodes.run(checkpoint_programs.weights_that_rank_0_alone_has)


@pytest.mark.parametrize(
    "program",
    [programs.pipeline, programs.tensor_parallel, programs.hooks_of_torch],
    ids=lambda program: program.__name__,
)
def test_what_torch_builds_on_it(two_nodes: TorchJob, program: Program) -> None:
    two_nodes.run(program)


@pytest.mark.parametrize(
    ("wire", "feedback", "within"),
    [
        (None, True, 1e-5),
        ("float32", True, 1e-5),
        ("bfloat16", True, 1e-2),
        ("int8", True, 1e-2),
        ("int8", False, 1e-2),
        ("int4", True, 1e-1),
        ("sign", True, 1.0),
    ],
)
def test_the_hook_averages_gradients_beside_gloo(
    two_nodes: TorchJob, wire: str | None, feedback: bool, within: float
) -> None:
    apart = two_nodes.run(hook_programs.ddp_hook, backend="gloo", wire=wire, feedback=feedback)
    assert max(map(max, apart)) < within
    if wire not in (None, "float32"):
        assert max(map(max, apart)) > 1e-7, "nothing was rounded"


@pytest.mark.long
def test_feedback_makes_the_mean_of_many_steps_exact_for_each_model(two_nodes: TorchJob) -> None:
    for feedback in (True, False):
        for models in two_nodes.run(
            hook_programs.means_of_hooked_steps, backend="gloo", feedback=feedback
        ):
            for first, all_ in models:
                assert first > 1e-3, "nothing was rounded"
                assert all_ < first / 8 if feedback else all_ > first / 2, (feedback, first, all_)


def test_rebuilt_buckets_take_the_place_of_the_old_ones(two_nodes: TorchJob) -> None:
    two_nodes.run(hook_programs.buckets_of_another_size, backend="gloo")


def test_models_have_series_of_their_own() -> None:
    first, second = HookState(wire="int8"), HookState(wire="int8")
    series = [
        state.options(hook_programs.bucket(torch.ones(4), index)).get("feedback")
        for state in (first, second)
        for index in (0, 1)
    ]
    assert None not in series
    assert len(set(series)) == 4


def test_an_error_in_the_hook_raises_in_backward_on_every_rank(two_nodes: TorchJob) -> None:
    first, *others = two_nodes.run(hook_programs.a_hook_that_fails, backend="gloo")
    assert all("MismatchError" in message and "rank 0" in message for message in others), others
    assert "PeerLost" in first  # the others, done with it, had left by then
