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
        programs.objects,
        programs.again,
    ],
    ids=lambda program: program.__name__,
)
def test_torch_distributed(torch_job: TorchJob, program: Program) -> None:
    torch_job.run(program)
