"""All collectives on tensors of a GPU, against :mod:`tests.support.reference`, bit for bit.

On every path, between ranks of one node and of two that share the GPU, and together with ranks
whose tensors are in the memory of the host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.gpu import torch_programs as programs
from tests.gpu.conftest import OP_SECONDS, PROGRAM_SECONDS, SHAPES, TEST_SECONDS
from tests.support import cases, reference
from tests.support.cases import digest
from tests.support.processes.ranks import Job, RankPool
from tests.support.reference import BLOCKED, PLAIN, ROOTED, Collective
from tests.torch_backend.conftest import TorchJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_SECONDS)]

OPS = ("sum", "mean", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
COMPLEX = ("complex64", "complex128")
MOVED_ONLY = ("uint16", "float8_e4m3fn", "float8_e5m2")
LARGE = 3_000_017  # several chunks, and no round number
ODD = 1003


def is_defined(op: str, dtype: str) -> bool:
    if op in ("mean", "premul_sum"):
        return dtype not in INTEGERS
    if op in ("band", "bor", "bxor"):
        return dtype in INTEGERS
    return dtype not in COMPLEX or op == "sum"


def check(job: Job, path: str, wanted: Sequence[Collective], device: str = "cuda") -> None:
    """Run cases on all ranks and compare all that they have afterwards with the reference."""
    rows = [case.message for case in wanted]
    got = job.run(programs.run, rows=rows, device=device, seconds=PROGRAM_SECONDS)
    for rank, each in enumerate(got):
        is_on_gpu = device == "cuda" or (device == "mixed" and rank % 2 == 0)
        assert each["path"] == (path if is_on_gpu else "none")
    wrong = []
    for number, case in enumerate(wanted):
        right = [digest(each) for each in reference.results(case, job.world_size)]
        if [each["found"][number][0] for each in got] != right:
            wrong.append((case, [each["found"][number][1] for each in got]))
    assert not wrong, f"{len(wrong)} of {len(wanted)} cases, the first: {wrong[0]}"


def uneven(count: int) -> list[int]:
    """Rows of so many blocks, some of which have none."""
    return [7 * block % 3 * 5 for block in range(count)]


def everything(world: int, seed: str, count: int) -> list[Collective]:
    """Every kind so often; what else there is to choose is diced for."""
    dice = Random(seed)
    made = []
    for kind, _ in product((*PLAIN, *BLOCKED), range(count)):
        dtype, op = dice.choice([("float32", "sum"), ("bfloat16", "mean"), ("int64", "max")])
        if kind not in reference.FOLDED:
            dtype = dice.choice((*FLOATS, *INTEGERS, *COMPLEX, *MOVED_ONLY))
        form = dice.choice(forms_of(kind))
        blocks = world**2 if kind == "all_to_all" else world
        rows = dice.choice([[1] * blocks, [64] * blocks, [0] * blocks, uneven(blocks)])
        if kind in PLAIN:
            rows = [3, 0, 129] if form == "list" else dice.choice([[0], [1], [ODD]])
        made.append(
            Collective(
                kind,
                rows,
                dice.choice([(), (2,), (3, 1)]),
                dtype,
                dice.randrange(world) if kind in ROOTED else 0,
                op,
                form=form,
                torch=True,
                place=dice.choice(programs.PLACES),
            )
        )
    return made


def forms_of(kind: str) -> tuple[str, ...]:
    """One tensor or a list; of those with blocks, some results may be new."""
    if kind in PLAIN:
        return ("tensor", "list")
    return {
        "scatter": ("tensor", "list", "stacked"),
        "all_to_all": ("tensor", "list", "new"),
    }.get(kind, ("tensor", "list", "stacked", "new"))


# Exactness


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("shape", ["1x2", "1x4", "2x2"])
def test_every_operation_and_type_is_exact(
    pool: RankPool, path: str, shape: str, kind: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        blocks = 1 if kind == "all_reduce" else job.world_size
        wanted = [
            Collective(kind, [ODD] * blocks, dtype=dtype, op=op, torch=True)
            for op, dtype in product(OPS, (*FLOATS, *INTEGERS, *COMPLEX))
            if is_defined(op, dtype)
        ]
        check(job, path, wanted)


@pytest.mark.parametrize("device", ["cuda", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_collective_is_exact_wherever_its_tensors_lie(
    pool: RankPool, path: str, shape: str, device: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        check(job, path, everything(job.world_size, f"{shape} {device}", 12), device)


@pytest.mark.parametrize("device", ["cuda", "mixed"])
@pytest.mark.parametrize("shape", ["1x4", "2x2"])
def test_large_tensors_are_exact(pool: RankPool, path: str, shape: str, device: str) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        world = job.world_size
        block = LARGE // world
        wanted = [
            Collective("all_reduce", [LARGE], dtype="float32", place="odd", torch=True),
            Collective("all_reduce", [LARGE], dtype="bfloat16", op="mean", torch=True),
            Collective("all_reduce", [LARGE], dtype="float32", place="arena", torch=True),
            Collective("broadcast", [LARGE], dtype="float16", root=world - 1, torch=True),
            Collective("all_gather", [block] * world, dtype="float32", form="new", torch=True),
            Collective("reduce_scatter", [block] * world, dtype="float32", torch=True),
            Collective("all_to_all", [block // world] * world**2, dtype="int32", torch=True),
        ]
        check(job, path, wanted, device)


@pytest.mark.parametrize("arena", [False, True])
def test_inputs_may_be_parts_of_outputs(pool: RankPool, path: str, arena: bool) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        world = job.world_size
        for counts in ([5] * world, [7, 0, 3, 1]):
            check_in_place(job, counts, "cuda", arena)


def check_in_place(job: Job, counts: list[int], device: str, arena: bool) -> None:
    """The collectives with blocks, in place, against what can be seen at once."""
    world, numel = job.world_size, sum(counts)
    ends = np.cumsum([0, *counts])
    before = np.arange(numel) + 100 * np.arange(world)[:, None]
    giver = np.repeat(np.arange(world), counts)
    gathered = np.arange(numel) + 100 * giver
    mine = giver == np.arange(world)[:, None]
    is_root = (np.arange(world) == 1)[:, None]
    expected = {
        "all_gather": np.tile(gathered, (world, 1)),
        "gather": np.where(is_root, gathered, before),
        "scatter": np.where(mine, before[1], before),
        "reduce_scatter": np.where(mine, before.sum(0), before),
    }
    if len(set(counts)) == 1:
        exchanged = [
            [before[each][ends[to] : ends[to + 1]] for each in range(world)] for to in range(world)
        ]
        expected["all_to_all"] = np.array([np.concatenate(blocks) for blocks in exchanged])
    for kind, right in expected.items():
        got = job.run(
            programs.in_place,
            kind=kind,
            counts=counts,
            device=device,
            arena=arena,
            seconds=PROGRAM_SECONDS,
        )
        assert got == right.tolist(), kind


# Messages


@pytest.mark.parametrize("device", ["cuda", "mixed"])
@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_messages_arrive_whole_in_any_order(
    pool: RankPool, path: str, shape: str, device: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        check_messages(job, device)


def check_messages(job: Job, device: str) -> None:
    """Between neighbours, of several sizes and types; and from anybody to rank 0."""
    world, numels = job.world_size, [1, 0, 5, 1003, 70_001, 2]
    for dtype in ("float32", "bfloat16", "uint8"):
        got = job.run(
            programs.messages, device=device, dtype=dtype, numels=numels, seconds=PROGRAM_SECONDS
        )
        for rank, found in enumerate(got):
            before = (rank - 1) % world
            sent = [programs.message(before, tag, numel) for tag, numel in enumerate(numels)]
            assert found == [[cases.encode(each, dtype).hex()] for each in sent]
    first, *_ = job.run(programs.from_anybody, device=device)
    assert first == [[source] * 4 for source in range(1, world)]


# What is no torch tensor


@pytest.mark.parametrize("path", ["ipc"], indirect=True)
@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_arrays_in_the_arena_on_a_gpu_are_of_no_library(
    pool: RankPool, path: str, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        world = job.world_size
        total = [float(world * k + sum(range(world))) for k in range(6)]
        got = job.run(programs.arrays, seconds=PROGRAM_SECONDS)
        assert got == [["float32", [2, 3], total]] * world


def test_arrays_of_cupy(pool: RankPool, path: str) -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    if path == "host":
        pytest.skip("torch copies for this path, and knows no arrays but its own")
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        total = [4.0 * k + 6 for k in range(6)]
        got = job.run(programs.of_cupy, seconds=PROGRAM_SECONDS)
        assert got == [[total, [0, 0, 1, 1, 2, 2, 3, 3]]] * 4


# What cannot work


def test_tensors_of_one_call_are_in_one_place(pool: RankPool, path: str) -> None:
    with pool.job(SHAPES["1x2"], timeout=OP_SECONDS) as job:
        for message in job.run(programs.two_places, seconds=PROGRAM_SECONDS):
            assert "in one place, got cpu and cuda:" in message, message


@pytest.mark.parametrize("device", ["cuda", "mixed"])
def test_a_mismatch_leaves_the_tensors_as_they_were(pool: RankPool, path: str, device: str) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        check_mismatch(job, device)


def check_mismatch(job: Job, device: str) -> None:
    for rank, found in enumerate(
        job.run(programs.mismatch, device=device, seconds=PROGRAM_SECONDS)
    ):
        assert "differs in shape" in found["error"], found
        odd = rank == job.world_size - 1
        assert found["tensor"] == [rank + 1.0] * (4 if odd else 3)
        assert found["next"] == [float(job.world_size)] * 2


# torch.distributed

HERE = "tests.gpu.torch_programs"
COLLECTIVES = "tests.torch_backend.collective_programs"
TRAINING = "tests.torch_backend.training_programs"
FAILURES = "tests.torch_backend.failing_programs"

OF_TORCH = (
    (HERE, "all_reduce_of_torch"),
    (COLLECTIVES, "tensors_of_every_layout"),
    (COLLECTIVES, "rooted"),
    (COLLECTIVES, "gathered"),
    (COLLECTIVES, "scattered_sums"),
    (COLLECTIVES, "transposed"),
    (COLLECTIVES, "coalesced"),
    (COLLECTIVES, "messages"),
    (COLLECTIVES, "works"),
    (COLLECTIVES, "a_future_need_not_wait_for_another"),
    (COLLECTIVES, "groups"),
    (COLLECTIVES, "unusual_dtypes"),
    (COLLECTIVES, "objects"),
    (TRAINING, "functional"),
)


def run_of_torch(job: TorchJob, module: str, function: str, device: str = "cuda") -> list[Any]:
    """A program that makes its tensors on the default device: those of the CPU's tests do."""
    return job.run(programs.with_default_device, module=module, function=function, device=device)


@pytest.mark.parametrize(("module", "function"), OF_TORCH, ids=lambda name: name.split(".")[-1])
def test_torch_distributed(two_nodes: TorchJob, path: str, module: str, function: str) -> None:
    run_of_torch(two_nodes, module, function)


def test_a_mismatch_raises_on_every_rank_however_it_waits(two_nodes: TorchJob, path: str) -> None:
    for messages in run_of_torch(two_nodes, FAILURES, "different_shapes"):
        for way, message in messages.items():
            assert "MismatchError" in message, (way, message)
