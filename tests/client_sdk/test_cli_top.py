"""``allfold top``: the view of the figures of agents."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from allfold_core.incident import Cause, Effect, Incident, rank_culprit
from tests.client_sdk.http_service import NO_NODES, service
from tests.support.processes.cli import Command, Commands, commands
from tests.support.waiting import wait_until

NOW = 1000.0


def sample(age: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "at": NOW - age, "seconds": 1.0, "ops": 100, "bytes": 4000, "latency": 0.002,
        "skew": 0.001, "ranks": {}, "edges": {},
    } | more  # fmt: skip


def history(node: str, *samples: dict[str, Any], name: str = "dp", opening: int = 1) -> Any:
    group = {"name": name, "opening": opening, "samples": list(samples)}
    return {"node": node, "now": NOW, "groups": [group]}


def own(**times: float) -> dict[str, Any]:
    """Own times by rank: ``own(r0=0.01)``."""
    return {name[1:]: {"own": each, "late": each / 10} for name, each in times.items()}


# --- the command


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


GROUP = {
    "name": "dp", "opening": 1, "world_size": 2, "epoch": 0, "term": 1, "ranks": [0, 1],
    "nodes": ["a"], "losses": [], "evicted": "", "retained_bytes": 0, "in_flight": [],
    "messages": [], "last_seq": {}, "edges": [],
}  # fmt: skip
SLOW = sample(ranks=own(r0=0.010, r1=0.030))
ANSWERS = {
    "/v1/status": {"node": "a", "ready": True, "waiting_for": "", "groups": [GROUP]},
    "/v1/history": history("a", SLOW),
}


@pytest.fixture
def agent() -> Iterator[str]:
    with service(ANSWERS) as url:
        yield url


def test_once_shows_the_tables_and_ends(allfold: Commands, agent: str) -> None:
    out = allfold.run("top", "--once", "--agent-url", agent).out
    for text in ("Nodes", "Groups", "100.0", "2.0 ms", "Slowest ranks", "rank 1 on node a"):
        assert text in out


@pytest.mark.parametrize("command", [["top", "--once"], ["status"]])
def test_what_is_no_agent_is_named_as_such(allfold: Commands, command: list[str]) -> None:
    with service({"/v1/status": {"status": "ok"}}) as url:
        err = allfold.run(*command, "--agent-url", url, status=3).err
    assert f"{url} answers, but not as an agent does" in err


@pytest.mark.parametrize("command", [["top", "--once"], ["status"]])
def test_an_agent_of_another_version_is_named_with_the_difference(
    allfold: Commands, command: list[str]
) -> None:
    group = {name: value for name, value in GROUP.items() if name != "term"}
    with service({"/v1/status": ANSWERS["/v1/status"] | {"groups": [group]}}) as url:
        err = allfold.run(*command, "--agent-url", url, status=3).err
    assert f"{url} answers with a status of another version: groups.0.term is missing" in err


def test_no_text_of_others_controls_the_terminal(allfold: Commands) -> None:
    """A group tells how its ranks have ended, in the words of their exceptions."""
    what = "sum\x1b]0;other title\x07\x9b31m"
    op = {
        "seq": 7, "what": what, "strategy": "ring", "waiting_for": [1], "waiting_for_nodes": [],
        "age": 3.0,
    }  # fmt: skip
    lost = GROUP | {"losses": [f"rank 1 failed: {what}"], "in_flight": [op]}
    answers = ANSWERS | {
        "/v1/status": {"node": "a\x1bc", "ready": True, "waiting_for": "", "groups": [lost]}
    }
    with service(answers) as url:
        shown = [
            allfold.run("top", "--once", "--agent-url", url).out,
            allfold.run("status", "--agent-url", url).out,
        ]
    for out in shown:
        assert "other title" in out
        assert out.replace("\n", "").isprintable()


def test_the_json_has_one_object_per_look(allfold: Commands, agent: str) -> None:
    seen = json.loads(allfold.run("top", "--once", "--json", "--agent-url", agent).out)
    assert seen["schema"] == 1
    assert seen["nodes"] == [
        {
            "node": "a", "state": None, "heartbeat_age": None, "answers": True,
            "waiting_for": "", "ranks": 2,
        }
    ]  # fmt: skip
    (group,) = seen["groups"]
    assert (group["group"], group["ops"], group["bytes"]) == ("dp", 100.0, 4000.0)
    assert group["world_size"] == 2
    assert [each["rank"] for each in group["ranks"]] == [1, 0]
    running = allfold.start("top", "--json", "--interval", "0.05", "--agent-url", agent)
    running.wait_for_output("\n", count=3)
    running.send(signal.SIGINT)
    assert running.wait() == 0
    looks = [json.loads(line) for line in running.out.splitlines()]
    assert len({each["at"] for each in looks}) == len(looks) >= 3


def test_without_a_terminal_each_look_is_a_line(allfold: Commands, agent: str) -> None:
    running = watching(allfold, "--agent-url", agent)
    running.wait_for_output("rank 1 on node a is slow: 30.0 ms between ops, 3.0 x the", count=2)
    running.send(signal.SIGINT)
    assert running.wait() == 0
    assert "group dp: 100.0 ops/s" in running.out
    assert "Nodes" not in running.out


def watching(allfold: Commands, *options: str) -> Command:
    return allfold.start("top", "--interval", "0.05", *options)


def test_nobody_there_at_the_start_is_status_3(allfold: Commands) -> None:
    for option in ("--agent-url", "--orchestrator"):
        err = allfold.run("top", option, "http://127.0.0.1:9", status=3).err
        assert "Connection refused" in err


def test_an_orchestrator_and_an_agent_that_end_later_are_said_and_the_watch_goes_on(
    allfold: Commands,
) -> None:
    with service(ANSWERS) as agent:
        node = {"node": "a", "state": "alive", "heartbeat_age": 0.1, "control_url": agent}
        with service(NO_NODES | {"/v1/nodes": {"nodes": [node]}}) as orchestrator:
            running = watching(allfold, "--orchestrator", orchestrator)
            running.wait_for_output("group dp: 100.0 ops/s")
        running.wait_for_output("no orchestrator answers")
        before = running.out.count("group dp: 100.0 ops/s")
        running.wait_for_output("group dp: 100.0 ops/s", count=before + 2)
    running.wait_for_output("no answer: ")
    running.send(signal.SIGINT)
    assert running.wait() == 0


def test_what_ops_wait_for_is_shown_once_it_lasts(allfold: Commands) -> None:
    def in_flight(age: float) -> dict[str, Any]:
        waits = {
            "seq": 7, "what": "barrier()", "strategy": "ring", "waiting_for": [1],
            "waiting_for_nodes": [], "age": age,
        }  # fmt: skip
        return {**GROUP, "in_flight": [waits], "last_seq": {"0": 7, "1": 6}}

    answers: dict[str, Any] = dict(ANSWERS)
    with service(answers) as agent:
        for age, shown in ((0.1, False), (3.0, True)):
            answers["/v1/status"] = ANSWERS["/v1/status"] | {"groups": [in_flight(age)]}
            out = allfold.run("top", "--once", "--agent-url", agent).out
            assert ("op 7 of group 'dp', barrier(), waits for rank 1 on node a" in out) == shown


def test_an_op_of_which_an_incident_speaks_is_not_shown_twice(allfold: Commands) -> None:
    waits = {
        "seq": 7, "what": "barrier()", "strategy": "ring", "waiting_for": [1],
        "waiting_for_nodes": [], "age": 9.0,
    }  # fmt: skip
    group = {**GROUP, "in_flight": [waits], "last_seq": {"0": 7, "1": 6}}
    culprit, sentence = rank_culprit(1, "a"), "op 7 waits for rank 1: its process is stopped"
    hang = Incident("x", Cause.STOPPED_RANK, Effect.HANG, culprit, sentence, "dp", 1, 7)
    told = {"groups": [group], "incidents": [hang.to_dict()]}
    with service(ANSWERS | {"/v1/status": ANSWERS["/v1/status"] | told}) as agent:
        out = allfold.run("top", "--once", "--agent-url", agent).out
    assert sentence in out
    assert "op 7 barrier()" not in out


def test_on_a_terminal_q_ends_it_and_leaves_the_terminal_as_it_was(agent: str) -> None:
    ours, its = pty.openpty()
    before = subprocess.run(["stty", "-g"], stdin=its, capture_output=True, check=True).stdout
    command = [sys.executable, "-m", "allfold.cli", "top", "--agent-url", agent]
    with subprocess.Popen(
        [*command, "--interval", "30"],
        stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"},
    ) as process:  # fmt: skip
        try:
            seen = read_until(ours, b"Slowest ranks")
            os.write(ours, b"xq")
            wait_until(lambda: process.poll() is not None, f"q ends it; it showed {seen!r}")
        finally:
            process.kill()
    assert process.returncode == 0
    after = subprocess.run(["stty", "-g"], stdin=its, capture_output=True, check=True).stdout
    assert after == before
    os.close(ours)
    os.close(its)


def read_until(fd: int, text: bytes) -> bytes:
    """Read from a terminal until it has shown the text; return all that was read."""
    seen = bytearray()
    os.set_blocking(fd, False)

    def has_shown() -> bool:
        with suppress(BlockingIOError):
            seen.extend(os.read(fd, 65536))
        return text in seen

    wait_until(has_shown, f"{text!r} on the terminal")
    return bytes(seen)
