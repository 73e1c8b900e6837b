"""torchrun starts the ranks, on a machine where an agent runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allfold_cluster.processes import Child, stop_all, wait_for
from tests.support.processes.services import ROOT, Services
from tests.support.tiers import long

SECONDS = 200.0


def run_by_torchrun(services: Services, *arguments: str) -> str:
    """Return the output of torchrun and its two ranks, on the machine of the second agent."""
    # A store of its own, on a port that is free.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = {"ALLFOLD_SOCKET": services.socket_of("node1"), "TMPDIR": str(services.folder)}
    log = services.folder / "torchrun.log"
    with log.open("wb") as out:
        env = services.env | here
        command = [sys.executable, *launcher, *arguments]
        torchrun = Child("torchrun", command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        assert wait_for([torchrun], SECONDS), f"it hangs\n{log.read_text()}"
    finally:
        # It has to end the ranks, which lead sessions of their own.
        stop_all([torchrun], grace=30.0)
    text = log.read_text()
    assert torchrun.status == 0, text
    return text


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_a_training_runs_under_torchrun_with_a_running_agent(services: Services) -> None:
    script = str(ROOT / "examples" / "train_ddp.py")
    log_of_agent = services.folder / "node1.log"
    before = log_of_agent.read_text().count(" 2 ranks")
    text = run_by_torchrun(services, script, "--epochs", "1")
    assert " on allfold: ok accuracy=0." in text
    assert log_of_agent.read_text().count(" 2 ranks") > before


DIES_AT_FIRST = """
import os, sys
if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[1] + "0":
    import torch.distributed as dist
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    # The other has come, and waits.
    store.wait([f"default_pg/0//cpu//allfold/visit/{1 - int(sys.argv[1])}"])
    os._exit(3)
import torch, torch.distributed as dist
dist.init_process_group("allfold")
tensor = torch.ones(1)
dist.all_reduce(tensor)
os.write(1, f"sum {tensor.item()}\\n".encode())  # at once: both ranks share the pipe
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("dead", ["0", long("1")])
def test_ranks_meet_after_one_died_before_the_group_was_open(
    services: Services, tmp_path: Path, dead: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DIES_AT_FIRST)
    text = run_by_torchrun(services, "--max-restarts", "1", str(script), dead)
    assert text.count("sum 2.0") == 2, text


DIES_IN_THE_MIDDLE = """
import os, signal
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("allfold")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(10):
    if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10" and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
os.write(1, b"done\\n")  # at once: both ranks share the pipe
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_all_ranks_train_again_on_the_same_agent_after_one_was_killed_in_the_middle(
    services: Services, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DIES_IN_THE_MIDDLE)
    text = run_by_torchrun(services, "--max-restarts", "1", str(script))
    assert text.count("done") == 2, text
