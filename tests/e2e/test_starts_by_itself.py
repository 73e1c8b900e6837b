"""Jobs on machines where nothing of Allfold runs: they start what they need, and leave nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from allfold_cluster.environment import free_port
from allfold_cluster.network import Network, why_not
from allfold_cluster.network.links import address, connected
from allfold_cluster.network.namespaces import Namespaces, entered
from allfold_cluster.processes import Child, stop_all, wait_for
from chaos.home import Home
from chaos.starts import HELD
from tests.support.credentials import certificates
from tests.support.require import required
from tests.support.tiers import long
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECONDS = 120.0
GONE_SECONDS = 10.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TWO_HERE = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")

SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("allfold")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
os.write(1, f"sum {tensor.tolist()}\\n".encode())  # at once: ranks share the pipe
dist.destroy_process_group()
"""

SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, path):
    dist.init_process_group("allfold", init_method=f"file://{path}", rank=rank, world_size=2)
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    os.write(1, f"sum {tensor.tolist()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (os.path.join(os.environ["TMPDIR"], "store"),), nprocs=2)
"""

ALONE = """
import os, sys
import numpy as np
import allfold
allfold.init()
array = np.full(3, allfold.rank() + 1.0)
allfold.all_reduce(array)
os.write(1, f"sum {array.tolist()}\\n".encode())
sys.stdin.read()
allfold.shutdown()
"""

FAILS_AT_FIRST = """
import os, torch.distributed as dist
dist.init_process_group("allfold")
if os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10":
    raise RuntimeError("the first attempt fails")
""" + SUM.replace('dist.init_process_group("allfold")', "")

NEVER_ENDS = """
import os, torch, torch.distributed as dist
dist.init_process_group("allfold")
tensor = torch.ones(1 << 20)  # by the agent: ranks of a node do small ones by themselves
dist.all_reduce(tensor)
os.write(1, b"ready\\n")
while True:
    dist.all_reduce(tensor.fill_(1.0))
"""

# What scripts do where no torchrun has numbered them.
MAPPED = (
    """
import os
for name, known in {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}.items():
    os.environ[name] = next(os.environ[each] for each in known if each in os.environ)
"""
    + SUM
)

RIGHT = "sum [3.0, 3.0, 3.0]"


class Launched:
    """A process with all that it starts, and what they write."""

    def __init__(
        self, home: Home, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = home.folder / f"{os.urandom(4).hex()}.log"
        with self.log.open("wb") as out:
            self.child = Child(
                "job",
                command,
                env=home.environment() | dict(variables or {}),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._stdin = self.child._process.stdin

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_end()
        stop_all([self.child], grace=30.0)  # a launcher has to end ranks that lead sessions

    @property
    def text(self) -> str:
        return self.log.read_text()

    def let_end(self) -> None:
        """End what it reads."""
        assert self._stdin is not None
        self._stdin.close()

    def await_text(self, text: str, times: int = 1) -> None:
        """Wait until it has written this."""
        wait_until(lambda: self.text.count(text) >= times or self.child.ended, f"{text!r}", SECONDS)
        assert self.text.count(text) >= times, self.text

    def finish(self, status: int = 0) -> str:
        """Return all that it has written, once it has ended so."""
        self.let_end()
        assert wait_for([self.child], SECONDS), f"it hangs\n{self.text}"
        assert self.child.reap() == status, self.text
        return self.text


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as home:
        yield home


def script(home: Home, text: str) -> str:
    path = home.folder / f"{os.urandom(4).hex()}.py"
    path.write_text(text)
    return str(path)


def assert_nothing_is_left(*homes: Home) -> None:
    try:
        wait_until(lambda: not any(each.left() for each in homes), "it is gone", GONE_SECONDS)
    except TimeoutError as error:
        raise AssertionError([each.left() for each in homes]) from error


# --- torch


def test_torchrun_where_nothing_runs_gives_the_right_sum_and_leaves_nothing(home: Home) -> None:
    with Launched(home, [*TWO_HERE, script(home, SUM)]) as job:
        text = job.finish()
    assert text.count(RIGHT) == 2, text
    assert "waiting up to" not in text
    assert_nothing_is_left(home)


@pytest.mark.long
def test_processes_that_torch_spawns_do_the_same(home: Home) -> None:
    with Launched(home, [sys.executable, script(home, SPAWN)]) as job:
        assert job.finish().count(RIGHT) == 2
    assert_nothing_is_left(home)


@pytest.mark.long
def test_a_second_attempt_of_torchrun_has_services_after_one_rank_has_failed(home: Home) -> None:
    with Launched(home, [*TWO_HERE, "--max-restarts", "1", script(home, FAILS_AT_FIRST)]) as job:
        text = job.finish()
    assert "RuntimeError: the first attempt fails" in text
    assert text.count(RIGHT) == 2, text
    assert_nothing_is_left(home)


@pytest.mark.long
def test_two_jobs_of_torchrun_at_once_never_meet(home: Home) -> None:
    command = [*TWO_HERE, script(home, SUM)]
    with Launched(home, command) as first, Launched(home, command) as second:
        assert [each.finish().count(RIGHT) for each in (first, second)] == [2, 2]
    assert_nothing_is_left(home)


@pytest.mark.long
def test_a_rank_whose_own_agent_is_killed_is_told_how_it_ended(home: Home) -> None:
    with Launched(home, [*TWO_HERE, script(home, NEVER_ENDS)]) as job:
        job.await_text("ready", 2)
        for agent in home.agents:
            os.kill(agent, signal.SIGKILL)
        text = job.finish(status=1)
    assert "AF403 AgentLost" in text
    assert re.search(r"the ops in flight are lost; \S+ was killed by SIGKILL", text), text
    assert_nothing_is_left(home)


# --- without torch


def ranks(home: Home, variables: Sequence[Mapping[str, str]], *before: str) -> list[Launched]:
    path = script(home, ALONE)
    return [Launched(home, [*before, sys.executable, path], each) for each in variables]


BY_HAND = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]


def test_processes_that_are_numbered_by_hand_meet_and_commands_find_their_services(
    home: Home,
) -> None:
    with ExitStack() as ending:
        started = [ending.enter_context(each) for each in ranks(home, BY_HAND)]
        for each in started:
            each.await_text(RIGHT)
        shown = said(home, "status")
        assert re.search(r"default +│ ready", shown), shown
        logs = [line[6:] for line in shown.splitlines() if line.startswith("logs: ")]
        assert len(logs) == 3, shown
        assert {"orchestrator.log", "supervisor.log"} < {Path(each).name for each in logs}
        assert all(Path(each).exists() for each in logs)
        assert json.loads(said(home, "status", "--json"))["logs"] == logs
        diagnosis = said(home, "doctor")
        assert re.search(
            r"agent socket, this machine: job:\w+: \S+ \(.*\) leads to node", diagnosis
        )
        assert re.search(r"orchestrator, orchestrator: \S+ answers", diagnosis), diagnosis
        for each in started:
            each.finish()
    assert_nothing_is_left(home)


TO_A_FILE = """
import pathlib
import numpy as np
import allfold
allfold.init()
total = allfold.all_reduce(np.full(3, allfold.rank() + 1.0))
pathlib.Path(f"{__file__}.{allfold.rank()}").write_text(f"sum {total.tolist()}")
allfold.shutdown()
"""


@pytest.mark.parametrize("closed", [">&- 2>&-", long("<&- >&-"), long("<&- >&- 2>&-")])
def test_ranks_without_standard_streams_meet(home: Home, closed: str) -> None:
    """As a daemon's: what they open has the numbers of these."""
    path = script(home, TO_A_FILE)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, path]
    with ExitStack() as ending:
        for each in [ending.enter_context(Launched(home, command, each)) for each in BY_HAND]:
            each.finish()
    assert [Path(f"{path}.{rank}").read_text() for rank in range(2)] == [RIGHT] * 2
    assert_nothing_is_left(home)


