"""The benchmark of faults: its options, its statistics, and a short run of one row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import cost, steady
from benchmarks.faults.__main__ import line_of
from benchmarks.faults.changes import ChangeLog, read_changes
from benchmarks.faults.measuring import Contestant, Row, Sample, row_of, samples
from benchmarks.faults.options import ROWS, parse
from chaos.faults import Kind
from chaos.injector import Done
from chaos.records import FINISHED, RankLog, Record
from tests.benchmarks.commands import run_benchmark
from tests.support.require import requires

SECONDS = 250.0


class FakeContestant:
    """Four ranks; each fault is recovered from at once, but for those in ``fatal``."""

    name = "fake"

    def __init__(self, fatal: frozenset[int] = frozenset()) -> None:
        self.lives: list[int] = []
        self.faults = 0
        self._fatal = fatal
        self._lost: list[Done] = []

    def start(self, seed: int, /) -> None:
        self.lives.append(seed)
        self._lost = []

    def can_lose(self) -> bool:
        return len(self._lost) < 2

    def fault(self, draw: float) -> Done:
        seat = len(self._lost)
        self._lost.append(Done(Kind.KILL_RANK, f"{seat}", 10.0, 10.0, frozenset([seat]), 1000))
        self.faults += 1
        return self._lost[-1]

    def logs(self) -> list[RankLog]:
        """Every survivor has an error 1 s after the fault, and a result 2 s after it."""
        mask = 0b1111 & ~sum(1 << seat for each in self._lost for seat in each.seats)
        return [
            RankLog(seat, "", FINISHED, list(self._records(seat, mask)))
            for seat in range(4)
            if mask >> seat & 1
        ]

    def _records(self, seat: int, mask: int) -> Iterator[Record]:
        late = seat / 10
        yield Record(0, "world", "all_reduce", 0.0, 1.0, mask=0b1111)
        yield Record(1, "world", "all_reduce", 9.0, 11.0 + late, "PeerLost", "lost")
        if self.faults not in self._fatal:
            yield Record(2, "world", "all_reduce", 11.0, 12.0 + late, mask=mask)

    def end(self) -> None:
        pass


def test_a_sample_is_the_time_of_the_slowest_survivor() -> None:
    contestant: Contestant = FakeContestant()
    (sample,) = samples(contestant, 1, 5.0, seed=7)
    assert [sample.outcome, sample.recovered] == pytest.approx([1.3, 2.3])
    assert sample.resident == 1000


def test_a_life_ends_when_nobody_more_may_be_lost_or_none_recovers() -> None:
    enough = FakeContestant()
    assert len(list(samples(enough, 5, 5.0, seed=7))) == 5
    assert enough.lives == [7, 8, 9]
    fatal = FakeContestant(frozenset([1]))
    found = list(samples(fatal, 3, 0.05, seed=7))
    assert [sample.recovered is None for sample in found] == [True, False, False]
    assert fatal.lives == [7, 8]


def test_a_row_has_the_statistics_of_what_was_recovered_and_the_share() -> None:
    found = [Sample(0.1, 0.2, 5 << 20), Sample(0.3, 0.4, 7 << 20), Sample(0.2, None, 0)]
    row = row_of("kill", "allfold", "4x1", "soon", found)
    assert row.faults == 3
    assert [row.recovered, row.p50, row.p99, row.mean, row.max] == pytest.approx(
        [2 / 3, 0.3, 0.4, 0.3, 0.4]
    )
    assert (row.outcome_p50, row.resident) == (0.2, 7 << 20)
    (line,) = line_of(replace(row, load=1.25))
    assert line.split() == [
        *("kill", "4x1", "allfold", "3", "66.7%", "300.0", "400.0", "300.0", "400.0"),
        *("200.0", "7", "1.2", "soon"),
    ]


def test_what_was_not_measured_has_a_reason_and_no_figures() -> None:
    row = Row("kill", "torchft", "4x1", note="not available: torchft not installed")
    assert line_of(row)[0].split() == ["kill", "4x1", "torchft"]
    assert line_of(row)[1] == "  # not available: torchft not installed"
    nothing = row_of("kill", "allfold", "4x1", "", [Sample(None, None, 0)])
    assert (nothing.recovered, nothing.p50) == (0.0, None)


def test_ops_are_told_apart_by_the_moments_inside_them() -> None:
    logs = [
        RankLog(
            seat,
            "",
            FINISHED,
            [Record(n, "world", "all_reduce", n, n + 0.5 + seat / 10) for n in range(3)],
        )
        for seat in range(2)
    ]
    assert steady._times(logs, [1.55], hit=True) == [pytest.approx(0.6)]
    assert steady._times(logs, [1.55], hit=False) == [pytest.approx(0.6)] * 2


def test_the_time_to_plan_around_a_link_is_that_of_the_order_and_not_of_looking_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steady, "_SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(steady, "_LOOK_SECONDS", 0.0)
    looks = iter([[], ["x", ""], ["x", "x"]])

    def status(_: str) -> dict[str, Any]:
        return {"groups": [{"layout": each} for each in next(looks)]}

    found: Any = SimpleNamespace(nodes=["a"], cluster=SimpleNamespace(status=status))
    order = steady._await_layout(found, 60.0)
    assert order is not None
    assert order.layout == "x"
    assert steady._planned(order, order.since - 3) == "it was planned around after 3 s: x"
    assert steady._await_layout(found, -1.0) is None
    assert steady._planned(None, 0.0) == "it was not planned around"


def test_a_log_of_changes_has_an_op_only_if_it_differs_from_the_one_before(tmp_path: Path) -> None:
    log = ChangeLog(tmp_path / "log")
    for number, mask in enumerate((15, 15, 7, 7)):
        log.note(number, 0.0, mask)
    log.note(4, 0.0, 0, RuntimeError("lost"))
    log.close()
    found = read_changes(tmp_path / "log", 0).records
    assert [(each.number, each.mask, each.code) for each in found] == [
        (0, 15, ""),
        (2, 7, ""),
        (4, 0, "RuntimeError"),
    ]


def test_another_checkout_is_measured_with_its_own_packages(tmp_path: Path) -> None:
    package = tmp_path / "client_sdk" / "src" / "allfold"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("MEDIAN = 0.5")
    benchmark = tmp_path / "benchmarks"
    benchmark.mkdir()
    (benchmark / "__main__.py").write_text(
        "import json, sys, allfold\n"
        "found = [{'size': 8, 'libraries': {'allfold': {'median': allfold.MEDIAN}}}]\n"
        "json.dump({'results': found}, open(sys.argv[-1], 'w'))\n"
    )
    assert cost._run(tmp_path) == {8: 0.5}


def test_options_name_rows_and_sizes() -> None:
    assert list(parse([]).rows) == list(ROWS)
    found = parse(["--rows", "reset,cost", "--nodes", "4", "--peers", "none", "--full"])
    assert (found.rows, found.nodes, found.peers) == (["reset", "cost"], [4], [])
    assert (found.faults, found.seconds) == (500, 1800.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "fire"], "'fire' is none of kill-rank"),
        (["--nodes", "two"], "'two' is no list of numbers"),
        (["--nodes", "2"], "3 nodes at least"),
        (["--nodes", "8", "--ranks", "4"], "16 ranks at most"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        parse(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_a_reset_is_measured_and_the_results_are_written(tmp_path: Path) -> None:
    requires("redis")
    options = ["--rows", "reset", "--faults", "2"]
    file = tmp_path / "results.json"
    printed, (row,) = run_benchmark("benchmarks.faults", *options, json_file=file, timeout=SECONDS)
    assert row["note"].endswith("; 0 errors")
    assert "reset inside an op of 16 MiB" in printed
