"""The page of performance and the runs that it is made of, of results that nobody measured."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as program
from benchmarks import machine, options, pages, requirements, results
from benchmarks.errors import BenchmarkFailed
from benchmarks.options import Options
from benchmarks.pages import kept
from benchmarks.pages.commands import COMMANDS
from benchmarks.pages.page import blocks, headline
from benchmarks.plan import MIB, MODELS
from benchmarks.results import PINNED, Report
from tests.benchmarks.samples import result
from tests.benchmarks.test_output import ENVIRONMENT
from tools.pages import DOCS
from tools.pages import blocks as blocks_in

STEP = MODELS[1].size
NEWER = [
    result({"allfold": 5e-6, "gloo": 2e-4}, size=4, shape="1x2"),
    result({"allfold": 6e-6, "allfold-torch": 1e-5, "gloo": 3e-4, "mpich": 3e-6}, shape="1x2"),
    result({"allfold": 8e-6, "gloo": 4e-4}, shape="1x2", computing=0.005),
    result({"allfold": 1e-3, "gloo": 8e-4}, size=MIB, shape="2x1", network=PINNED),
    result({"allfold": 4e-4, "gloo": 8e-4}, shape="2x1", network="1gbit"),
    result({"allfold": 9e-4, "gloo": 3e-4}, kind="gather", shape="2x1"),
    result({"allfold": 0.3, "gloo": 0.45, "no_sync": 0.2}, kind="ddp", shape="2x1", size=STEP),
    result({"allfold": 0.01, "gloo": 0.02}, kind="decode", shape="2x1"),
]
OLDER = [
    result({"allfold": 2e-4, "gloo": 1e-4}, size=4, shape="1x2"),
    result({"allfold": 9e-4, "gloo": 1e-3}, kind="gather", shape="2x1"),
]
TEMPLATE = DOCS / "performance.md"


def run(
    found: list[results.Result], started: str = "2026-01-02T03:04:05+00:00", **more: object
) -> Report:
    about = {"started": started, "arguments": ["--pages", "docs"], "priority": None}
    return Report(ENVIRONMENT | about | more, found)


def made(*runs: Report) -> dict[str, str]:
    return {name: make() for name, make in blocks(runs).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page as the repository has it."""
    (tmp_path / "performance.md").write_text(TEMPLATE.read_text())
    return tmp_path


def test_the_page_of_a_run_that_was_kept_is_that_of_the_run(tmp_path: Path) -> None:
    path = kept.keep(tmp_path, run(NEWER))
    assert path == tmp_path / "bench" / "2026-01-02T0304.json"
    assert made(*kept.shown(tmp_path)) == made(run(NEWER))
    assert len(path.read_text().splitlines()) == len(NEWER) + 2


def test_the_two_runs_are_the_newest_and_the_newest_of_another_day_or_machine() -> None:
    first, second, third = (run([], f"2026-01-0{day}") for day in (1, 2, 2))
    assert kept.chosen([]) == []
    assert kept.chosen([second, third]) == [second]
    assert kept.chosen([first, second, third]) == [second, first]
    for other in ({"cpu": "another CPU"}, {"machine": "0a1b2c3d"}):
        elsewhere = run([], "2026-01-02", **other)
        assert kept.chosen([first, elsewhere, second]) == [elsewhere, second]


def test_every_run_says_its_processor_its_load_and_its_priority() -> None:
    text = made(run(NEWER, priority="nice -5"))["runs"]
    assert "a CPU, 2 cores" in text
    assert "a CPU (machine 0a1b2c3d), 2 cores" in made(run(NEWER, machine="0a1b2c3d"))["runs"]
    assert "with a load of 0.2 in the minute before, and **nice -5**." in text
    assert "`python -m benchmarks --pages docs`" in text


def test_a_page_of_one_run_says_so() -> None:
    assert "**this one run**" in made(run(NEWER))["runs"]
    assert "**this one run**" not in made(run(NEWER), run(OLDER, "2025-12-31"))["runs"]


def test_both_runs_are_in_each_cell() -> None:
    table = made(run(NEWER), run(OLDER, "2025-12-31"))["all-reduce"]
    (row,) = [line for line in table.splitlines() if "| 4 B |" in line]
    assert "| 5 µs / 45 µs / 10 µs<br>200 µs / 1.8 ms / 400 µs |" in row
    assert "| 200 µs / 1.8 ms / 400 µs<br>100 µs / 900 µs / 200 µs |" in row
    assert "| 40<br>**0.5** |  | 1<br>1 |" in row


