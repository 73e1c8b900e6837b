"""The collectives of ``torch.distributed`` on Allfold, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tests.support.processes.ranks import Program
from tests.torch_backend import collective_programs as programs
from tests.torch_backend import group_programs, integer_programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize(
    "program",
    [
        programs.all_reduce,
        programs.tensors_of_every_layout,
        programs.rooted,
        programs.gathered,
        programs.scattered_sums,
        programs.transposed,
        programs.coalesced,
        programs.messages,
        programs.works,
        programs.a_future_need_not_wait_for_another,
        programs.groups,
        group_programs.about_the_group,
        programs.unusual_dtypes,
        programs.objects,
        programs.again,
    ],
    ids=lambda program: program.__name__,
)
def test_torch_distributed(torch_job: TorchJob, program: Program) -> None:
    torch_job.run(program)


@pytest.mark.parametrize(
    "program",
    [
        integer_programs.all_reduced,
        integer_programs.divided_once,
        integer_programs.held,
        integer_programs.reduced,
        integer_programs.scattered,
        integer_programs.coalesced,
    ],
    ids=lambda program: program.__name__,
)
def test_a_mean_of_integers_is_truncated(torch_job: TorchJob, program: Program) -> None:
    torch_job.run(program)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:allfold", "cpu:allfold,cuda:nccl"])
def test_a_backend_beside_allfold_in_one_group_is_warned_of(
    two_nodes: TorchJob, backend: str
) -> None:
    other = backend.replace("cpu:allfold", "").replace("cuda:allfold", "").strip(",")
    (warning,), *others = two_nodes.run(group_programs.warnings_of, backend=backend)
    assert f"Allfold serves all devices of this group, also what was to be {other}:" in warning
    assert 'init_process_group("allfold")' in warning
    assert others == [[]] * 3


@pytest.mark.parametrize("backend", ["allfold", "cpu:allfold,cuda:allfold"])
def test_no_warning_where_allfold_has_every_device(two_nodes: TorchJob, backend: str) -> None:
    assert two_nodes.run(group_programs.warnings_of, backend=backend) == [[]] * 4


def test_a_group_can_be_bound_to_a_gpu(two_nodes: TorchJob) -> None:
    assert two_nodes.run(group_programs.bound_to_a_gpu) == [[40.0]] * 4


def test_a_profile_has_every_call_with_its_shapes(two_nodes: TorchJob) -> None:
    block, whole = [2, 3], [8, 3]
    blocks = [block] * 4
    for rank, shapes in enumerate(two_nodes.run(group_programs.in_a_profile)):
        assert shapes.pop("wait") == [[]] * 16
        assert shapes == {
            "all_reduce": [[block]] * 2,
            "broadcast": [[block]],
            "reduce": [[block]],
            "all_gather": [[block]] * 2,
            "gather": [[block]],
            "scatter": [[] if rank else blocks],
            "reduce_scatter": [blocks, [whole]],
            "all_to_all": [blocks, [whole]],
            "send": [[block]] * 2,
            "recv": [[block]],
            "recvAnySource": [[block]],
            "barrier": [[]],
        }
