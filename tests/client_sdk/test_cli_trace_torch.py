"""``allfold trace --format torch``: dumps that torch's own analyser reads, of fake agents."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from allfold.cli._asking import OUR_CLOCK
from allfold.cli._trace.asking import NodeFlight
from allfold.cli._trace.torch_dump import GroupDump, group_dumps, profiling_name, sizes_of, write
from tests.client_sdk.test_cli_trace import NOWHERE, run
from tests.support.fakes.flights import agent, group, op, served

Json = dict[str, Any]
ANSWERED = 1000.0


def flight(node: str, ops: list[Json], ranks: list[int], **of_group: Any) -> NodeFlight:
    groups = [group(ops, ranks, **of_group)]
    return NodeFlight(f"http://{node}", node, ANSWERED, OUR_CLOCK, 0.0, groups)


def ended(seq: int, *ranks: int, **other: Any) -> Any:
    """An op that all of these ranks have called, a minute ago."""
    return op(seq, ANSWERED - 60.0 + seq, dict.fromkeys(ranks, 0.0), **other)


def dump_of(*flights: NodeFlight) -> GroupDump:
    (dump,) = group_dumps(flights, our_wall=0.0)
    return dump


def seqs(dump: GroupDump, rank: int) -> list[int]:
    return [entry["collective_seq_id"] for entry in dump.ranks[rank]["entries"]]


def test_each_rank_has_the_ops_that_it_has_called() -> None:
    waits = op(2, ANSWERED - 5.0, {0: 0.0}, seconds=5.0, missing=[1], state="called")
    on_a = flight("a", [ended(0, 0, 1), ended(1, 0, 1), waits], [0, 1], last_seq={"0": 2, "1": 1})
    on_b = flight("b", [ended(0, 2, 3), ended(1, 2, 3)], [2, 3])
    dump = dump_of(on_a, on_b)
    assert [seqs(dump, rank) for rank in range(4)] == [[0, 1, 2], [0, 1], [0, 1], [0, 1]]
    states = [entry["state"] for entry in dump.ranks[0]["entries"]]
    assert states == ["completed", "completed", "scheduled"]
    status = dump.ranks[0]["pg_status"]["train"]
    assert status == {
        "last_enqueued_collective": 2,
        "last_started_collective": 1,
        "last_completed_collective": 1,
    }
    assert (dump.left_out, dump.without_dump) == (0, [])


def test_an_op_that_one_node_has_no_record_of_is_left_out() -> None:
    """The short lane is recorded in samples, and old records are dropped."""
    on_a = flight("a", [ended(0, 0, 1), ended(7, 0, 1)], [0, 1])
    on_b = flight("b", [ended(3, 2, 3), ended(7, 2, 3)], [2, 3])
    dump = dump_of(on_a, on_b)
    assert [seqs(dump, rank) for rank in range(4)] == [[7]] * 4
    assert dump.left_out == 2


def test_an_op_that_may_just_be_under_way_is_left_out() -> None:
    young = op(1, ANSWERED - 0.5, {0: 0.0}, seconds=0.5, missing=[1], state="called")
    on_a = flight("a", [ended(0, 0, 1), young], [0, 1], last_seq={"0": 1, "1": 0})
    on_b = flight("b", [ended(0, 2, 3)], [2, 3])
    assert seqs(dump_of(on_a, on_b), 0) == [0]


def test_an_op_that_is_over_says_at_once_who_has_not_called_it() -> None:
    failed = op(1, ANSWERED - 0.1, {0: 0.0}, seconds=0.1, missing=[1], state="failed")
    on_a = flight("a", [ended(0, 0, 1), failed], [0, 1])
    dump = dump_of(on_a)
    assert [seqs(dump, rank) for rank in range(2)] == [[0, 1], [0]]


def test_an_op_that_is_complete_anywhere_is_complete() -> None:
    waits = ended(0, 2, 3, state="started")
    dump = dump_of(flight("a", [ended(0, 0, 1)], [0, 1]), flight("b", [waits], [2, 3]))
    assert {dump.ranks[rank]["entries"][0]["state"] for rank in range(4)} == {"completed"}


def test_a_rank_with_another_call_has_that() -> None:
    other = ended(0, 0, 1)
    call = {name: other[name] for name in ("what", "reduce_op", "dtype", "root", "counts")}
    other["other_calls"] = {"1": call | {"kind": "broadcast", "shape": [3]}}
    dump = dump_of(flight("a", [other], [0, 1]))
    (first,), (second,) = (dump.ranks[rank]["entries"] for rank in (0, 1))
    assert (first["profiling_name"], first["input_sizes"]) == ("gloo:all_reduce", [[1024]])
    assert (second["profiling_name"], second["input_sizes"]) == ("gloo:broadcast", [[3]])


def test_ranks_have_their_numbers_in_the_newest_epoch_with_ops() -> None:
    before, after = ended(0, 0, 1), ended(1, 0, epoch=1, world_size=1)
    dump = dump_of(flight("a", [before, after], [0], epoch=1))
    assert (dump.world_size, list(dump.ranks), seqs(dump, 0)) == (1, [0], [1])


def test_of_a_name_the_newest_opening_with_ops_counts() -> None:
    old, new = group([ended(0, 0)], [0]), group([ended(5, 0)], [0], opening=2)
    empty = group([], [0], opening=3)
    both = NodeFlight("http://a", "a", ANSWERED, OUR_CLOCK, 0.0, [old, empty, new])
    assert seqs(dump_of(both), 0) == [5]


@pytest.mark.parametrize("name", ["..", ".", "", "../other", "a/b"])
def test_no_name_of_a_group_leads_out_of_the_folder_and_no_file_of_others_is_removed(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    others = [tmp_path / "rank_0", folder / "rank_0", tmp_path / "other" / "rank_0"]
    dump = GroupDump(name, 1, {0: {}}, 0)
    (place,) = write([dump], folder)
    program = place / "rank_program.py"
    for each in (*others, program):
        each.parent.mkdir(exist_ok=True)
        each.write_text("of somebody else")
    write([dump], folder)
    assert place.resolve().parent == folder.resolve()
    assert [each.read_text() for each in (*others, program)] == ["of somebody else"] * 4


@pytest.mark.parametrize(
    ("kind", "counts", "name", "sizes"),
    [
        ("all_reduce", [], "all_reduce", ([[4]], [[4]])),
        ("barrier", [], "barrier", ([[]], [[]])),
        ("all_gather", [], "all_gather", ([[4]], [[8]])),
        ("all_gather", [1, 2], "all_gather_v", ([[1, 4], [2, 4]],) * 2),
        ("reduce_scatter", [], "reduce_scatter", ([[8]], [[4]])),
        ("scatter", [], "scatter", ([[8]], [[4]])),
        ("gather", [], "gather", ([[4]], [[8]])),
        ("all_to_all", [1, 2, 1, 5], "all_to_all", ([[12]], [[24]])),
    ],
)
def test_sizes_are_those_of_the_rank(kind: str, counts: list[int], name: str, sizes: Any) -> None:
    call: Any = {
        "kind": kind,
        "shape": [4],
        "counts": counts,
        "root": 0,
        "dtype": "float32",
        "reduce_op": "sum",
    }
    assert profiling_name(call) == f"gloo:{name}"
    assert sizes_of(call, 0, 2) == sizes


def test_a_rank_that_is_not_the_root_brings_or_gets_nothing() -> None:
    call: Any = {"shape": [4], "counts": [], "root": 0, "dtype": "float32", "reduce_op": None}
    assert sizes_of(call | {"kind": "scatter"}, 1, 2) == ([[]], [[4]])
    assert sizes_of(call | {"kind": "gather"}, 1, 2) == ([[4]], [[]])


def test_each_group_has_a_folder_with_a_file_per_rank(tmp_path: Path) -> None:
    now = time.monotonic() - 10.0
    groups = [group([op(0, now, {0: 0.0, 1: 0.0})], [0, 1], name=name) for name in ("dp", "tp")]
    stale = tmp_path / "dp" / "rank_9"
    stale.parent.mkdir()
    stale.touch()
    with agent("a", *groups) as a:
        done = run("--agent-url", a, "--format", "torch", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    written = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*"))
    assert written == ["dp/rank_0", "dp/rank_1", "tp/rank_0", "tp/rank_1"]
    assert f"group 'dp': 2 ranks: torchfrtrace {tmp_path / 'dp'}" in done.stderr
    assert "--allow-incomplete-ranks  (nothing is known of ranks 2, 3)" in done.stderr


def test_a_name_of_a_group_leads_to_no_other_folder(tmp_path: Path) -> None:
    bad = group([op(0, time.monotonic() - 10.0, {0: 0.0})], [0], name="../../elsewhere")
    with agent("a", bad) as a:
        run("--agent-url", a, "--format", "torch", "--output", tmp_path / "in")
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("rank_*")] == [
        "in/elsewhere/rank_0"
    ]


def test_what_torch_needs_whole_cannot_be_cut_by_time() -> None:
    done = run("--agent-url", NOWHERE, "--format", "torch", "--seconds", "5")
    assert done.exit_code == 2
    assert "use --limit" in done.stderr


def test_without_ops_there_is_no_dump(tmp_path: Path) -> None:
    with served(lambda path: None if "status" in path else {"groups": []}) as orchestrator:
        assert run("--orchestrator", orchestrator, "--format", "torch").exit_code == 1
    with agent("a") as a:
        done = run("--agent-url", a, "--format", "torch", "--output", tmp_path)
    assert (done.exit_code, list(tmp_path.iterdir())) == (1, [])