@pytest.mark.long
def test_ranks_that_no_launcher_names_are_told_who_meets_if_one_does_not_come(home: Home) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "ALLFOLD_INIT_TIMEOUT": "10"}
    (rank,) = ranks(home, [variables])
    with rank:
        text = rank.finish(status=1)
    assert "rank 1 of 2 did not come" in text
    assert f"the ranks that one process has started, here number {os.getpid()}" in text
    assert "the same MASTER_ADDR and MASTER_PORT" in text


def tls(home: Home) -> dict[str, str]:
    """Return the variable of a user with a certificate."""
    return {"ALLFOLD_TLS_DIR": str(certificates(home.folder / "certs", "node").path / "node")}


def test_with_a_certificate_all_services_of_a_job_speak_tls(home: Home) -> None:
    own = tls(home)
    with ExitStack() as ending:
        started = [ending.enter_context(each) for each in ranks(home, [x | own for x in BY_HAND])]
        for each in started:
            each.await_text(RIGHT)
        shown = said(home, "status", variables=own)
        assert re.search(r"default +│ ready", shown), shown
        assert "https://127.0.0.1" in shown, "the control port of the agent"
        refused = said(home, "status", code=3)
        assert "tried https://127.0.0.1" in refused
        assert "ALLFOLD_TLS_DIR is not set here" in refused
        for each in started:
            each.finish()
    assert_nothing_is_left(home)


