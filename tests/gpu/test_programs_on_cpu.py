"""The programs of the tests beside this one, on tensors of the host: they expect what is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import loss_programs, stream_programs, training_programs
from tests.gpu.conftest import OP_SECONDS, SHAPES, Pool
from tests.gpu.test_collectives import (
    FLOATS,
    HERE,
    INTEGERS,
    ODD,
    OPS,
    TRAINING,
    check,
    check_in_place,
    check_messages,
    check_mismatch,
    everything,
    is_defined,
    run_of_torch,
)
from tests.support.processes.fixtures import services_with
from tests.support.processes.ranks import RankPool
from tests.support.processes.services import Services
from tests.support.reference import Collective
from tests.torch_backend.conftest import TorchJob

services = services_with("node0", "node1")

CPU = "cpu"


@pytest.fixture(scope="module")
def pool(services: Services) -> Iterator[Pool]:
    with Pool(services) as pool:
        yield pool


@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_collectives(pool: RankPool, shape: str) -> None:
    folded = [
        Collective("all_reduce", [ODD], dtype=dtype, op=op, torch=True)
        for op in OPS
        for dtype in (*FLOATS, *INTEGERS)
        if is_defined(op, dtype)
    ]
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        check(job, "none", folded + everything(job.world_size, f"{shape} cuda", 12), CPU)
        for arena in (False, True):
            for counts in ([5] * job.world_size, [7, 0, 3, 1][: job.world_size]):
                check_in_place(job, counts, CPU, arena)
        check_messages(job, CPU)
        check_mismatch(job, CPU)


def test_streams(pool: RankPool) -> None:
    with pool.job(SHAPES["1x2"], timeout=OP_SECONDS) as job:
        assert job.run(stream_programs.warm, device=CPU) == [[2.0, 2.0]] * 2
        (found, _) = job.run(stream_programs.on_a_side_stream, device=CPU, arena=True)
        assert (found["result"], found["path"]) == ([6.0, 6.0], "none")
        (found, _) = job.run(stream_programs.waited_for_elsewhere, device=CPU)
        assert found["there"] == found["elsewhere"] == [3.0, 3.0]
        assert found["new, there"] == found["new, elsewhere"] == [0.0] * 3 + [1.0] * 3
        (found, _) = job.run(stream_programs.memory_of_a_result, device=CPU, arena=True)
        assert found["others"] == [[7.0, 7.0]] * 4
        assert job.run(stream_programs.memory_of_an_input, device=CPU) == [[0.0, 1.0]] * 2
        received = job.run(stream_programs.received_behind_other_work, device=CPU)
        assert received == [[7.0, 7.0]] * 2
        (found, _) = job.run(stream_programs.nobody_waits, device=CPU)
        assert found == {"late": [2.0, 2.0], "kept": [2.0, 2.0]}
        found = job.run(stream_programs.many_in_flight, device=CPU)[0]
        assert found == [[2.0 * number + 1] * 2 for number in range(len(found))]
        assert job.run(stream_programs.chained, device=CPU, arena=False) == [[6.0, 6.0]] * 2


@pytest.mark.parametrize("options", [{"sometimes": True}, {"no_sync": True}], ids=str)
def test_ddp(two_nodes: TorchJob, options: dict[str, Any]) -> None:
    assert two_nodes.run(training_programs.ddp, device=CPU, **options) == ["none"] * 4


@pytest.mark.long
@pytest.mark.parametrize("hooked", [False, True])
def test_ddp_in_the_arena(two_nodes: TorchJob, hooked: bool) -> None:
    program = training_programs.ddp_in_the_arena
    for found in two_nodes.run(program, device=CPU, views=True, hooked=hooked):
        assert found["in the arena"] == [found["can move"]] * 4


def test_the_hook(two_nodes: TorchJob) -> None:
    assert 1e-6 < max(two_nodes.run(training_programs.ddp_hook, device=CPU, wire="int8")) < 3e-2


def test_futures(two_nodes: TorchJob) -> None:
    assert two_nodes.run(training_programs.futures, device=CPU) == [[10.0, 30.0, 30.0]] * 4


@pytest.mark.parametrize("mesh", [[4], [2, 2]])
def test_fsdp2(two_nodes: TorchJob, mesh: list[int]) -> None:
    two_nodes.run(training_programs.fsdp2, device=CPU, mesh=mesh)


def test_fsdp2_in_half_precision(two_nodes: TorchJob) -> None:
    two_nodes.run(training_programs.fsdp2_in_half_precision, device=CPU)


@pytest.mark.parametrize(
    ("module", "function"), [(HERE, "all_reduce_of_torch"), (TRAINING, "functional")]
)
def test_programs_of_torch(two_nodes: TorchJob, module: str, function: str) -> None:
    run_of_torch(two_nodes, module, function, CPU)


def test_losses(pool: RankPool, tmp_path: Path) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        note = tmp_path / "called"
        got = job.run(loss_programs.all_reduce, device=CPU, busy=1.0, note=str(note))
        assert got == [[10.0, 10.0]] * 4
        assert note.exists()
        job.run(loss_programs.share, device=CPU, mib=2)
