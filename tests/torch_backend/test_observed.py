"""Modes, traces and tensor subclasses of torch see collectives, as those of its own backends."""

from __future__ import annotations

import pytest

from tests.support.processes.ranks import Program
from tests.torch_backend import observed_programs as programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize(
    "program",
    [
        programs.beside_another_backend,
        programs.traced,
        programs.without_memory,
        programs.of_subclasses,
        programs.transformed,
    ],
    ids=lambda program: program.__name__,
)
def test_what_looks_on(one_node: TorchJob, program: Program) -> None:
    one_node.run(program)


def test_a_mode_sees_every_collective(one_node: TorchJob) -> None:
    for names in one_node.run(programs.seen_by_a_mode):
        assert names == [
            "allreduce_",
            "allreduce_",
            "allreduce_",
            "broadcast_",
            "reduce_",
            "allgather_",
            "_allgather_base_",
            "gather_",
            "scatter_",
            "reduce_scatter_",
            "_reduce_scatter_base_",
            "alltoall_base_",
            "alltoall_",
            "allreduce_coalesced_",
            "barrier",
            "barrier",
            "send",
            "recv_",
            "send",
            "recv_any_source_",
        ]
