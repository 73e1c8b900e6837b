"""The services that a job starts for itself, with processes as its ranks.

Each has a home that is empty before, so all that is found there is of these jobs.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic

import pytest

from allfold_cluster.job import JobServices, join, running_jobs
from allfold_core.errors import AgentUnreachable, ServiceError
from chaos.home import Home
from tests.support.descriptors import descriptors
from tests.support.processes.job_rank import JobRank
from tests.support.tiers import long
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ONE, OTHER = JobServices("one", "here"), JobServices("other", "here")
GONE_SECONDS = 10.0
NOBODY = 65534


@pytest.fixture
def home() -> Iterator[Home]:
    with Home() as home:
        yield home


def accepts(agent: Path) -> bool:
    """Return True if a rank can connect to an agent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        try:
            rank.connect(str(agent))
        except OSError:
            return False
    return True


def the_one(pids: list[int]) -> int:
    (pid,) = pids
    return pid


def assert_nothing_is_left(home: Home) -> None:
    try:
        wait_until(lambda: not home.left(), "nothing is left", GONE_SECONDS)
    except TimeoutError as error:
        raise AssertionError(home.left()) from error


# --- together, and not


@pytest.mark.parametrize("ends", ["killed", long("left")])
def test_ranks_of_a_job_meet_the_same_services_those_of_another_never_and_nothing_is_left(
    home: Home, ends: str
) -> None:
    with JobRank(home, ONE) as first, JobRank(home, ONE) as second, JobRank(home, OTHER) as third:
        agent, other = first.agent(), third.agent()
        assert second.agent() == agent
        assert agent.parent != other.parent
        assert accepts(agent)
        assert accepts(other)
        counts = [len(each) for each in (home.supervisors, home.orchestrators, home.agents)]
        assert counts == [2, 2, 2]
        for rank in (first, second, third):
            assert accepts(agent), "they last as long as any of its ranks"
            rank.kill() if ends == "killed" else rank.leave()
        assert_nothing_is_left(home)


@pytest.mark.long
def test_ranks_that_come_together_start_one_of_each(home: Home) -> None:
    ranks = [JobRank(home, ONE) for _ in range(6)]
    try:
        assert len({rank.agent() for rank in ranks}) == 1
        assert len(home.supervisors) == len(home.agents) == len(home.orchestrators) == 1
    finally:
        for rank in ranks:
            rank.kill()
    assert_nothing_is_left(home)


@pytest.mark.long
def test_a_forked_child_of_a_rank_that_lives_on_does_not_keep_the_services(home: Home) -> None:
    with JobRank(home, ONE) as rank:
        rank.agent()
        child = rank.ask("fork")["child"]
        rank.kill()
        wait_until(lambda: home.processes() == [child], "the child alone", GONE_SECONDS)
        assert home.files() == []


