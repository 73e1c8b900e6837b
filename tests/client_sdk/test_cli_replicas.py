"""Commands that are given several replicas of the orchestrator, of which one is down."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from allfold_cluster import Cluster
from allfold_cluster.environment import free_address
from tests.support.processes.cli import Commands, commands

ADMIN = "admin"


@pytest.fixture(scope="module")
def stack() -> Iterator[Cluster]:
    with Cluster(env={**os.environ, "ALLFOLD_ADMIN_TOKEN": ADMIN}) as started:
        started.start()
        yield started


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        (("status",), 0, "node0"),
        (("top", "--once"), 0, "node0"),
        (("trace",), 1, "no group has done any op yet"),
        (("drain", "node0"), 0, "node0"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("is_named", [True, False], ids=["option", "variable"])
def test_the_replica_that_answers_is_enough(
    allfold: Commands,
    stack: Cluster,
    command: tuple[str, ...],
    status: int,
    shown: str,
    is_named: bool,
) -> None:
    urls = f"http://{free_address()},{stack.orchestrator_url}"
    env = {"ALLFOLD_TOKEN": stack.token, "ALLFOLD_ADMIN_TOKEN": ADMIN}
    named = ("--orchestrator", urls) if is_named else ()
    if not is_named:
        env["ALLFOLD_ORCHESTRATOR_URL"] = urls
    done = allfold.run(*command, *named, env=env, status=status)
    assert shown in done.out + done.err


def test_a_doctor_says_which_replica_is_down_and_goes_on_with_the_other(
    allfold: Commands, stack: Cluster
) -> None:
    dead = f"http://{free_address()}"
    urls = f"{dead},{stack.orchestrator_url}"
    done = allfold.run(
        "doctor", "--orchestrator", urls, env={"ALLFOLD_TOKEN": stack.token}, status=1
    )
    assert dead in done.out
    assert "node0" in done.out
