"""Scripts that ask for another backend, and are given Allfold by ``ALLFOLD_TORCH_REPLACE``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.services import ROOT, Services

READ = """
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig
print(*map(dist.Backend, ["gloo", "NCCL", "mpi"]), BackendConfig("cpu:gloo,cuda:nccl"))
"""


def test_the_backends_that_are_named_are_replaced_and_no_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env=os.environ | {"ALLFOLD_TORCH_REPLACE": "Gloo, gloop,NCCL"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["allfold", "allfold", "mpi", "cpu:allfold,cuda:allfold"]
    assert "names 'gloop', which is no backend of this torch" in done.stderr


ALONE = """
import os, sys, torch.distributed as dist
dist.is_nccl_available = dist.distributed_c10d.is_nccl_available = lambda: "nccl" in sys.argv
for name in ("gloo", "nccl", "allfold"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    answers = dist.get_backend(), dist.get_backend(dist.new_group()), dist.group.WORLD.name()
    print(*answers, dist.get_backend() == name)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("has", "answer"), [("nccl", "nccl nccl"), ("no", "allfold allfold")])
def test_a_group_answers_the_name_that_the_script_compares_it_with(
    services: Services, has: str, answer: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, has],
        env=services.env
        | {"ALLFOLD_SOCKET": services.socket_of("node0"), "ALLFOLD_TORCH_REPLACE": "gloo,nccl"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "gloo gloo allfold True",
        f"{answer} allfold {has == 'nccl'}",
        "allfold allfold allfold True",
    ], done.stderr


ASKS = """
import os, torch, torch.distributed as dist
dist.init_process_group()
groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
groups.append(dist.new_group(backend="cpu:gloo,cuda:nccl"))
tensor = torch.full((3,), float(dist.get_rank() + 1))
for group in groups:
    dist.all_reduce(tensor, group=group)
names = [group._get_backend(torch.device("cpu")).name() for group in groups]
asked = [dist.get_backend(group) for group in groups]
dist.monitored_barrier(groups[1])
os.write(1, f"{names} {asked} {tensor.tolist()}\\n".encode())  # at once: both share the pipe
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_for_other_backends_runs_unchanged(services: Services, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script)],
        env=services.env
        | {"ALLFOLD_SOCKET": services.socket_of("node0"), "ALLFOLD_TORCH_REPLACE": "gloo,nccl"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = ["undefined", "gloo", "cpu:gloo,cuda:nccl"]
    assert done.stdout.count(f"{['allfold'] * 3} {asked} [12.0, 12.0, 12.0]") == 2, done.stdout