@pytest.mark.long
def test_a_folder_without_a_certificate_is_named_at_once(home: Home) -> None:
    variables = {"ALLFOLD_TLS_DIR": str(home.folder / "none"), "ALLFOLD_INIT_TIMEOUT": "600"}
    (rank,) = ranks(home, [variables])
    with rank:
        text = rank.finish(status=1)
    assert f"cannot read {home.folder}/none/tls.crt: No such file or directory" in text
    assert_nothing_is_left(home)


def said(
    home: Home, *arguments: str, code: int = 0, variables: Mapping[str, str] | None = None
) -> str:
    """Return what a command writes."""
    done = subprocess.run(
        [sys.executable, "-m", "allfold.cli", *arguments],
        env=home.environment() | {"COLUMNS": "200"} | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_of_several_jobs_a_command_wants_to_know_which(home: Home) -> None:
    """Two single processes of one parent are two jobs."""
    with ExitStack() as ending:
        both = [ending.enter_context(each) for each in ranks(home, [{}, {}])]
        for each in both:
            each.await_text("sum [1.0, 1.0, 1.0]")
        refusal = said(home, "status", code=2)
        assert "2 jobs have services of their own on this machine" in refusal
        names = set(re.findall(r"job:\w+", refusal))
        assert len(names) == 2
        for name in names:
            assert "default" in said(home, "status", "--orchestrator", name)
        diagnosis = said(home, "doctor", "--local")
        assert names == set(re.findall(r"job:\w+", diagnosis)), diagnosis
        for each in both:
            each.finish()
    assert "no job 'job:x'" in said(home, "status", "--orchestrator", "job:x", code=2)
    assert_nothing_is_left(home)


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SLURM_HERE = SLURM | {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1"}
LAUNCHERS = {
    "slurm": [
        SLURM_HERE | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)
    ],
    "open mpi": [
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        for rank in range(2)
    ],
}
MPICH = (str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable)


@pytest.mark.long
@pytest.mark.parametrize("code", [ALONE, MAPPED], ids=["without torch", "torch"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_other_launchers_meet_though_each_has_a_parent_of_its_own(
    home: Home, launcher: str, code: str
) -> None:
    own_parent = ("sh", "-c", '"$@"; exit $?', "sh")
    command = [*own_parent, sys.executable, script(home, code)]
    store = address_of_the_store(code)
    with ExitStack() as ending:
        started = [
            ending.enter_context(Launched(home, command, variables | store))
            for variables in LAUNCHERS[launcher]
        ]
        for each in started:
            assert RIGHT in each.finish()
    assert_nothing_is_left(home)


def address_of_the_store(code: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if code is MAPPED else {}


@pytest.mark.long
@pytest.mark.parametrize("code", [ALONE, MAPPED], ids=["without torch", "torch"])
def test_ranks_that_mpiexec_starts_meet(home: Home, code: str) -> None:
    path = script(home, code.replace("sys.stdin.read()", ""))  # rank 1 would never see its end
    with Launched(home, [*MPICH, path], address_of_the_store(code)) as job:
        assert job.finish().count(RIGHT) == 2
    assert_nothing_is_left(home)


@pytest.mark.long
def test_tasks_of_slurm_on_several_machines_are_told_at_once_how_they_can_meet(home: Home) -> None:
    variables = SLURM | {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0"}
    (rank,) = ranks(home, [variables])
    with rank:
        text = rank.finish(status=1)
    assert "the ranks of this job are on several machines" in text
    assert "Set ALLFOLD_ORCHESTRATOR_URL" in text
    assert_nothing_is_left(home)


def test_a_port_after_the_masters_that_another_process_has_is_named_at_once(home: Home) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"ALLFOLD_TOKEN": "ours", "ALLFOLD_INIT_TIMEOUT": "600"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
        (rank,) = ranks(home, [variables])
        with rank:
            text = rank.finish(status=1)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use." in text
    assert "MASTER_PORT (it is the port after that one)" in text
    assert_nothing_is_left(home)


def test_never_means_that_nothing_is_started(home: Home) -> None:
    variables = {"ALLFOLD_START": "never", "ALLFOLD_INIT_TIMEOUT": "0.1"}
    (rank,) = ranks(home, [variables])
    with rank:
        text = rank.finish(status=1)
    assert "AF402 AgentUnreachable" in text
    assert not (home.folder / "allfold").exists()


# --- one process, several jobs


IN_TORCH = """
import torch, torch.distributed as dist
before = held()
for _ in range(3):
    dist.init_process_group("allfold", store=dist.HashStore(), rank=0, world_size=1)
    for size in (3, 1 << 20):
        dist.all_reduce(torch.ones(size))
    dist.destroy_process_group()
    assert held() == before, held() - before
"""

WITHOUT_TORCH = """
import allfold, numpy as np
before = held()
for _ in range(3):
    group = allfold.init(rank=0, world_size=1)
    for size in (3, 1 << 20):
        allfold.all_reduce(np.ones(size))
    allfold.shutdown()
    assert held() == before, held() - before
"""


@pytest.mark.parametrize("code", [IN_TORCH, long(WITHOUT_TORCH)], ids=["torch", "without torch"])
def test_a_process_that_has_left_its_jobs_keeps_no_descriptor_and_no_memory_of_them(
    home: Home, code: str
) -> None:
    with Launched(home, [sys.executable, script(home, HELD + code)]) as process:
        process.finish()
    assert_nothing_is_left(home)


# --- two machines


FAST = Network.parse("1gbit")


@pytest.fixture
def machines() -> Iterator[Sequence[tuple[str, Home]]]:
    """Return two machines: their network namespaces, and a home on each."""
    if reason := why_not([FAST]):
        if "docker" in required():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with Namespaces(2) as spaces, connected(FAST, spaces), Home() as first, Home() as second:
        yield list(zip(spaces.nodes, (first, second), strict=True))


def launch(
    machine: tuple[str, Home], command: Sequence[str], variables: Mapping[str, str] | None = None
) -> Launched:
    space, home = machine
    with entered(space):
        return Launched(home, command, variables)


@pytest.mark.parametrize("how", ["static", long("rendezvous"), long("tls")])
def test_torchrun_on_two_machines_sums_over_both_and_leaves_nothing_on_either(
    machines: Sequence[tuple[str, Home]], how: str
) -> None:
    port, own = free_port(), tls(machines[0][1]) if how == "tls" else None
    with ExitStack() as ending:
        jobs = []
        for number, machine in enumerate(machines):
            options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
            if how != "rendezvous":
                options += ["--master-addr", address(0), "--master-port", str(port)]
            else:
                options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{port}"]
                options += ["--rdzv-conf", f"is_host={number == 0}"]  # both have one hostname
                options += ["--local-addr", address(number)]
            command = [*TORCHRUN, *options, script(machine[1], SUM)]
            jobs.append(ending.enter_context(launch(machine, command, own)))
        for job in jobs:
            assert RIGHT in job.finish()
    assert_nothing_is_left(*(home for _, home in machines))


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_of_two_machines_with_a_token_and_no_torch_meet_beside_the_masters_port(
    machines: Sequence[tuple[str, Home]], first: int
) -> None:
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "ALLFOLD_TOKEN": "ours"}
    shared |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(free_port())}
    with ExitStack() as ending:
        jobs = []
        for number in (first, 1 - first):
            command = [sys.executable, script(machines[number][1], ALONE)]
            job = launch(machines[number], command, shared | {"RANK": str(number)})
            jobs.append(ending.enter_context(job))
        for job in jobs:
            job.await_text(RIGHT)
        # The orchestrator's machine has no rank any more, and the other one has.
        jobs[first].finish()
        assert RIGHT in jobs[1 - first].finish()
    assert_nothing_is_left(*(home for _, home in machines))


@pytest.mark.long
def test_on_two_machines_with_the_masters_address_on_loopback_the_ranks_say_what_to_set(
    machines: Sequence[tuple[str, Home]],
) -> None:
    """Each has its own idea of a name: a store of files lets them come so far."""
    shared = machines[0][1].folder / "store"
    code = SUM.replace(
        '("allfold")', f'("allfold", init_method="file://{shared}", rank=RANK, world_size=2)'
    )
    with ExitStack() as ending:
        jobs = []
        for number, machine in enumerate(machines):
            path = script(machine[1], code.replace("RANK", str(number)))
            variables = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}
            jobs.append(ending.enter_context(launch(machine, [sys.executable, path], variables)))
        for job in jobs:
            text = job.finish(status=1)
            assert "this rank is on another machine" in text
            assert "Set MASTER_ADDR on all ranks" in text
    assert_nothing_is_left(*(home for _, home in machines))
