"""The collectives of ``torch.distributed`` on Allfold, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from tests.support.ranks import Program
from tests.torch_backend import collective_programs as programs
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
        programs.about_the_group,
        programs.unusual_dtypes,
        programs.objects,
        programs.again,
    ],
    ids=lambda program: program.__name__,
)
def test_torch_distributed(torch_job: TorchJob, program: Program) -> None:
    torch_job.run(program)


def test_a_group_can_be_bound_to_a_gpu(two_nodes: TorchJob) -> None:
    assert two_nodes.run(programs.bound_to_a_gpu) == [[40.0]] * 4


def test_a_profile_has_every_call_with_its_shapes(two_nodes: TorchJob) -> None:
    block, whole = [2, 3], [8, 3]
    blocks = [block] * 4
    for rank, shapes in enumerate(two_nodes.run(programs.in_a_profile)):
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
