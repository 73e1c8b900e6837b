"""The end of a script that has called Allfold: in order if it can be, and soon if it cannot."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.services import ROOT, Services
from tests.support.waiting import wait_until

# Less than the ops' own deadline, also twice; generous, because the machine may be busy.
SECONDS = 20.0
OP_SECONDS = 60.0

PREAMBLE = """
import logging, pathlib, sys, time
import numpy as np
import allfold
logging.basicConfig()  # what Allfold warns of
group = allfold.init()
rank = group.rank
"""

# What the other one hears of the first.
LISTEN = """
try:
    allfold.recv(np.zeros(1), 0)
except allfold.PeerLost as error:
    print(error.message)
"""


class Script:
    """One rank of two, as a process of its own."""

    def __init__(self, services: Services, group: str, rank: int, text: str) -> None:
        self.group = group
        self._folder = services.folder / f"{group}.{rank}"
        self._folder.mkdir()
        self._out, self._err = self._folder / "out", self._folder / "err"
        env = services.env | {
            "ALLFOLD_SOCKET": services.socket_of("node0"),
            "ALLFOLD_GROUP": group,
            "ALLFOLD_TIMEOUT": str(OP_SECONDS),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [sys.executable, "-u", "-c", PREAMBLE + text]
            self.process = subprocess.Popen(
                command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for_output(self, text: str) -> None:
        wait_until(lambda: text in self.out or self.process.poll() is not None, text, 30.0)
        assert text in self.out, self.err

    def end(self, status: int = 0) -> None:
        assert self.process.wait(30.0) == status, self.err


class Scripts:
    """Starts the two ranks of a group; whoever still lives in the end is killed."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._numbers = itertools.count()
        self._all: list[Script] = []

    def start(self, first: str, second: str) -> tuple[Script, Script]:
        group = f"exit{next(self._numbers)}"
        self._all += [
            Script(self.services, group, rank, text) for rank, text in enumerate((first, second))
        ]
        return self._all[-2], self._all[-1]

    def groups(self) -> list[str]:
        return [group["name"] for group in self.services.status("node0")["groups"]]

    def close(self) -> None:
        for script in self._all:
            script.process.kill()
            script.process.wait()


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with Services() as services:
        services.start_orchestrator()
        services.start_agents("node0")
        started = Scripts(services)
        yield started
        started.close()


@pytest.mark.parametrize(
    ("call", "ending", "status", "said"),
    [
        ("allfold.all_reduce(np.ones(4), async_op=True)", "raise RuntimeError('boom')", 1, "boom"),
        ("allfold.send(np.ones(4), 1, tag=9, async_op=True)", "sys.exit(3)", 3, "in flight"),
        ("allfold.barrier(async_op=True)", "", 0, "ops are still in flight at exit"),
    ],
)
def test_a_script_that_ends_with_an_op_in_flight_does_not_wait_for_others(
    scripts: Scripts, call: str, ending: str, status: int, said: str
) -> None:
    """Its rank is lost to them, as if it had been killed, and its own error is not hidden."""
    first, second = scripts.start(f"work = {call}\nprint('ready')\n{ending}", LISTEN)
    first.wait_for_output("ready")
    ended = time.monotonic()
    first.end(status)
    assert time.monotonic() - ended < SECONDS
    assert said in first.err
    second.end()
    assert "rank 0" in second.out
    assert time.monotonic() - ended < 2 * SECONDS
    wait_until(lambda: not scripts.groups(), "the agent has closed the group")


def test_a_script_that_forgets_to_wait_for_what_is_done_leaves_in_order(
    scripts: Scripts,
) -> None:
    """The others have the results, and are told that it has left, not that it was lost."""
    first, second = scripts.start(
        "works = [allfold.all_reduce(np.ones(1000), async_op=True) for _ in range(20)]",
        "works = [allfold.all_reduce(np.ones(1000), async_op=True) for _ in range(20)]\n"
        "print([work.wait()[0] for work in works] == [2.0] * 20)" + LISTEN,
    )
    first.end()
    second.end()
    assert first.err == ""
    assert "True" in second.out
    assert "rank 0 on node node0, which exited" in second.out
    wait_until(lambda: not scripts.groups(), "the agent has closed the group")


def test_what_others_are_about_to_take_is_waited_for_a_little(
    scripts: Scripts, tmp_path: Path
) -> None:
    taken = tmp_path / "ended"
    first, second = scripts.start(
        "allfold.send(np.full(100_000, 7.0), 1, async_op=True)\nprint('ready')",
        f"while not pathlib.Path({str(taken)!r}).exists(): time.sleep(0.01)\n"
        "x = np.zeros(100_000)\nallfold.recv(x, 0)\nprint(x.sum() == 700_000)",
    )
    first.wait_for_output("ready")
    taken.touch()
    first.end()
    second.end()
    assert first.err == ""
    assert "True" in second.out


def test_a_script_leaves_all_its_groups_at_its_end(scripts: Scripts) -> None:
    text = (
        "other = allfold.new_group([1, 0])\n"
        "works = [each.barrier(async_op=True) for each in (group, other, other, group)]"
    )
    for script in scripts.start(text, text):
        script.end()
        assert script.err == ""
    wait_until(lambda: not scripts.groups(), "the agent has closed the groups")


def test_a_script_whose_op_has_failed_ends_with_that_error_at_once(scripts: Scripts) -> None:
    """All ranks have it, and nothing is left to wait for."""
    first, second = scripts.start(
        "allfold.all_reduce(np.ones(3))",
        "allfold.all_reduce(np.ones(4))",
    )
    for script in (first, second):
        script.end(1)
        assert "MismatchError" in script.err
    wait_until(lambda: not scripts.groups(), "the agent has closed the group")


def test_a_script_that_an_error_ends_is_recorded_as_lost_and_its_error_is_told(
    scripts: Scripts, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    first, second = scripts.start(
        "allfold.barrier()\nraise ValueError('boom')",
        "allfold.barrier()\n"
        "try:\n    allfold.barrier()\nexcept allfold.PeerLost as error:\n    print(error.message)\n"
        f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)",
    )
    first.end(1)
    second.wait_for_output("rank 0 on node node0, which ended with an exception (ValueError: boom)")
    # The nodes agree upon it by themselves, and the orchestrator hears of it a moment later.
    url = f"{scripts.services.orchestrator_url}/v1/groups/{first.group}"
    wait_until(lambda: scripts.services.get(url)["lost"], "the loss is recorded")
    assert [each["rank"] for each in scripts.services.get(url)["lost"]] == [0]
    seen.touch()
    second.end()
