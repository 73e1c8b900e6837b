"""``allfold trace`` of real jobs: a late rank in the trace, and what torch's analyser finds."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir
from torch.distributed.flight_recorder.components.types import Collective, MatchState

from tests.conformance import programs
from tests.conformance.lane_status import await_lane
from tests.support import trace_format
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import Job, RankPool, await_called, failures
from tests.support.processes.services import Services

Json = dict[str, Any]

services = services_with("node0", "node1")
pool = pool_of_ranks()
# Of ops of this size the recording has no gaps, whichever way they go.
LARGE = [1 << 15]
LATE_SECONDS = 0.3


def allfold_trace(services: Services, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "allfold.cli", "trace", *map(str, arguments)],
        env=services.env | {"ALLFOLD_ORCHESTRATOR_URL": services.orchestrator_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def dump(services: Services, job: Job, folder: Path) -> Path:
    """The folder with the dumps of a job."""
    allfold_trace(services, "--format", "torch", "--group", job.name, "--output", folder)
    return folder / job.name


def analysed(folder: Path) -> list[Collective]:
    """Return the collectives that torch's own analyser finds in a dump."""
    options = JobConfig().parse_args([str(folder)])
    try:
        details, version = read_dir(options)
    finally:
        gc.enable()  # which it has disabled
    return build_db(details, options, version).collectives


def slices(trace: Json, name: str, since: float = 0.0) -> dict[str, Json]:
    """The last slice of a name in each thread of each process, by the two, from a time on."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    return {
        f"{names['process_name', event['pid'], 0]} "
        f"{names['thread_name', event['pid'], event['tid']]}": event
        for event in sorted(trace["traceEvents"], key=lambda each: each.get("ts", 0.0))
        if event["ph"] == "X" and event["name"] == name and event["ts"] >= since
    }


@pytest.mark.parametrize("strategy", ["auto", "ring"], ids=["by the lane", "by messages"])
def test_a_late_rank_is_late_in_the_trace_of_all_nodes(
    services: Services, pool: RankPool, strategy: str
) -> None:
    options = {"shape": LARGE, "strategy": strategy}
    with pool.job((0, 0, 1, 1)) as job:
        if strategy == "auto":
            await_lane(services, job)
        calls = [job.start(rank, programs.call, **options) for rank in (0, 1, 2)]
        calls.append(job.start(3, programs.call, **options, delay=LATE_SECONDS))
        for call in calls:
            call.result()
        trace = trace_format.parse(allfold_trace(services, "--group", job.name, "--output", "-"))
    found = slices(trace, "all_reduce")
    assert set(found) == {
        "node node0 rank 0",
        "node node0 rank 1",
        "node node0 exchange",
        "node node1 rank 2",
        "node node1 rank 3",
        "node node1 exchange",
    }
    late = found["node node1 rank 3"]["ts"]
    earlier = [found[f"node {place}"]["ts"] for place in ("node0 rank 0", "node1 rank 2")]
    # Nothing begins on the node before its last rank has called; the rest has waited for it.
    assert found["node node1 exchange"]["ts"] >= late
    assert all(late > each for each in earlier)
    assert len({each["args"]["seq"] for each in found.values()}) == 1
    assert slices(trace, "until data of node node1").keys() == {"node node0 exchange"}
    first = min(each["ts"] for each in found.values())
    waits = slices(trace, "wait for rank 3", since=first)
    assert list(waits) == ["node node1 rank 2"]
    assert waits["node node1 rank 2"]["dur"] > found["node node1 rank 3"]["dur"]


def test_between_nodes_no_op_longer_than_a_slot_is_left_out(
    services: Services, pool: RankPool
) -> None:
    count = 40  # more than the page has slots
    with pool.job((0, 1)) as job:
        await_lane(services, job)
        job.run(programs.calls, count=count, shape=LARGE)
        trace = trace_format.parse(allfold_trace(services, "--group", job.name, "--output", "-"))
    long_ops = {
        (event["pid"], event["args"]["seq"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event.get("args", {}).get("bytes") == 4 * LARGE[0]
    }
    assert len(long_ops) == 2 * count


def test_a_healthy_job_is_all_matched_for_torch(
    services: Services, pool: RankPool, tmp_path: Path
) -> None:
    with pool.job((0, 0, 1, 1)) as job:
        job.run(programs.calls, count=3, shape=LARGE)
        for kind, options in (
            ("broadcast", {"root": 1}),
            ("reduce", {"root": 2}),
            ("all_reduce", {"dtype": "int32", "op": "max"}),
        ):
            job.run(programs.call, kind=kind, shape=LARGE, **options)
        found = analysed(dump(services, job, tmp_path))
    names = ["all_reduce"] * 3 + ["broadcast", "reduce", "all_reduce"]
    assert [each.collective_name for each in found] == [f"gloo:{name}" for name in names]
    assert [each.collective_seq_id for each in found] == [0, 1, 2, 3, 4, 5]
    assert all(each.pass_check and not each.missing_ranks for each in found)
    assert {each.collective_state for each in found} == {"completed"}


@pytest.mark.long
def test_torch_names_the_rank_that_is_missing(
    services: Services, pool: RankPool, tmp_path: Path
) -> None:
    with pool.job((0, 0, 1, 1), timeout=2.0) as job:
        job.run(programs.call, shape=LARGE)
        failures([job.start(rank, programs.call, shape=LARGE) for rank in (0, 1, 2)])
        folder = dump(services, job, tmp_path)
    said = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stderr
    assert "Not all ranks joining collective, sequence number: 1" in said
    assert "missing ranks: {3}" in said
    matched, missed = analysed(folder)
    assert (matched.missing_ranks, missed.missing_ranks) == (None, {3})


@pytest.mark.long
@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        ({"kind": "broadcast", "root": 0}, MatchState.COLLECTIVE_TYPE_MISMATCH),
        ({"shape": [LARGE[0] + 1]}, MatchState.SIZE_OR_SYNTAX_MISMATCH),
        ({"dtype": "int32"}, MatchState.COLLECTIVE_DTYPE_MISMATCH),
    ],
)
def test_torch_tells_the_rank_apart_that_has_called_something_else(
    services: Services, pool: RankPool, tmp_path: Path, odd: Json, difference: MatchState
) -> None:
    with pool.job((0, 0, 1, 1)) as job:
        calls = [job.start(rank, programs.call, shape=LARGE) for rank in (0, 1, 2)]
        for rank in (0, 1, 2):
            await_called(services, job, 0, rank)
        calls.append(job.start(3, programs.call, **({"shape": LARGE} | odd)))
        failures(calls)
        (found,) = analysed(dump(services, job, tmp_path))
    assert not found.pass_check
    differ = found.mismatch_collectives
    assert differ is not None
    # It compares all ranks with the one whose file it has read first, whichever that is.
    assert set(differ) in ({3}, {0, 1, 2})
    kinds = [each.type_of_mismatch for each in differ.values()]
    assert {kind.state for kind in kinds if kind is not None} == {difference}


def test_a_job_that_has_ended_can_still_be_looked_at(services: Services, pool: RankPool) -> None:
    with pool.job((0, 1)) as job:
        job.run(programs.call, shape=LARGE)
    trace = json.loads(allfold_trace(services, "--group", job.name, "--output", "-"))
    assert len(slices(trace, "all_reduce")) == 4
