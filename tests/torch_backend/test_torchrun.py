"""torchrun starts the ranks, on a machine where an agent runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.services import ROOT, Services

from allfold.cli._processes import Child, stop_all, wait_for

SECONDS = 200.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_a_training_runs_under_torchrun_with_a_running_agent(
    services: Services, options: list[str]
) -> None:
    script = str(ROOT / "examples" / "train_ddp.py")
    # A store of its own, on a port that is free.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, script, "--epochs", "1", *options]
    here = {"ALLFOLD_SOCKET": services.socket_of("node1"), "TMPDIR": str(services.folder)}
    log, log_of_agent = services.folder / "torchrun.log", services.folder / "node1.log"
    before = log_of_agent.read_text().count(" 2 ranks")
    with log.open("wb") as out:
        env = services.environment() | here
        torchrun = Child("torchrun", command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        assert wait_for([torchrun], SECONDS), f"it hangs\n{log.read_text()}"
    finally:
        # It has to end the ranks, which lead sessions of their own.
        stop_all([torchrun], grace=30.0)
    text = log.read_text()
    assert torchrun.status == 0, text
    assert " on allfold: ok accuracy=0." in text
    assert log_of_agent.read_text().count(" 2 ranks") > before
