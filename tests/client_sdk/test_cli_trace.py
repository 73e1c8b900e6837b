"""``allfold trace`` with agents that are fakes over HTTP: what lands where, and on whose clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from allfold.cli._asking import OUR_CLOCK, ClockSample, Offset, estimate, with_shared_clocks
from allfold.cli._main import cli
from allfold.cli._trace.asking import SeenOp
from allfold.cli._trace.merging import newest_ops
from tests.support import trace_format
from tests.support.fakes.flights import agent, group, op, served

Json = dict[str, Any]
DAY = 86400.0
# Of times since a start of the machine, in seconds, as JSON has them.
ROUNDING = 1e-6


def run(*arguments: str | Path, token: str = "") -> Result:
    variables: Mapping[str, str | None] = {
        "ALLFOLD_TOKEN": token,
        "ALLFOLD_TOKEN_FILE": None,
        "ALLFOLD_ORCHESTRATOR_URL": None,
    }
    return CliRunner().invoke(cli, ["trace", *map(str, arguments)], env=variables)


def trace_of(*urls: str, options: tuple[str, ...] = ()) -> Json:
    """The trace of agents, which is valid."""
    named = [option for url in urls for option in ("--agent-url", url)]
    done = run(*named, *options, "--output", "-")
    assert done.exit_code == 0, done.output
    return trace_format.parse(done.stdout)


def threads(trace: Json) -> dict[tuple[int, int], str]:
    """``node a: rank 0`` by process and thread."""
    names = {e["pid"]: e["args"]["name"] for e in named(trace, "process_name")}
    return {
        (e["pid"], e["tid"]): f"{names[e['pid']]}: {e['args']['name']}"
        for e in named(trace, "thread_name")
    }


def named(trace: Json, name: str) -> list[Json]:
    return [event for event in trace["traceEvents"] if event["name"] == name]


def events(trace: Json, phases: str, thread: str = "") -> list[Json]:
    """The events of some phases, of one thread or of all."""
    of = threads(trace)
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] in phases and (not thread or of.get((event["pid"], event["tid"])) == thread)
    ]


def at(trace: Json, event: Json) -> float:
    """Return the time of an event, in seconds since 1970."""
    return float(trace["otherData"]["origin"]) + float(event["ts"]) / 1e6


def wall(monotonic: float) -> float:
    return time.time() - (time.monotonic() - monotonic)


def two_nodes(stack: ExitStack, *, shift_b: float = 0.0, late: float = 0.0) -> tuple[str, str]:
    """Node a with ranks 0 and 1, node b with 2 and 3; rank 3 calls late. All ran a second ago."""
    now = time.monotonic() - 1.0
    phases = {"began": late, "exchanged": late + 0.004, "settled": late + 0.005}
    seconds = late + 0.01
    on_a = op(7, now, {0: 0.0, 1: 0.001}, seconds=seconds, phases=phases, heard={"b": late + 0.002})
    on_b = op(7, now, {2: 0.0, 3: late}, seconds=seconds, phases=phases, heard={"a": late + 0.001})
    a = stack.enter_context(agent("a", group([on_a], [0, 1])))
    b = stack.enter_context(agent("b", group([on_b], [2, 3]), shift=shift_b))
    return a, b


def test_a_node_is_a_process_and_a_rank_a_thread() -> None:
    with ExitStack() as stack:
        trace = trace_of(*two_nodes(stack, late=0.2))
    assert sorted(threads(trace).values()) == [
        "node a: exchange",
        "node a: rank 0",
        "node a: rank 1",
        "node b: exchange",
        "node b: rank 2",
        "node b: rank 3",
    ]


def test_an_op_shows_its_call_its_wait_its_exchange_and_its_result() -> None:
    with ExitStack() as stack:
        trace = trace_of(*two_nodes(stack, late=0.2))
    call, wait = events(trace, "X", "node b: rank 2")
    assert (call["name"], call["args"]["what"]) == ("all_reduce", "all_reduce(sum, float32[1024])")
    assert (call["args"]["seq"], call["args"]["strategy"]) == (7, "ring")
    assert call["dur"] == pytest.approx(210_000.0)
    assert (wait["name"], wait["dur"]) == ("wait for rank 3", pytest.approx(200_000.0))
    assert [each["name"] for each in events(trace, "X", "node b: exchange")] == [
        "all_reduce",
        "exchange",
        "until data of node a",
        "hand out",
    ]


def test_a_round_shows_who_took_part() -> None:
    told = {"weight": 6.0, "absent": [1], "late": [1], "sent_bytes": 400}
    now = time.monotonic() - 1.0
    ops = [op(6, now, {0: 0.0}, round=None), op(7, now + 0.1, {0: 0.0}, round=told)]
    with ExitStack() as stack:
        trace = trace_of(stack.enter_context(agent("a", group(ops, [0]))))
    plain, round_ = events(trace, "X", "node a: rank 0")
    assert round_["args"]["round"] == told
    assert "round" not in plain["args"]


def test_a_late_rank_is_seen_to_be_late() -> None:
    with ExitStack() as stack:
        trace = trace_of(*two_nodes(stack, shift_b=DAY, late=0.2))
        sure = trace["otherData"]["clocks"]["b"]["uncertainty"]
    late = events(trace, "X", "node b: rank 3")
    others = [events(trace, "X", f"node {node}")[0] for node in ("a: rank 0", "b: rank 2")]
    for other in others:
        assert late[0]["ts"] - other["ts"] == pytest.approx(200_000.0, abs=sure * 1e6 + 1)
    assert [each["name"] for each in late] == ["all_reduce"], "nobody is waited for"


def test_a_node_with_another_clock_lands_where_its_ops_were() -> None:
    now = time.monotonic() - 1.0
    same = op(0, now, {0: 0.0})
    with (
        agent("a", group([same], [0])) as a,
        agent("b", group([same], [1]), shift=3 * DAY, wall_shift=5.0) as b,
    ):
        trace = trace_of(a, b)
    clocks = trace["otherData"]["clocks"]
    assert clocks["a"]["uncertainty"] == 0.0, "it is this machine's clock"
    sure = clocks["b"]["uncertainty"]
    assert clocks["b"]["ahead"] == pytest.approx(5.0, abs=sure + 1e-3)
    (on_a,), (on_b,) = (events(trace, "X", f"node {node}: rank 0") for node in "ab")
    assert at(trace, on_a) == pytest.approx(wall(now), abs=1e-3)
    assert abs(on_a["ts"] - on_b["ts"]) <= (sure + ROUNDING) * 1e6


def test_what_is_known_of_another_clock_is_said() -> None:
    with agent("b", group([op(0, time.monotonic(), {0: 0.0})], [0]), shift=DAY) as b:
        done = run("--agent-url", b, "--output", "-")
    assert "node b: its clock is " in done.stderr
    assert "its ops are placed to within " in done.stderr


def test_one_op_is_connected_across_nodes() -> None:
    with ExitStack() as stack:
        trace = trace_of(*two_nodes(stack, late=0.1))
    arrows = events(trace, "stf")
    of = threads(trace)
    assert [(each["ph"], each["name"]) for each in arrows] == [("s", "op 7"), ("f", "op 7")]
    places = sorted(of[each["pid"], each["tid"]] for each in arrows)
    assert places == ["node a: exchange", "node b: exchange"]


def test_an_op_in_flight_is_open_and_says_whom_it_waits_for() -> None:
    waits = op(3, time.monotonic() - 2.0, {0: 0.0}, seconds=2.0, missing=[1], state="called")
    with agent("a", group([waits], [0, 1])) as a:
        trace = trace_of(a)
    assert [each["name"] for each in events(trace, "B", "node a: rank 0")] == [
        "all_reduce",
        "wait for rank 1",
    ]
    assert events(trace, "X") == []
    (missing,) = events(trace, "i", "node a: rank 1")
    assert missing["name"] == "has not called op 3"


def test_a_failed_op_has_an_instant_with_the_reason() -> None:
    failed = op(
        3,
        time.monotonic() - 2.0,
        {0: 0.0},
        seconds=0.5,
        missing=[1],
        state="failed",
        error="AF301",
        reason="rank 1 has not called it",
    )
    with agent("a", group([failed], [0, 1])) as a:
        trace = trace_of(a)
    (instant,) = events(trace, "i", "node a: rank 0")
    assert instant["name"] == "failed: AF301"
    assert instant["args"] == {"code": "AF301", "reason": "rank 1 has not called it"}
    (missing,) = events(trace, "i", "node a: rank 1")
    assert (missing["name"], missing["ts"]) == ("did not call op 3", instant["ts"])


def test_a_rank_with_several_ops_at_once_has_a_thread_for_each() -> None:
    now = time.monotonic() - 1.0
    ops = [op(seq, now + seq * 0.01, {0: 0.0}, seconds=0.045) for seq in range(8)]
    with agent("a", group(ops, [0])) as a:
        trace = trace_of(a)
    names = sorted(set(threads(trace).values()))
    assert names == ["node a: rank 0", *(f"node a: rank 0 ({n})" for n in (2, 3, 4, 5))]


def test_bytes_in_flight_rise_and_fall_again() -> None:
    now = time.monotonic() - 1.0
    ops = [op(0, now, {0: 0.0}, seconds=0.05), op(1, now + 0.01, {0: 0.0}, seconds=0.05)]
    with agent("a", group(ops, [0])) as a:
        trace = trace_of(a)
    assert [each["args"]["bytes"] for each in events(trace, "C")] == [4096, 8192, 4096, 0]


def test_tracks_of_several_groups_have_their_names() -> None:
    now = time.monotonic() - 1.0
    groups = [
        group([op(0, now, {0: 0.0})], [0], name="dp"),
        group([op(0, now, {0: 0.0})], [0], name="tp"),
        group([op(0, now, {0: 0.0})], [0], name="tp", opening=2),
    ]
    with agent("a", *groups) as a:
        trace = trace_of(a)
        alone = trace_of(a, options=("--group", "dp"))
    assert sorted(threads(trace).values()) == [
        "node a: dp rank 0",
        "node a: tp opening 1 rank 0",
        "node a: tp opening 2 rank 0",
    ]
    assert sorted(threads(alone).values()) == ["node a: rank 0"]


def test_only_the_latest_ops_are_there_if_that_is_asked() -> None:
    now = time.monotonic()
    ops = [op(seq, now - 60.0 + seq, {0: 0.0}) for seq in range(60)]
    with agent("a", group(ops, [0])) as a:
        last = trace_of(a, options=("--limit", "5"))
        recent = trace_of(a, options=("--seconds", "10"))
    assert [each["args"]["seq"] for each in events(last, "X")] == [55, 56, 57, 58, 59]
    assert {each["args"]["seq"] for each in events(recent, "X")} <= set(range(49, 60))
    assert events(recent, "X")[-1]["args"]["seq"] == 59


def test_the_size_of_a_trace_is_bounded_and_the_newest_ops_stay() -> None:
    record = op(0, 0.0, {0: 0.0})
    ops = [SeenOp("a", ("train", 1), record | {"seq": n}, n, n + 0.5, {0: n}) for n in range(1000)]
    kept = newest_ops(ops, most_events=100)
    assert [each.seq for each in kept] == list(range(990, 1000))
    assert newest_ops(ops) == ops


def test_the_trace_is_written_to_a_file_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with agent("a", group([op(0, time.monotonic(), {0: 0.0})], [0])) as a:
        done = run("--agent-url", a, "--output", file)
    assert done.stderr == f"1 op on 1 node: {file}; open it at https://ui.perfetto.dev\n"
    assert done.stdout == ""
    trace_format.parse(file.read_text())


# Clocks


def test_the_shortest_round_trip_counts() -> None:
    readings = [
        ClockSample(0.0, 105.0, 10.0),
        ClockSample(20.0, 121.0, 20.5),
        ClockSample(30.0, 160.0, 39.0),
    ]
    assert estimate(readings) == Offset(100.75, 0.25)


def test_agents_of_one_machine_share_the_best_estimate_of_their_clock() -> None:
    near, far = Offset(100.0, 0.001), Offset(100.0005, 0.002)
    assert with_shared_clocks([far, near]) == [near, near]
    assert with_shared_clocks([Offset(0.001, 0.002)]) == [OUR_CLOCK]
    apart = [Offset(100.0, 0.001), Offset(100.1, 0.001)]
    assert with_shared_clocks(apart) == apart


# Set-ups that are broken: every error has a next step


NOWHERE = "http://127.0.0.1:9"


def test_an_agent_that_is_named_must_answer() -> None:
    with agent("a", group([op(0, time.monotonic(), {0: 0.0})], [0])) as a:
        done = run("--agent-url", a, "--agent-url", NOWHERE, "--output", "-")
    assert done.exit_code == 3
    assert f"{NOWHERE}/v1/clock: " in done.stderr
    assert "nothing listens there: start the agent, or correct its address" in done.stderr


@pytest.mark.parametrize(("token", "words"), [("x", "refuses the token"), ("", "wants a token")])
def test_a_wrong_token_is_told_from_none(token: str, words: str) -> None:
    with agent("a", token="secret") as a:
        done = run("--agent-url", a, token=token)
    assert done.exit_code == 1
    assert f"{a} {words}: set ALLFOLD_TOKEN to that of the services" in done.stderr


def test_an_agent_of_an_earlier_version_is_named_with_the_remedy() -> None:
    with served(lambda _: None) as old:
        done = run("--agent-url", old)
    assert done.exit_code == 1
    assert f"{old} is the agent of an earlier version" in done.stderr
    assert "install the version of this command" in done.stderr


@pytest.mark.parametrize("clock", [{"monotonic": 1.0}, {"monotonic": 1.0, "wall": "noon"}])
def test_a_flight_recorder_of_another_form_is_told(clock: Json) -> None:
    answer = {"node": "a", "clock": clock, "groups": []}
    with served(lambda _: answer) as other:
        done = run("--agent-url", other)
    assert done.exit_code == 3
    assert f"{other} answers with a clock of another version: clock.wall" in done.stderr
    assert "install the same version of Allfold everywhere" in done.stderr


@pytest.mark.parametrize("answer", [["no object"], {"clock": 7}, {"clock": {"monotonic": "x"}}])
def test_something_else_at_the_address_is_told(answer: Any) -> None:
    with served(lambda _: answer) as other:
        done = run("--agent-url", other)
    assert done.exit_code == 3
    assert "something else answers there: correct the address" in done.stderr


def orchestrator_of(*urls: str) -> Any:
    nodes = [{"node": url, "state": "alive", "control_url": url} for url in urls]
    return served(lambda path: {"groups": []} if "groups" in path else {"nodes": nodes})


def test_agents_of_the_orchestrator_that_do_not_answer_are_named_beside_the_trace() -> None:
    with (
        agent("a", group([op(0, time.monotonic(), {0: 0.0})], [0])) as a,
        orchestrator_of(a, NOWHERE) as orchestrator,
    ):
        done = run("--orchestrator", orchestrator, "--output", "-")
    assert done.exit_code == 0, done.output
    assert f"no answer: {NOWHERE}" in done.stderr
    trace = trace_format.parse(done.stdout)
    assert list(trace["otherData"]["problems"]) == [NOWHERE]


def test_without_an_orchestrator_an_agent_can_be_named() -> None:
    done = run("--orchestrator", NOWHERE)
    assert done.exit_code == 3
    assert "To see what runs, ask an agent with --agent-url." in done.stderr


def test_no_nodes_and_no_ops_are_said_with_what_to_do() -> None:
    with orchestrator_of() as orchestrator:
        nobody = run("--orchestrator", orchestrator)
    assert nobody.exit_code == 1
    assert "start agents, or name one with --agent-url" in nobody.stderr
    old = op(0, time.monotonic() - 60.0, {0: 0.0})
    with agent("a", group([old], [0])) as a, agent("b") as empty:
        cases = {
            "run a job, then ask again": run("--agent-url", empty),
            "leave --group out": run("--agent-url", a, "--group", "another"),
            "leave --seconds out": run("--agent-url", a, "--seconds", "1"),
        }
    for advice, done in cases.items():
        assert done.exit_code == 1
        assert advice in done.stderr


@pytest.mark.parametrize("format_", ["perfetto", "torch"])
def test_a_place_that_cannot_be_written_is_told_with_another(tmp_path: Path, format_: str) -> None:
    (tmp_path / "file").touch()
    with agent("a", group([op(0, time.monotonic() - 10.0, {0: 0.0})], [0])) as a:
        done = run("--agent-url", a, "--format", format_, "--output", tmp_path / "file" / "x")
    assert done.exit_code == 1
    assert f"{tmp_path / 'file' / 'x'}" in done.stderr
    assert "name another place with --output" in done.stderr


# The validator of this file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dur": -1.0}, "negative duration"),
        ({"ts": -1.0}, "negative time"),
        ({"ph": "Z"}, "unknown phase"),
        ({"tid": 99}, "thread without a name"),
        ({"id": 1}, "keys"),
        ({"dur": 120_000.0}, "overlaps"),
    ],
)
def test_the_validator_refuses_what_a_viewer_would_drop(change: Json, message: str) -> None:
    now = time.monotonic() - 1.0
    ops = [op(seq, now + seq * 0.1, {0: 0.0}, seconds=0.05) for seq in range(2)]
    with agent("a", group(ops, [0])) as a:
        trace = trace_of(a)
    events(trace, "X")[0].update(change)
    with pytest.raises(trace_format.Invalid, match=message):
        trace_format.parse(json.dumps(trace))
