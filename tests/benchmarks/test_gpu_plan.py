"""What the benchmark on a GPU computes, and one run of it on CPU tensors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import Figures
from benchmarks.gpu import options, pack, plan, reference, report, sanitizer, wheels
from benchmarks.gpu.checking import Tensor
from benchmarks.gpu.devices import Host
from benchmarks.gpu.plan import CPU, GIB, PARTS, PATHS, TARGET, Call, Setting
from benchmarks.gpu.report import Check, Report, Timing
from benchmarks.gpu.stage import rank_environment
from benchmarks.gpu.timing import PERIOD, AllReduce
from benchmarks.plan import Shape
from packaging.requirements import Requirement

import allfold
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
WORLDS = (2, 4)


# --- the plan


def test_without_options_everything_is_done() -> None:
    chosen = options.parse([])
    assert chosen.parts == list(PARTS)
    assert (chosen.ranks, chosen.agents, chosen.paths) == ([2, 4], [1, 2], list(PATHS))
    assert (chosen.large, max(chosen.sizes), min(chosen.sizes)) == (GIB, GIB, 4096)
    assert chosen.deadline < 8 * 60


def test_parts_are_done_in_the_order_of_the_plan() -> None:
    assert options.parse(["--parts", "sweep,copy"]).parts == ["copy", "sweep"]


def test_without_a_gpu_only_the_check_is_usual_and_tensors_are_on_the_host() -> None:
    chosen = options.parse(["--without-gpu"])
    assert (chosen.parts, chosen.paths) == (["check"], [CPU])


@pytest.mark.parametrize(
    "arguments",
    [
        "--parts everything",
        "--without-gpu --parts kernel",
        "--without-gpu --sanitize",
        "--without-gpu --paths ipc",
        "--ranks 3",
        "--ranks 1",
        "--ranks 2 --agents 4",
        "--paths dma",
        "--sanitize valgrind",
        "--output no/such/folder/results.json",
    ],
)
def test_what_cannot_be_done_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(arguments.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_every_shape_has_its_ranks_evenly_on_its_agents() -> None:
    found = plan.shapes([2, 4], [1, 2, 4])
    assert [str(shape) for shape in found] == ["1x2", "2x1", "1x4", "2x2", "4x1"]


def test_every_path_is_checked_of_every_shape_and_mixed_with_the_host() -> None:
    found = plan.settings([Shape(1, 2), Shape(2, 2)], PATHS)
    assert {str(each) for each in found if not each.is_mixed} == {
        f"{shape} {path}" for shape in ("1x2", "2x2") for path in PATHS
    }
    assert {each.ways for each in found if each.is_mixed} == {
        ("ipc", "cpu"),
        ("ipc", "pinned"),
        ("ipc", "cpu", "ipc", "cpu"),
        ("ipc", "pinned", "host", "cpu"),
    }


def test_on_the_host_there_is_nothing_to_mix() -> None:
    assert plan.settings([Shape(1, 2)], [CPU]) == [Setting(Shape(1, 2), (CPU, CPU))]


def test_every_dtype_is_folded_with_every_reduction_that_it_has() -> None:
    found = {(each.dtype, each.op) for each in plan.calls(4, quick=False)}
    for dtype in DType:
        for op in ReduceOp:
            assert ((dtype.label, op.label) in found) == (op.refusal(dtype) is None)


@pytest.mark.parametrize("quick", [False, True])
def test_every_collective_is_called_also_with_blocks_of_unequal_sizes(quick: bool) -> None:
    found = plan.calls(4, quick=quick)
    kinds = {"all_reduce", "reduce", "broadcast", "send_recv"}
    blocked = {"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"}
    assert {call.kind for call in found} == kinds | blocked
    assert {call.kind for call in found if not call.is_even} == blocked
    assert {call.memory for call in found} == {"arena", "plain", "offset", "strided", "array"}
    assert any(call.late for call in found)
    assert len(found) == len(set(found))


def test_an_all_reduce_reads_and_writes_each_tensor_once() -> None:
    assert plan.copy_bytes(GIB) == 2 * GIB
    assert plan.fold_bytes(GIB, 4) == 8 * GIB


def test_the_card_has_room_for_the_largest_size() -> None:
    assert plan.largest_size(80 * GIB, 4) > GIB
    assert plan.largest_size(8 * GIB, 4) < GIB


def test_a_rank_is_told_its_agent_and_its_path() -> None:
    found = rank_environment("pinned", {"ALLFOLD_SOCKET": "here"}, "group")
    assert found["ALLFOLD_GPU_PATH"] == "pinned"
    assert found["ALLFOLD_SOCKET"] == "here"
    assert rank_environment(CPU, {}, "group")["ALLFOLD_GPU_PATH"] == "auto"


# --- what must come out


@pytest.mark.parametrize("world", WORLDS)
def test_every_number_on_the_way_is_exact_in_its_type(world: int) -> None:
    for call in plan.calls(world, quick=False):
        everybody = [reference.given(call, rank, world) for rank in range(world)]
        arrays = [*everybody, reference.expected(call, 0, world)]
        if call.op == "sum" and call.dtype != "bool" and "complex" not in call.dtype:
            arrays.append(np.abs(np.stack(everybody)).sum(0))  # no partial sum is larger
        for numbers in arrays:
            if numbers is None:
                continue
            typed = torch.from_numpy(numbers).to(getattr(torch, call.dtype))
            back = typed.to(torch.complex128 if typed.is_complex() else torch.float64)
            assert np.array_equal(back.numpy(), numbers), call


def test_ranks_bring_different_numbers_and_always_the_same() -> None:
    call = Call("all_reduce", "float32", (1003,), "sum")
    ours = reference.given(call, 0, 4)
    assert np.array_equal(ours, reference.given(call, 0, 4))
    assert not np.array_equal(ours, reference.given(call, 1, 4))
    assert not np.array_equal(ours, reference.given(Call("all_reduce", "float32", (1003,)), 0, 4))


@pytest.mark.parametrize(
    ("op", "dtype", "result"),
    [
        ("sum", "int32", [4, 6]),
        ("mean", "float32", [2, 3]),
        ("product", "int32", [3, 8]),
        ("min", "int32", [1, 2]),
        ("max", "int32", [3, 4]),
        ("band", "int32", [1, 0]),
        ("bor", "int32", [3, 6]),
        ("bxor", "int32", [2, 6]),
        ("premul_sum", "float32", [2, 3]),
    ],
)
def test_reductions_are_those_of_the_definition(op: str, dtype: str, result: list[int]) -> None:
    brought = [np.array([1, 2]), np.array([3, 4])]
    assert reference.folded(Call("all_reduce", dtype, (2,), op), brought).tolist() == result


@pytest.mark.parametrize(
    ("op", "result"),
    [("sum", [0, 1, 1]), ("max", [0, 1, 1]), ("product", [0, 0, 1]), ("bxor", [0, 1, 0])],
)
def test_booleans_are_folded_as_any_and_all(op: str, result: list[int]) -> None:
    brought = [np.array([0, 1, 1]), np.array([0, 0, 1])]
    assert reference.folded(Call("all_reduce", "bool", (3,), op), brought).tolist() == result


@pytest.mark.parametrize("kind", ["all_gather", "gather", "scatter", "reduce_scatter"])
def test_blocks_go_where_the_definition_says(kind: str) -> None:
    world, blocks = 3, (0, 2, 5)
    call = Call(kind, "float32", blocks, "sum", root=2)
    given = [reference.given(call, rank, world).tolist() for rank in range(world)]
    together = [number for numbers in given for number in numbers]
    total = [sum(each) for each in zip(*given, strict=False)]
    for rank in range(world):
        own = slice(sum(blocks[:rank]), sum(blocks[: rank + 1]))
        definition = {
            "all_gather": together,
            "gather": together if rank == call.root else None,
            "scatter": given[2][own],
            "reduce_scatter": total[own],
        }[kind]
        found = reference.expected(call, rank, world)
        assert (None if found is None else found.tolist()) == definition


def test_an_all_to_all_exchanges_the_blocks_of_pairs() -> None:
    call = Call("all_to_all", "float32", (1, 2, 3, 4))  # rank 0 sends 1 and 2, rank 1 3 and 4
    one, other = (reference.given(call, rank, 2) for rank in range(2))
    assert (len(one), len(other)) == (3, 7)
    got = [reference.expected(call, rank, 2) for rank in range(2)]
    assert [np.asarray(each).tolist() for each in got] == [
        [*one[:1], *other[:3]],
        [*one[1:], *other[3:]],
    ]
    assert (reference.sends(call, 1, 2), reference.receives(call, 1, 2)) == ((3, 4), (2, 4))


# --- what is found to be wrong


class Arena:
    """What stands for a group: ordinary memory, and a rank of two."""

    rank, world_size = 0, 2

    def empty(self, count: int, dtype: Any, *, device: str) -> Any:
        if isinstance(dtype, torch.dtype):
            return torch.empty(count, dtype=dtype)
        return np.empty(count, dtype)


GROUP = cast("allfold.Group", Arena())


@pytest.mark.parametrize("memory", ["arena", "plain", "offset", "strided", "array"])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool"])
def test_a_wrong_element_is_found_and_so_is_one_beside_the_tensor(memory: str, dtype: str) -> None:
    numbers = np.array([1, 0, 1, 1, 0])
    tensor = Tensor(memory, len(numbers), dtype, GROUP, Host())
    assert tensor.count_wrong(numbers) == len(numbers)  # still poisoned
    assert tensor.count_wrong(None) == 0
    tensor.fill(tensor.staged(numbers))
    assert tensor.count_wrong(numbers) == 0
    assert tensor.count_wrong(None) == len(numbers)
    tensor.fill(tensor.staged(1 - numbers))
    assert tensor.count_wrong(numbers) == len(numbers)
    if memory == "offset":
        tensor.fill(tensor.staged(numbers))
        tensor._base[0] = 1
        assert tensor.count_wrong(numbers) == 1


def test_one_wrong_element_of_a_long_all_reduce_is_found() -> None:
    workload = AllReduce(4 * (2 * PERIOD + 5), ["plain"], GROUP, Host(), None)
    workload.reset("plain")
    tensor = workload._tensors["plain"]
    assert torch.equal(tensor[:5], tensor[-5:])
    tensor += tensor_of_the_other(len(tensor))
    assert workload.count_wrong("plain", 1) == 0
    tensor *= 2
    assert workload.count_wrong("plain", 2) == 0
    tensor[-1] += 1
    tensor[PERIOD] = torch.nan
    assert workload.count_wrong("plain", 2) == 2


def tensor_of_the_other(count: int) -> torch.Tensor:
    """What rank 1 brings."""
    other = Arena()
    other.rank = 1
    workload = AllReduce(4 * count, ["plain"], cast("allfold.Group", other), Host(), None)
    workload.reset("plain")
    return workload._tensors["plain"]


# --- the report


def timing(part: str, shape: str, size: int, name: str, seconds: float, wrong: int = 0) -> Timing:
    figures = Figures(seconds, seconds / 2, seconds * 2, 10, wrong, 0.0)
    return Timing(part, Shape.parse(shape), size, name, "ipc", figures)


def full_report() -> Report:
    """As many lines as a run with defaults prints."""
    found = Report(device={"name": "a card", "torch": "2.11"}, environment={"cores": 16})
    found.copy = {"size": GIB, "seconds": 1e-3, "least": 9e-4, "rate": 2 * GIB / 1e-3, "wrong": 0}
    for setting in plan.settings(plan.shapes([2, 4], [1, 2]), PATHS):
        found.checks.append(Check(str(setting), 182, 0, [], 1.0))
    for name in plan.OURS:
        found.timings.append(timing("bandwidth", "1x4", GIB, name, 5e-3))
    names = (*plan.OURS, *plan.OTHERS)
    for shape in ("1x2", "2x1", "1x4", "2x2"):
        found.timings += [timing("latency", shape, 4096, name, 1e-4) for name in names]
    for shape in ("1x4", "2x2"):
        for size in plan.SIZES:
            found.timings += [timing("sweep", shape, size, name, 1e-3) for name in names]
    for dtype in ("float32", "bfloat16"):
        for in_place in (False, True):
            for grid in plan.GRIDS:
                row = {"dtype": dtype, "in_place": in_place, "grid": grid, "wrong": 0}
                found.kernel.append(row | {"rate": GIB / 1e-3, "seconds": 8e-3, "least": 8e-3})
    return found


def test_the_rate_is_held_against_a_plain_copy() -> None:
    found = full_report()
    assert found.timings[0].rate == pytest.approx(8 * GIB / 5e-3)
    assert found.ratio(found.timings[0].rate) == pytest.approx(0.8)
    row = next(line for line in report.lines(found) if line.startswith("arena"))
    assert "80.0%" in row
    assert row.endswith(f"reaches {TARGET:.0%}")
    found.timings[0] = timing("bandwidth", "1x4", GIB, "arena", 8e-3)
    (below,) = [line for line in report.lines(found) if line.endswith(f"BELOW {TARGET:.0%}")]
    assert below.startswith("arena")


def test_a_tensor_that_is_copied_as_well_is_not_held_against_the_target() -> None:
    found = full_report()
    found.timings = [timing("bandwidth", "1x4", GIB, "plain", 80e-3)]
    (row,) = [line for line in report.lines(found) if line.startswith("plain  ")]
    assert row.rstrip().endswith("5.0%")


def test_the_table_of_a_whole_run_is_short() -> None:
    found = full_report()
    found.failures = ["x" * 240] * 30
    bad = [f"rank 0: {each}: 1" for each in plan.calls(4, quick=True)]
    found.checks = [Check(each.setting, 182, 9, bad, 1.0) for each in found.checks]
    assert len("\n".join(report.lines(found))) < 12_000


def test_the_verdict_is_the_last_line() -> None:
    found = full_report()
    assert found.is_good
    assert list(report.lines(found))[-1] == "benchmarks.gpu: good: 0 elements wrong, 0 failures"
    found.timings.append(timing("sweep", "1x4", 4096, "plain", 1e-3, wrong=3))
    assert "NOT GOOD: 3 elements wrong" in list(report.lines(found))[-1]


@pytest.mark.parametrize(
    "fault",
    [
        {"failures": ["check 1x2: rank 0 has ended"]},
        {"left_out": ["sweep"]},
        {"sanitizer": {"node0": 1}},
        {"copy": {"wrong": 1}},
        {"checks": [Check("1x2 ipc", 3, 7, ["rank 0: a call: 7"], 1.0)]},
    ],
)
def test_whatever_is_wrong_or_missing_spoils_the_verdict(fault: dict[str, Any]) -> None:
    assert not Report(**fault).is_good


def test_a_traceback_becomes_one_line() -> None:
    text = (
        "rank 1 failed:\nTraceback (most recent call last):\n  File x\nValueError: no\n\nnode0 last"
    )
    assert report.summary(text) == "rank 1 failed: ValueError: no"
    assert report.summary("ranks [0]: 'run' was not done") == "ranks [0]: 'run' was not done"


def test_a_report_is_written_with_its_verdict(tmp_path: Path) -> None:
    full_report().write(tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["good"], found["wrong"], found["timings"][0]["size"]) == (True, 0, GIB)


# --- compute-sanitizer


def test_the_findings_are_those_of_the_summary() -> None:
    head = "========= COMPUTE-SANITIZER\n"
    assert sanitizer.count(f"{head}========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitizer.count(f"{head}========= ERROR SUMMARY: 12 errors\n") == 12
    racecheck = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    assert sanitizer.count(head + racecheck) == 2
    assert sanitizer.count(head) is None


def test_where_there_is_no_sanitizer_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(BenchmarkFailed, match="no compute-sanitizer"):
        sanitizer.find()


@pytest.mark.parametrize(
    ("command", "is_agent"),
    [
        ([sys.executable, "-c", "input()", "allfold_agent"], True),
        ([sys.executable, "-c", "input()", "another"], False),
        (["sh", "-c", "read line", sys.executable, "-m", "allfold_agent"], False),
    ],
    ids=["agent", "another", "helper"],
)
def test_an_agent_is_told_to_end_and_no_helper_of_the_tool(
    command: list[str], is_agent: bool
) -> None:
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert sanitizer._agents_of(child.pid) == ([child.pid] if is_agent else [])
        finally:
            child.kill()


# --- the packed folder


def wheel(folder: Path, name: str, *requires: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {x}" for x in requires)]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")


def test_torch_and_numpy_are_not_packed_and_nor_are_our_own_packages() -> None:
    project = {
        "dependencies": ["allfold-core==1", "torch>=2", "numpy", "httpx>=0.27"],
        "optional-dependencies": {"cli": ["rich"], "cuda12": ["cuda-bindings<13"], "x": ["y"]},
    }
    found = wheels.outer_requirements([project], ["cli"])
    assert [str(each) for each in found] == ["httpx>=0.27", "rich"]
    asked = wheels.outer_requirements([project], ["cuda12"])
    assert [each.name for each in asked] == ["httpx", "cuda-bindings"]


def test_what_the_target_needs_and_this_python_does_not_is_missed(tmp_path: Path) -> None:
    wheel(tmp_path, "one", 'two[extra]; python_version >= "3.12"', 'old; python_version < "3.12"')
    wheel(tmp_path, "two", "torch", 'three>=1; extra == "extra"', 'four; extra == "other"')
    assert wheels.missing(tmp_path, "3.12") == [Requirement("three>=1")]
    assert [each.name for each in wheels.missing(tmp_path, "3.11")] == ["old"]


def test_a_folder_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="is there already"):
        pack.pack(tmp_path, "3.12", [])


# --- for real


@pytest.mark.slow
def test_every_call_is_right_on_tensors_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--without-gpu", "--quick", "--ranks", "2", "--agents", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu", *options, "--output", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert (found["good"], found["wrong"]) == (True, 0)
    assert [check["calls"] for check in found["checks"]] == [len(plan.calls(2, quick=True))]
    assert done.stdout.splitlines()[-1].startswith("benchmarks.gpu: good")


@pytest.mark.slow
def test_where_there_is_no_gpu_one_line_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu", "--ranks", "2", "--agents", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "no NVIDIA GPU on this machine" in line