def test_all_reduces_are_shown_by_network_and_by_what_comes_before_them() -> None:
    table = made(run(NEWER))["all-reduce"]
    heads = [line.removeprefix("### ") for line in table.splitlines() if line.startswith("#")]
    assert heads == [
        "Back to back, loopback",
        "After 5ms of computing, loopback",
        "Back to back, loopback, one core per node",
        "Back to back, 1gbit, 0.952 Gbit/s of payload in one TCP stream",
    ]
    assert "| gloo / allfold | gloo / allfold-torch | CPU time |" in table
    assert "| 50 | 30 | 1 |" in table


def test_a_training_step_is_held_against_that_of_gloo() -> None:
    table = made(run(NEWER))["training"]
    assert "| ddp | 2x1 | 16 MiB | 300 ms / 2.7 s / 600 ms |" in table
    assert table.rstrip().endswith("| 1.5 | 1 |")


def test_where_allfold_is_behind_in_any_run_is_told() -> None:
    told = made(run(NEWER), run(OLDER, "2025-12-31"))["behind"].splitlines()[2:]
    assert [" ".join(line.strip("| ").split(" | ")) for line in told] == [
        "gloo all_reduce back to back loopback 1x2 4 B: 40, **0.5**",
        "gloo all_reduce back to back pinned 2x1 1 MiB: **0.8**, –",
        "gloo gather back to back loopback 2x1 4 KiB: **0.33**, 1.11",
        "mpich all_reduce back to back loopback 1x2 4 KiB: **0.5**, –",
    ]
    close = result({"allfold": 1.0, "gloo": 0.9999}, kind="ddp", size=STEP)
    assert "| gloo | ddp |  | loopback | 1x4 | 16 MiB: **0.99** |" in made(run([close]))["behind"]
    assert "In none of the cases" in made(run(NEWER[:1]))["behind"]


def test_the_page_is_written_between_its_marks_with_a_plot_for_each_table(folder: Path) -> None:
    paths = list(pages.write(folder, [run(NEWER)]))
    assert all(path.exists() for path in paths)
    text = (folder / "performance.md").read_text()
    assert blocks_in(text) == made(run(NEWER))
    (plot,) = (folder / "images" / "bench").iterdir()
    assert f"(images/bench/{plot.name})" in text
    shown = "".join(ElementTree.parse(plot).getroot().itertext())
    assert all(each in shown for each in ("1x2", "allfold", "gloo", "4 KiB", "p99"))
    assert list(pages.write(folder, [run(NEWER)])) == paths
    assert (folder / "performance.md").read_text() == text


def test_the_headline_is_of_the_newest_run_in_both_rhythms() -> None:
    text = headline([run(NEWER), run(OLDER, "2025-12-31")])
    assert (
        "| nodes × ranks | tensor | Allfold, back to back | Gloo | Gloo / Allfold | Allfold, "
        in text
    )
    assert "| 1x2 | 4 KiB | 6 µs / 54 µs | 300 µs / 2.7 ms | 50 | 8 µs / 72 µs | 400 µs / " in text
    assert "4 B" not in text
    assert "Nothing has been measured" in headline([])


def test_without_a_page_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "performance.md").write_text("# Title\n")
    with pytest.raises(BenchmarkFailed, match="differ in all-reduce"):
        list(pages.write(tmp_path, [run(NEWER)]))
    assert (tmp_path / "performance.md").read_text() == "# Title\n"


def test_the_commands_of_the_page_have_all_networks_rhythms_and_steps() -> None:
    chosen = [options.parse(command.split()) for command in COMMANDS]
    networks = [each.name for one in chosen for each in one.networks]
    assert networks == ["1gbit", "10gbit"]
    assert [one.pin for one in chosen].count(True) == 1
    assert {part for one in chosen for part in one.parts} == {"collectives", "ddp", "decode"}
    assert not any(one.computing for one in chosen)  # the usual ones, which are both


def test_a_page_is_not_measured_with_another_priority(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(machine, "priority", lambda: "nice -5")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--pages", str(folder)])
    with pytest.raises(SystemExit, match="nice 0, and this process has nice -5"):
        program.main()


def test_what_this_machine_cannot_measure_is_left_out_and_the_page_says_so(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measured(chosen: Options) -> Report:
        asked.append(chosen)
        if chosen.networks:
            raise BenchmarkFailed("not run: networks need root\nnode0 last wrote: nothing")
        return run(NEWER if chosen.pin else [])

    monkeypatch.setattr(machine, "priority", lambda: None)
    monkeypatch.setattr(requirements, "is_installed", lambda peer: peer != "openmpi")
    monkeypatch.setattr(program, "_measure", measured)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--pages", str(folder)])
    program.main()
    text = (folder / "performance.md").read_text()
    assert "--shapes 2x1: not run: networks need root\n" in text
    assert blocks_in(text)["training"] == made(run(NEWER))["training"]
    assert not any("openmpi" in chosen.peers for chosen in asked)
    assert "# left out: not run" in capsys.readouterr().out
