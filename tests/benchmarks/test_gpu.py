"""The measurements on GPUs, as much of them as a machine without one can try."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.devices import CPU, Device, Host, TorchDevice
from benchmarks.errors import BenchmarkFailed
from benchmarks.gpu import sanitizer
from benchmarks.plan import MODELS
from benchmarks.workloads.training import built
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SECONDS = 100.0
NUMBERS = np.arange(100, dtype=np.float32)


@pytest.fixture(params=["numpy", "torch"])
def device(request: pytest.FixtureRequest) -> Device:
    return Host() if request.param == "numpy" else TorchDevice(CPU)


def test_a_tensor_has_what_was_written_to_it(device: Device) -> None:
    tensor, truth = device.empty(100), device.keep(NUMBERS)
    device.write(tensor, truth)
    assert device.count_wrong(tensor, truth, 0.0) == 0
    assert device.count_wrong(tensor, 2 * truth, 0.0) == 99  # all but the 0


def test_a_wrong_element_is_found_and_so_is_nan(device: Device) -> None:
    tensor, truth = device.empty(100), device.keep(NUMBERS)
    device.write(tensor, truth)
    tensor[3] += 0.25
    assert device.count_wrong(tensor, truth, 0.0) == 1
    assert device.count_wrong(tensor, truth, 0.25) == 0
    tensor[4] = float("nan")
    assert device.count_wrong(tensor, truth, 0.25) == 1


ALONE = """
import sys
from allfold.cli._bench.kinds import KINDS
from benchmarks.devices import CPU, TorchDevice
from benchmarks.libraries.torch_library import join
from benchmarks.plan import BARRIER, BURST, Case
from benchmarks.workloads import take_turn
from benchmarks.workloads.burst import BurstWorkload
from benchmarks.workloads.collective import collective

device = TorchDevice(CPU)
libraries = [join(name, 0, 1, sys.argv[1], 60.0, device) for name in ("gloo", "gloo_host")]
kinds = [kind for kind in KINDS if kind != "send_recv"]  # nobody sends to himself
cases = [Case(kind, 4000) for kind in kinds] + [Case(BARRIER, 0)]
workloads = [collective(case, libraries, device, 0, 1, 1) for case in cases]
workloads.append(BurstWorkload(libraries, device, 0, 1, 1))
for case, workload in zip([*cases, Case(BURST, 0)], workloads):
    for name in workload.contestants:
        times = take_turn(workload, name, 3)
        is_after = all(a < b for a, b in zip(times.calls, times.returns, strict=True))
        print(case.kind, name, len(times.calls), is_after, workload.count_wrong(name, 3))
for library in libraries:
    library.close()
"""


@pytest.mark.long
@pytest.mark.slow
def test_workloads_on_tensors_of_torch_are_timed_and_checked(tmp_path: Path) -> None:
    """As on a GPU, by one rank: in a process of its own, which opens a group of torch."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "store")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(maxsplit=3) for line in done.stdout.splitlines()]
    assert all(row[1:] == ["3", "True", "0"] for row in rows), done.stdout
    names = [row[0] for row in rows]
    assert {"all_to_all gloo", "all_to_all gloo_host", "barrier gloo", "burst gloo async"} <= {
        *names
    }
    assert "barrier gloo_host" not in names


def test_a_model_has_the_gradients_that_the_plan_says() -> None:
    model = MODELS[0]
    assert 4 * sum(each.numel() for each in built(model).parameters()) == model.size


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
            arguments = Path(f"/proc/{child.pid}/cmdline")
            wait_until(arguments.read_bytes, "the command has begun")
            assert sanitizer._agents_of(child.pid) == ([child.pid] if is_agent else [])
        finally:
            child.kill()
