"""The tensors that a collective takes (libraries, layouts, shapes, the arena) and refuses."""

from __future__ import annotations

import pytest

from allfold_core.errors import InvalidArgument
from tests.conformance import exact
from tests.conformance.layouts import LAYOUTS
from tests.conformance.refusals import works
from tests.support.processes.ranks import Job


def test_any_layout_is_reduced_in_place_and_its_surroundings_stay(job: Job) -> None:
    """All collectives, on torch and NumPy, with another layout on every rank of an op."""
    job.run(exact.through_layouts, names=list(LAYOUTS))


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize("shape", [[], [1], [0], [3, 0, 2], [1, 1, 1], [2, 3, 4, 5, 1, 2]])
def test_scalars_empty_tensors_and_many_dimensions_keep_their_shape(
    job: Job, shape: list[int], torch: bool, arena: bool
) -> None:
    numel = 1
    for size in shape:
        numel *= size
    got = job.run(exact.of_shape, shape=shape, torch=torch, arena=arena)
    assert got == [[shape, [job.world_size] * numel]] * job.world_size


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("unknown operation", "median.*sum, mean, product, min, max"),
        ("a list", "list"),
        ("a read-only array", "read-only"),
        ("an array of another byte order", "byte order"),
        ("greatest complex number", "max of complex numbers is not defined"),
        ("elements that share memory", "share"),
        ("array elements that share memory", "share"),
        ("a root beyond the group", "root"),
        ("a negative root", "root -1"),
        ("a timeout of nothing", "timeout"),
        ("a strategy without a name", "strategy= is a name, got None"),
        ("several strategies", r"strategy= is a name, got \['ring'\]"),
        ("a negative shape", "negative"),
        ("a shape that is no number", "a shape is an integer or several, got 'ab'"),
        ("a shape for which no machine has memory", "no machine has memory"),
    ],
)
def test_what_cannot_work_is_refused_on_each_rank_at_once(job: Job, what: str, named: str) -> None:
    for call in job.start_all(exact.refused, what=what):
        with pytest.raises(InvalidArgument, match=named):
            raise call.failure().error
    works(job)


def test_what_an_error_advises_for_a_tensor_works(job: Job) -> None:
    for followed in job.run(exact.as_advised):
        assert followed["byte order"] == "array.astype(array.dtype.newbyteorder('='))"
        assert len(followed) == 9


@pytest.mark.parametrize("what", ["an unknown strategy", "a strategy that cannot run the kind"])
def test_a_strategy_that_cannot_run_an_op_is_refused_with_those_that_can(
    job: Job, what: str
) -> None:
    for call in job.start_all(exact.refused, what=what):
        with pytest.raises(InvalidArgument, match="centralized"):
            raise call.failure().error
    works(job)