@pytest.mark.long
def test_nothing_is_left_of_services_that_wait_for_another_machine_when_nobody_waits_for_them(
    home: Home,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with JobRank(home, JobServices("one", "here", orchestrator=url)) as rank:
            ready = "allfold/jobs/*/here.ready"
            wait_until(lambda: list(home.folder.glob(ready)), "the agent listens")
            rank.kill()
            assert_nothing_is_left(home)


# --- the port of the orchestrator


@pytest.fixture
def at_home(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Make this process one of the home's."""
    for name, value in home.environment().items():
        monkeypatch.setenv(name, value)
    return home


@pytest.mark.usefixtures("at_home")
def test_nobody_can_take_the_port_of_an_orchestrator_that_has_yet_to_start(home: Home) -> None:
    lifeline = join(ONE, "token-of-this-job")
    try:
        host, _, port = lifeline.listen.rpartition(":")
        while not lifeline.agent:
            with socket.socket() as other, pytest.raises(OSError, match="already in use"):
                other.bind((host, int(port)))
            with suppress(AgentUnreachable):  # not yet
                lifeline.await_ready(monotonic() + 0.01)
        (job,) = running_jobs()
        assert job.orchestrator == f"http://{lifeline.listen}"
    finally:
        lifeline.close()
    assert_nothing_is_left(home)


# --- many ranks


def limited(limit: str) -> list[str]:
    """Return a command that becomes another one with a limit of open files."""
    return ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh"]


@pytest.mark.long
@pytest.mark.usefixtures("at_home")
def test_ranks_are_not_limited_by_the_soft_limit_of_open_files_of_the_one_that_came_first(
    home: Home,
) -> None:
    with JobRank(home, ONE, *limited("-Sn 64")) as first:
        agent, supervisor = first.agent(), the_one(home.supervisors)
        before = descriptors(supervisor)
        with ExitStack() as leaving:
            others = [join(ONE, "") for _ in range(64)]
            for each in others:
                leaving.callback(each.close)
                assert each.await_ready(monotonic() + GONE_SECONDS) == str(agent)
            assert descriptors(supervisor) == before + 2 * 64
        wait_until(lambda: descriptors(supervisor) == before, "it keeps nothing of who has left")


@pytest.mark.usefixtures("at_home")
def test_a_rank_for_which_no_open_files_are_left_is_told_so_and_the_others_go_on(
    home: Home,
) -> None:
    with JobRank(home, ONE, *limited("-n 64")) as first, ExitStack() as leaving:
        agent = first.agent()
        others = [join(ONE, "") for _ in range(40)]
        for each in others:
            leaving.callback(each.close)
        come, refused = [], []
        for each in others:
            try:
                come.append(each.await_ready(monotonic() + GONE_SECONDS))
            except ServiceError as error:
                refused.append(error.message)
        assert set(come) == {str(agent)}
        (said,) = {*refused}
        assert said.endswith(
            "takes no more ranks on this machine: each needs two of its open files, of which it "
            "has 34 for ranks already and may have 64 in all; raise the hard limit (ulimit -Hn) of "
            "this job"
        )
        assert first.ask("lasts")["lasts"]
        others[0].close()

        def comes() -> bool:
            with closing(join(ONE, "")) as one_more, suppress(ServiceError):
                return one_more.await_ready(monotonic() + GONE_SECONDS) == str(agent)
            return False

        wait_until(comes, "there is room for one again")


# --- a service dies


def test_when_the_agent_is_killed_every_rank_is_told_why_with_the_end_of_its_log(
    home: Home,
) -> None:
    with JobRank(home, ONE) as first, JobRank(home, ONE) as second:
        assert first.agent() == second.agent()
        os.kill(the_one(home.agents), signal.SIGKILL)
        for rank in (first, second):
            said, _, last = str(rank.ask("why")["why"]).partition("\n")
            assert said == "here was killed by SIGKILL; it last wrote:"
            assert "INFO" in last
        # Though both ranks live.
        assert_nothing_is_left_but(home, first, second)


def assert_nothing_is_left_but(home: Home, *ranks: JobRank) -> None:
    """The ranks are there, and no service is."""
    pids = {each.process.pid for each in ranks}
    wait_until(lambda: set(home.processes()) == pids, "no service is left", GONE_SECONDS)
    wait_until(lambda: not home.files(), "no file is left")


@pytest.mark.long
def test_a_job_goes_on_when_its_orchestrator_is_killed(home: Home) -> None:
    with JobRank(home, ONE) as rank:
        agent = rank.agent()
        os.kill(the_one(home.orchestrators), signal.SIGKILL)
        log = agent.parent / "supervisor.log"
        wait_until(lambda: "orchestrator was killed by SIGKILL" in log.read_text(), "it is noted")
        assert "Running ranks go on" in log.read_text()
        assert rank.ask("lasts")["lasts"]
        assert accepts(agent)
        rank.leave()
        assert_nothing_is_left(home)


@pytest.mark.long
def test_a_supervisor_that_is_killed_takes_its_services_along_and_the_next_job_its_folder(
    home: Home,
) -> None:
    with JobRank(home, ONE) as rank, JobRank(home, ONE) as later:
        agent = rank.agent()
        assert later.agent() == agent
        os.kill(the_one(home.supervisors), signal.SIGKILL)
        assert rank.ask("why")["why"].startswith("the supervisor of this job's services has ended")
        assert_services_end(home)
        assert agent.parent.exists()
        with JobRank(home, OTHER) as other:
            assert other.agent().parent != agent.parent
            assert not agent.parent.exists()
            assert [each.name for each in home.folder.glob("allfold/jobs/*.sock")] == ["other.sock"]
    assert_nothing_is_left(home)


def assert_services_end(home: Home) -> None:
    wait_until(lambda: not home.agents + home.orchestrators, "the services end", GONE_SECONDS)


@pytest.mark.long
def test_a_supervisor_that_is_told_to_end_says_so_to_the_ranks(home: Home) -> None:
    with JobRank(home, ONE) as rank:
        rank.agent()
        os.kill(the_one(home.supervisors), signal.SIGTERM)
        assert rank.ask("why")["why"] == "SIGTERM has ended the services of this job"
        assert_nothing_is_left_but(home, rank)


def test_a_setting_that_a_service_refuses_is_told_to_all_ranks_and_not_waited_for(
    home: Home,
) -> None:
    wrong = {"ALLFOLD_AGENT_THREADS": "0"}
    with JobRank(home, ONE, **wrong) as first, JobRank(home, ONE, **wrong) as second:
        for rank in (first, second):
            said = rank.heard(seconds=20.0)
            assert said["code"] == "AF101", said
            assert "--threads (ALLFOLD_AGENT_THREADS): must be greater" in said["message"]
        assert_nothing_is_left(home)


# --- the end and the beginning at the same time


@pytest.mark.long
def test_a_rank_that_comes_soon_after_the_last_one_meets_the_same_services(home: Home) -> None:
    with JobRank(home, ONE) as first:
        agent = first.agent()
        pid = the_one(home.agents)
        first.leave()
        with JobRank(home, ONE) as second:
            assert second.agent() == agent
            assert home.agents == [pid]
    assert_nothing_is_left(home)


@pytest.mark.long
@pytest.mark.parametrize("ends", ["alone", "failed"])
def test_a_rank_that_comes_while_they_end_has_new_services_never_half_of_the_old(
    home: Home, ends: str
) -> None:
    """The end takes long: a service of the old ones hears nothing, and has to be killed."""
    with JobRank(home, ONE) as first:
        agent, old = first.agent(), {*home.agents, *home.orchestrators}
        os.kill(the_one(home.agents if ends == "alone" else home.orchestrators), signal.SIGSTOP)
        if ends == "alone":
            first.leave()
        else:
            os.kill(the_one(home.agents), signal.SIGKILL)
            first.ask("why")
        listening = home.folder / "allfold" / "jobs" / "one.sock"
        wait_until(lambda: not listening.exists(), "they take no ranks any more")
        assert old & {*home.agents, *home.orchestrators}, "they still end"
        with JobRank(home, ONE) as second:
            new = second.agent()
            assert new.parent != agent.parent
            assert accepts(new)
            ended = agent.parent
            wait_until(lambda: not ended.exists(), "the old ones have ended", GONE_SECONDS)
            assert not old & {*home.agents, *home.orchestrators}
            assert accepts(new)
            assert second.ask("lasts")["lasts"]
    assert_nothing_is_left(home)


# --- the folder


def test_a_folder_of_another_user_is_refused_by_name(home: Home) -> None:
    folder = home.folder / "allfold"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with JobRank(home, ONE) as rank:
        said = rank.refusal()
    assert said.startswith(f"{folder}, where the services of jobs have their sockets, belongs to ")
    assert "XDG_RUNTIME_DIR" in said
    assert home.processes() == []


@pytest.mark.long
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_in_which_others_can_write_is_refused(home: Home, mode: int) -> None:
    folder = home.folder / "allfold"
    folder.mkdir()
    folder.chmod(mode)
    with JobRank(home, ONE) as rank:
        assert "nobody else may write to it" in rank.refusal()


@pytest.mark.long
@pytest.mark.parametrize("place", ["allfold", "allfold/jobs"])
def test_a_file_in_place_of_the_folder_is_named(home: Home, place: str) -> None:
    path = home.folder / place
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text("")
    with JobRank(home, ONE) as rank:
        said = rank.refusal()
    assert str(path) in said
    assert "XDG_RUNTIME_DIR" in said


@pytest.mark.long
def test_a_folder_that_cannot_be_made_is_named(home: Home) -> None:
    with JobRank(home, ONE, XDG_RUNTIME_DIR="/proc") as rank:
        said = rank.refusal()
    assert said.startswith("the folder /proc/allfold/jobs for the services of this job ")
    assert "No such file or directory" in said


def test_a_runtime_folder_that_is_on_another_machine_is_not_used(home: Home) -> None:
    """As where ``srun`` has passed on the variable of the machine that one has logged in to."""
    with JobRank(home, ONE, XDG_RUNTIME_DIR=str(home.folder / "not" / "here")) as rank:
        assert rank.agent().is_relative_to(home.folder / f"allfold-{os.getuid()}" / "jobs")
    assert_nothing_is_left(home)


@pytest.mark.long
def test_too_long_a_path_is_refused_before_anything_starts(home: Home) -> None:
    folder = home.folder / ("x" * 80)
    folder.mkdir()
    with JobRank(home, ONE, XDG_RUNTIME_DIR=str(folder)) as rank:
        said = rank.refusal()
    assert "has too long a path" in said
    assert "Unix sockets allow 107" in said
    assert not list(folder.iterdir())


def mounted(home: Home, options: str) -> list[str]:
    """Return a command that becomes another one, for which the home is a file system of its own."""
    mount = f'mount -t tmpfs -o {options} none {home.folder} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


@needs_root
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        "size=16k",
        "nr_inodes=3",
    ],
)
def test_a_folder_that_is_full_is_named_and_nothing_is_left(home: Home, options: str) -> None:
    with JobRank(home, ONE, *mounted(home, options)) as rank:
        said = rank.refusal()
    jobs = home.folder / "allfold" / "jobs"
    assert said.startswith(f"the folder {jobs} for the services of this job cannot be used: ")
    assert "No space left on device" in said
    assert "Set XDG_RUNTIME_DIR or TMPDIR" in said
    assert home.processes() == []


@needs_root
@pytest.mark.long
def test_services_whose_disk_is_full_go_on_and_still_say_how_they_ended(home: Home) -> None:
    with JobRank(home, ONE, *mounted(home, "size=1m")) as rank:
        rank.agent()
        rank.ask("fill")
        assert rank.ask("lasts")["lasts"]
        os.kill(the_one(home.agents), signal.SIGKILL)
        assert rank.ask("why")["why"].startswith("here was killed by SIGKILL")
        pid = rank.process.pid
        wait_until(lambda: home.processes() == [pid], "no service is left", GONE_SECONDS)
