"""``allfold run``, with scripts that do not need Allfold itself: numbering and output."""

import json
import os
import pty
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes.cli import Commands, commands

AGENT = ("--agent", "/run/no-such-agent.sock")

TELL = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "env": dict(os.environ)}))
"""


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


def told(out: str) -> dict[int, Any]:
    """Return the answer of each rank of the ``TELL`` script, by rank."""
    lines = [line.partition("] ") for line in out.splitlines()]
    return {int(rank.removeprefix("[")): json.loads(text) for rank, _, text in lines}


# --- who the ranks are


def test_each_rank_finds_its_numbers_its_agent_and_its_group(allfold: Commands) -> None:
    options = (*allfold.agent("a.sock"), *allfold.agent("b.sock"), "--nproc-per-node", "2")
    stale = {"ALLFOLD_RANK": "9", "ALLFOLD_WORLD_SIZE": "10", "ALLFOLD_TOKEN": "secret"}
    ranks = told(allfold.run("run", *options, allfold.script(TELL), env=stale).out)
    assert sorted(ranks) == [0, 1, 2, 3]
    env = ranks[3]["env"]
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [env[name] for name in numbers] == ["3", "4", "1", "2", "1"]
    assert [each["env"]["ALLFOLD_SOCKET"][-6] for _, each in sorted(ranks.items())] == list("aabb")
    assert (env["ALLFOLD_TOKEN"], env["PYTHONUNBUFFERED"]) == ("secret", "1")
    assert "ALLFOLD_RANK" not in env
    assert "ALLFOLD_WORLD_SIZE" not in env
    assert len({each["env"]["ALLFOLD_GROUP"] for each in ranks.values()}) == 1
    assert len({each["env"]["MASTER_PORT"] for each in ranks.values()}) == 1


def test_every_run_has_a_group_of_its_own_unless_one_is_given(allfold: Commands) -> None:
    script = allfold.script(TELL)
    runs = [
        ("run", *allfold.agent()),
        ("run", *allfold.agent()),
        ("run", *allfold.agent(), "--group", "mine"),
    ]
    groups = [told(allfold.run(*each, script).out)[0]["env"]["ALLFOLD_GROUP"] for each in runs]
    assert len(set(groups)) == 3
    assert groups[2] == "mine"


def test_several_launchers_number_the_ranks_of_one_job(allfold: Commands) -> None:
    place = ("--nnodes", "3", "--node-rank", "1", "--nproc-per-node", "2", "--group", "job")
    ranks = told(allfold.run("run", *allfold.agent(), *place, allfold.script(TELL)).out)
    assert sorted(ranks) == [2, 3]
    assert ranks[3]["env"]["WORLD_SIZE"] == "6"
    assert ranks[3]["env"]["GROUP_RANK"] == "1"
    # The ranks of other machines would not find this one at 127.0.0.1.
    assert "MASTER_ADDR" not in ranks[3]["env"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--master-addr", "10.0.0.1"), ("10.0.0.1", "29500")),
        (("--master-addr", "10.0.0.1", "--master-port", "7"), ("10.0.0.1", "7")),
        ((), ("of the environment", None)),
    ],
)
def test_ranks_of_several_machines_find_the_master_that_is_named(
    allfold: Commands, options: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    place = ("--nnodes", "2", "--node-rank", "1", "--group", "job", *options)
    env = {"MASTER_ADDR": "of the environment"}
    command = allfold.run("run", *allfold.agent(), *place, allfold.script(TELL), env=env)
    found = told(command.out)[1]["env"]
    assert (found["MASTER_ADDR"], found.get("MASTER_PORT")) == expected


def test_the_agent_is_taken_from_the_environment(allfold: Commands) -> None:
    env = {"ALLFOLD_SOCKET": allfold.agent("of the shell.sock")[1]}
    ranks = told(allfold.run("run", allfold.script(TELL), env=env).out)
    assert ranks[0]["env"]["ALLFOLD_SOCKET"] == env["ALLFOLD_SOCKET"]


def test_options_after_the_script_are_the_scripts_own(allfold: Commands) -> None:
    words = ("--nodes", "7", "-m", "--help", "--", "x")
    ranks = told(allfold.run("run", *allfold.agent(), allfold.script(TELL), *words).out)
    assert ranks[0]["arguments"] == list(words)


def test_a_module_runs_as_under_python_m(allfold: Commands) -> None:
    out = allfold.run("run", *allfold.agent(), "-m", "calendar", "--type", "text", "2026", "1").out
    assert "January 2026" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodse", "2"), "--nodse"),
        ((*AGENT, "--nodes", "2"), "--nodes 2 does not fit 1 agent"),
        (("--nnodes", "2"), "--nnodes and --node-rank belong together"),
        ((*AGENT, "--nnodes", "2", "--node-rank", "2"), "goes from 0 to 1"),
        ((*AGENT, "--nnodes", "2", "--node-rank", "0"), "give --group"),
        (("--nnodes", "2", "--node-rank", "0", "--group", "g"), "give --agent"),
        (("--nodes", "2", "--nnodes", "2", "--node-rank", "0"), "each launcher serves one agent"),
    ],
)
def test_options_that_cannot_work_are_refused_with_status_2(
    allfold: Commands, options: tuple[str, ...], words: str
) -> None:
    assert words in allfold.run("run", *options, "script.py", status=2).err


def test_a_socket_path_that_no_socket_can_have_is_refused(allfold: Commands) -> None:
    err = allfold.run("run", "--agent", "/" + "x" * 107, "script.py", status=2).err
    assert "has 108 bytes, but Unix sockets allow 107" in err


@pytest.mark.parametrize(("env", "threads"), [({}, None), ({"OMP_NUM_THREADS": "5"}, "5")])
def test_threads_are_shared_out_only_when_nobody_chose(
    allfold: Commands, env: dict[str, str], threads: str | None
) -> None:
    many = str(2 * len(os.sched_getaffinity(0)))
    command = allfold.run(
        "run", *allfold.agent(), "--nproc-per-node", many, allfold.script(TELL), env=env
    )
    assert {each["env"]["OMP_NUM_THREADS"] for each in told(command.out).values()} == {
        threads or "1"
    }
    assert command.err.count("OMP_NUM_THREADS is not set") == (threads is None)


def test_a_single_rank_keeps_all_threads(allfold: Commands) -> None:
    command = allfold.run("run", *allfold.agent(), allfold.script(TELL))
    assert "OMP_NUM_THREADS" not in told(command.out)[0]["env"]
    assert command.err == ""


# --- what is seen of them


def test_lines_go_where_the_rank_sent_them_with_the_rank_in_front(allfold: Commands) -> None:
    script = allfold.script(
        "import sys\nprint('one\\ntwo')\nprint('bad', file=sys.stderr)\nprint('end', end='')"
    )
    env = {"OMP_NUM_THREADS": "1"}
    command = allfold.run("run", *allfold.agent(), "--nproc-per-node", "2", script, env=env)
    mine = [line for line in command.out.splitlines() if line.startswith("[1]")]
    assert mine == ["[1] one", "[1] two", "[1] end"]
    assert sorted(command.err.splitlines()) == ["[0] bad", "[1] bad"]


def test_without_prefix_the_output_is_as_it_was(allfold: Commands) -> None:
    script = allfold.script("print('a\\n\\nb')")
    assert allfold.run("run", *allfold.agent(), "--no-prefix", script).out == "a\n\nb\n"


def test_much_output_arrives_complete_and_in_order(allfold: Commands) -> None:
    script = allfold.script("for i in range(100_000): print(i)")
    out = allfold.run(
        "run", *allfold.agent(), "--no-prefix", script, env={"PYTHONUNBUFFERED": ""}
    ).out
    assert out == "".join(f"{i}\n" for i in range(100_000))


def test_the_prefix_has_a_colour_on_a_terminal_only(allfold: Commands) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = allfold.start(
            "run", *allfold.agent(), allfold.script("print('hello')"), stdout=theirs
        )
        os.close(theirs)
        assert terminal.readline() == b"\x1b[36m[0]\x1b[0m hello\r\n"
        assert command.wait() == 0


def test_quiet_others_shows_rank_0_and_the_last_words_of_the_one_that_fails(
    allfold: Commands,
) -> None:
    script = allfold.script(
        "import os, sys\n"
        "rank = int(os.environ['RANK'])\n"
        "print('rank', rank)\n"
        "sys.exit('no luck' if rank == 2 else 0)"
    )
    options = ("--nproc-per-node", "3", "--quiet-others")
    command = allfold.run("run", *allfold.agent(), *options, script, status=1)
    assert "[0] rank 0" in command.out
    assert "rank 1" not in command.out
    assert "[2] no luck" in command.err


def test_rank_0_reads_our_standard_input_and_nobody_else_does(allfold: Commands) -> None:
    script = allfold.script("import sys; print(repr(sys.stdin.read()))")
    reader, writer = os.pipe()
    os.write(writer, b"typed")
    os.close(writer)
    command = allfold.run("run", *allfold.agent(), "--nproc-per-node", "2", script, stdin=reader)
    os.close(reader)
    assert sorted(command.out.splitlines()) == ["[0] 'typed'", "[1] ''"]
