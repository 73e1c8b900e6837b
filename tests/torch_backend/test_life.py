"""Programs as users start them; those of torch know nothing of Allfold but the backend's name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.cli import commands
from tests.support.processes.services import Services

SECONDS = 120.0

DEFAULT_GROUPS = """
import datetime, torch, torch.distributed as dist

for number in range(3):
    dist.init_process_group("allfold")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    print("sum", tensor.tolist())

dist.init_process_group("allfold")
group = dist.new_group([3, 2, 0], timeout=datetime.timedelta(seconds=3))
dist.barrier()  # so that those who call, call within that time
if dist.get_rank() in (0, 3):
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except Exception as error:
        missing = error.details["missing_ranks"]
        print(f"rank {dist.get_rank()}: {error.code} {missing} {error.__notes__}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def printed(services: Services) -> list[str]:
    """The lines of four ranks on two nodes."""
    with commands() as started:
        shape = (*services.options_of("node0", "node1"), "--nproc-per-node", "2")
        command = started.start("run", *shape, "--no-prefix", started.script(DEFAULT_GROUPS))
        assert command.wait(SECONDS) == 0, command.out + command.err
        return command.out.splitlines()


@pytest.mark.long
@pytest.mark.slow
def test_the_default_group_can_be_opened_again_at_once(printed: list[str]) -> None:
    """Torch's store lives on rank 0 and ends with the group: nobody may meet the others in it."""
    assert printed.count("sum [4.0, 4.0, 4.0]") == 12


@pytest.mark.long
@pytest.mark.slow
def test_an_error_in_a_sub_group_says_who_its_ranks_are_in_the_job(printed: list[str]) -> None:
    told = ["Ranks of this group, in the job: 0 is 0, 1 is 2, 2 is 3."]
    assert sorted(line for line in printed if line.startswith("rank")) == [
        f"rank {rank}: AF302 [1] {told}" for rank in (0, 3)
    ]


@pytest.mark.slow
def test_files_where_a_job_is_started_are_not_mistaken_for_modules_of_the_services(
    tmp_path: Path,
) -> None:
    script = tmp_path / "job" / "script.py"
    script.parent.mkdir()
    script.write_text("print('well')\n")
    (tmp_path / "queue.py").write_text("raise ImportError('not this one')\n")
    command = [str(Path(sys.executable).with_name("allfold")), "run", "--no-prefix", str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
