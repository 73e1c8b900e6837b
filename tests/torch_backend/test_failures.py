"""Errors reach the training script as exceptions: never as values, never as an endless wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.cli import Commands, commands
from tests.support.processes.ranks import results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until
from tests.torch_backend import failing_programs as programs
from tests.torch_backend.conftest import PROGRAM_SECONDS, TorchJob

# Half of the time after which ops fail by themselves; generous, because the machine may be busy.
ENDS_WITHIN_SECONDS = 10.0
# Where ops have torch's own 30 minutes: less than the patience of the command.
AT_ONCE_SECONDS = 30.0


@pytest.fixture
def cli() -> Iterator[Commands]:
    with commands() as running:
        yield running


def test_a_mismatch_raises_on_every_rank_however_it_waits(torch_job: TorchJob) -> None:
    for messages in torch_job.run(programs.different_shapes):
        for way, message in messages.items():
            assert "MismatchError" in message, (way, message)
            assert "float32[3]" in message, (way, message)
            assert "float32[4]" in message, (way, message)


def test_what_cannot_work_is_refused_at_the_call(two_nodes: TorchJob) -> None:
    for messages in two_nodes.run(programs.refused):
        assert all(message.startswith("InvalidArgument") for message in messages), messages


def test_an_aborted_sub_group_fails_what_is_in_flight_at_once(two_nodes: TorchJob) -> None:
    (message, seconds, _), *others, _ = two_nodes.run(programs.abort_a_sub_group)
    assert "PeerLost" in message, message
    assert "which left the group while ops of its own were in flight" in message, message
    assert seconds < ENDS_WITHIN_SECONDS
    assert all("PeerLost" in elsewhere for _, _, elsewhere in others), others


def test_backward_raises_when_an_agent_dies(
    two_nodes: TorchJob, services: Services, tmp_path: Path
) -> None:
    calls = two_nodes.start(programs.train_for_ever, folder=str(tmp_path))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, "all ranks train", PROGRAM_SECONDS)
    services.kill_agent("node1")
    messages = results(calls)
    services.restart_dead_agents()
    assert all("PeerLost" in message for message in messages[:2]), messages
    assert all("AgentLost" in message for message in messages[2:]), messages


# Registered first, the function at exit is called last.
SCRIPT = """
import atexit, os, time
atexit.register(lambda: print("ended", time.monotonic(), flush=True))
import torch
import torch.distributed as dist
import allfold.torch
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("allfold")
rank = dist.get_rank()
other = dist.new_group()
model = DistributedDataParallel(torch.nn.Linear(64, 64))
try:
    for step in range(1000):
        loss = model(torch.ones(2, 64)).sum()
        if step == 5 and rank == 3:
            dist.all_reduce(torch.ones(1), group=other, async_op=True).get_future()
            print("failed", time.monotonic(), flush=True)
            {failure}
        loss.backward()
except RuntimeError as error:
    print("raised", rank, "PeerLost" in str(error), flush=True)
    raise
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("failure", "ends"),
    [
        pytest.param("os._exit(9)", 3, id="dies"),
        pytest.param("raise ValueError('out of luck')", 4, id="raises"),
    ],
)
def test_a_failed_rank_ends_the_others_at_once(
    cli: Commands, services: Services, failure: str, ends: int
) -> None:
    script = cli.script(SCRIPT.format(failure=failure))
    status = 9 if ends == 3 else 1
    agents = services.options_of("node0", "node1")
    # The others end by themselves: the command must not do it, however slow they are.
    arguments = ["run", *agents, "--nproc-per-node", "2", "--grace", "60", str(script)]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cli.folder / "inductor")}  # or else it is left behind
    command = cli.run(*arguments, status=status, env=env)
    (failed,) = re.findall(r"failed ([\d.]+)", command.out)
    ended = re.findall(r"ended ([\d.]+)", command.out)
    assert len(ended) == ends, (command.out, command.err)
    took = max(map(float, ended)) - float(failed)
    assert took < AT_ONCE_SECONDS, (took, command.out, command.err)
    # Not on stderr, where the command folds tracebacks that only follow from the first failure.
    raised = sorted(re.findall(r"raised (\d) (\w+)", command.out))
    assert raised == [(rank, "True") for rank in "012"], (command.out, command.err)
