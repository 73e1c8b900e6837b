"""The paths of tensors to the agent; all of them give the same results."""

from __future__ import annotations

import re

import pytest

from tests.cuda import loss_programs, programs
from tests.cuda.conftest import machine
from tests.support.fakes.fake_cuda import Settings
from tests.support.processes.ranks import RankPool, failures
from tests.support.tiers import long

EVERYWHERE = (0, 0, 1, 1)
CASES = [("float32", "sum"), ("float16", "mean"), ("int64", "max")]

PATHS: dict[str, tuple[Settings, dict[str, str], str, str]] = {
    "asked for": ({}, {"ALLFOLD_GPU_PATH": "pinned"}, "pinned", "ALLFOLD_GPU_PATH says so"),
    "not shareable": ({"ipc": False}, {}, "pinned", "cannot be shared .*ERROR_NOT_SUPPORTED"),
    "agent without": ({}, {"ALLFOLD_AGENT_GPU": "off"}, "pinned", "ALLFOLD_AGENT_GPU says so"),
}


def test_memory_on_a_gpu_is_shared_where_that_works(pool: RankPool) -> None:
    with pool.job((0, 0)) as job:
        for found in job.run(loss_programs.path):
            assert re.match("ipc: .*folds on it as well, as Fake GPU 0", found), found


@pytest.mark.long
@pytest.mark.parametrize("which", PATHS)
def test_the_path_is_chosen_by_what_works_and_says_why(which: str) -> None:
    settings, variables, path, why = PATHS[which]
    with machine(variables, **settings) as pool, pool.job(EVERYWHERE) as job:
        assert job.run(programs.collectives, numel=70_001) == [[]] * 4
        assert job.run(programs.uneven, numel=3000) == [[]] * 4
        assert job.run(programs.messages, numel=3000) == [[]] * 4
        assert job.run(programs.all_reduces, numel=70_001, cases=CASES) == [[]] * 4
        assert job.run(programs.many_at_once, numel=70_001, count=12) == [[]] * 4
        for found in job.run(loss_programs.path):
            assert re.match(f"{path}: .*{why}", found), found


def test_a_gpu_without_room_for_an_arena_is_copied_from() -> None:
    with machine(memory_mb=33) as pool, pool.job((0, 0)) as job:
        assert job.run(programs.all_reduces, numel=100, cases=CASES) == [[]] * 2
        for found in job.run(loss_programs.path):
            assert re.match("pinned: .*no memory for 32 MiB .*ERROR_OUT_OF_MEMORY", found), found


def test_without_page_locked_memory_an_array_that_torch_does_not_know_is_refused() -> None:
    with machine(register=False) as pool, pool.job((0, 0)) as job:
        for failure in failures(job.start_all(programs.collectives, numel=10)):
            assert "cannot be moved, because the GPU cannot use the host's memory" in str(failure)
        assert [found.partition(":")[0] for found in job.run(loss_programs.path)] == [
            "host",
            "host",
        ]


def test_machines_with_and_without_gpus_are_in_one_group() -> None:
    with machine(agents=("node0",)) as pool:
        pool.services.agent_variables = {"ALLFOLD_AGENT_GPU": "off"}
        pool.services.start_agents("node1")
        types = [pool.services.status(name)["device_type"] for name in ("node0", "node1")]
        assert types == ["cuda", "cpu"]
        for strategy in ("auto", "tree(2)", "ring"):
            with pool.job(EVERYWHERE, strategies=f"all_reduce={strategy}") as job:
                found = [each.partition(":")[0] for each in job.run(loss_programs.path)]
                assert found == ["ipc", "ipc", "pinned", "pinned"]
                assert job.run(programs.all_reduces, numel=70_001, cases=CASES) == [[]] * 4
                found = job.run(programs.all_reduces, numel=999, cases=CASES, place="mixed")
                assert found == [[]] * 4


@pytest.mark.long
@pytest.mark.parametrize("peers", ["all", long("none")])
@pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 0, 0), (0, 0, 1, 1)], ids=str)
def test_ranks_on_several_gpus_are_in_one_group(
    several: dict[str, RankPool], peers: str, nodes: tuple[int, ...]
) -> None:
    with several[peers].job(nodes) as job:
        everywhere: list[list[str]] = [[]] * len(nodes)
        for numel in (10, 200_003):
            assert job.run(programs.collectives, numel=numel, devices=2) == everywhere
        assert job.run(programs.uneven, numel=3000, devices=2) == everywhere
        assert job.run(programs.messages, numel=3000, devices=2) == everywhere
        found = job.run(programs.all_reduces, numel=200_003, cases=CASES, devices=2)
        assert found == everywhere
        found = job.run(programs.all_reduces, numel=70_001, cases=CASES, place="mixed", devices=2)
        assert found == everywhere


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("two places", "in one place, got cuda:0 and the host"),
        ("strides", "is not contiguous"),
        ("read-only", "read-only"),
        ("cuda:x", "device= is 'cpu', 'cuda' or 'cuda:<number>', got 'cuda:x'"),
        ("tpu", "device= is"),
    ],
)
def test_what_cannot_be_is_refused_and_the_next_call_works(
    pool: RankPool, what: str, says: str
) -> None:
    with pool.job((0, 0)) as job:
        for error in job.run(loss_programs.refused, what=what):
            assert says in error
        assert job.run(programs.all_reduces, numel=10, cases=CASES) == [[]] * 2
