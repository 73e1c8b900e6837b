"""Modes of torch: those that a script sets change no result, and those that look on see every call.

So do traces and tensor subclasses, as with torch's own backends.
"""

from __future__ import annotations

import pytest

from tests.support.processes.ranks import Program
from tests.torch_backend import mode_programs as programs
from tests.torch_backend import observed_programs
from tests.torch_backend.conftest import TorchJob


@pytest.mark.parametrize("mode", programs.MODES)
def test_a_mode_of_the_script_changes_no_result(one_node: TorchJob, mode: str) -> None:
    one_node.run(programs.reduced_in, modes=[mode])


def test_all_modes_at_once_change_no_result(one_node: TorchJob) -> None:
    one_node.run(programs.reduced_in, modes=[*programs.MODES])


def test_results_of_inference_mode_are_copied_out_outside_of_it(one_node: TorchJob) -> None:
    one_node.run(programs.means_of_inference)


def test_what_is_built_on_collectives_minds_no_defaults(one_node: TorchJob) -> None:
    one_node.run(programs.everything_else)


@pytest.mark.parametrize(
    "program",
    [
        observed_programs.beside_another_backend,
        observed_programs.traced,
        observed_programs.without_memory,
        observed_programs.of_subclasses,
        observed_programs.transformed,
    ],
    ids=lambda program: program.__name__,
)
def test_what_looks_on(one_node: TorchJob, program: Program) -> None:
    one_node.run(program)


def test_a_mode_sees_every_collective(one_node: TorchJob) -> None:
    for names in one_node.run(observed_programs.seen_by_a_mode):
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
