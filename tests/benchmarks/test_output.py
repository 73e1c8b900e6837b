"""The output of the benchmark suite: the table, JSON, Markdown and plots."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import results, table
from benchmarks.markdown import page
from benchmarks.plan import MIB, Case, Shape
from benchmarks.plots import draw
from benchmarks.results import Memory, Report
from tests.benchmarks.samples import result

ENVIRONMENT = {
    "started": "2026-01-01T00:00:00+00:00",
    "commit": "abc",
    "python": "3.11",
    "versions": {"torch": "2", "mpich": None},
    "cpu": "a CPU",
    "cores": 2,
    "memory": "24 GB",
    "load": 0.25,
    "kernel": "6",
}
RESULTS = [
    result({"allfold": 0.0002, "gloo": 0.001}, size=4096),
    result({"allfold": 0.01, "gloo": 0.05}, size=64 * MIB),
    result({"allfold": 0.3, "gloo": 0.5, "no_sync": 0.2}, kind="ddp", size=100 * MIB),
    result({"allfold": 0.02, "allfold:int8": 0.01, "gloo": 0.05}, shape="4x1", network="1gbit"),
    result({"allfold": 0.01, "gloo": 0.02}, kind="decode"),
    result({"allfold": 0.0003, "gloo": 0.003}, computing=0.002),
]
MEMORY = [Memory(Shape(1, 4), Case("all_reduce", 64 * MIB), "allfold", 70 * MIB, 0)]
LIMITS = [{"name": "copy", "seconds": 1e-3, "rate": 4e12, "wrong": 0}]
REPORT = Report(ENVIRONMENT, RESULTS, MEMORY, LIMITS)


def test_each_library_has_a_line_under_the_names_of_its_columns() -> None:
    *_, names = table.head()
    first, second = table.rows(RESULTS[1])
    ours, gloo = (dict(zip(names.split(), row.split(), strict=True)) for row in (first, second))
    assert (ours["size"], ours["library"], ours["ratio"]) == ("67108864", "allfold", "1.00")
    assert (ours["p50"], ours["mean"], ours["p99"]) == ("10000.0", "20000.0", "90000.0")
    assert (ours["algbw"], ours["busbw"], ours["#wrong"]) == ("6.711", "10.066", "0")
    assert (gloo["library"], gloo["ratio"]) == ("gloo", "5.00")


def test_a_training_step_is_followed_by_its_communication() -> None:
    assert "allfold 100.0 ms, gloo 300.0 ms; allfold/gloo 0.33" in table.rows(RESULTS[2])[-1]


def test_decoding_is_followed_by_its_speed_which_is_that_of_the_mean() -> None:
    assert table.rows(RESULTS[4])[-1] == "# tokens per second: allfold 50.0, gloo 25.0"


def test_what_comes_before_an_op_is_shown() -> None:
    *_, names = table.head()
    where = names.split().index("before")
    assert [table.rows(RESULTS[each])[0].split()[where] for each in (0, 5)] == ["0", "2ms"]


def test_cases_in_which_allfold_is_slower_are_named() -> None:
    slow = result({"allfold": 0.2, "plain": 0.1, "gloo": 0.1, "mpich": 0.3}, kind="scatter")
    assert table.behind([*RESULTS, slow]) == ["# behind gloo: 1x4 scatter 4 KiB 0.50"]
    assert table.behind(RESULTS) == []


def test_what_was_wrong_is_counted() -> None:
    bad = result({"allfold": 0.1, "gloo": 0.1}, wrong=3)
    assert Report(ENVIRONMENT, [bad], []).wrong == 6
    assert REPORT.wrong == 0
    assert Report(ENVIRONMENT, [bad], limits=[LIMITS[0] | {"wrong": 1}]).wrong == 7


def test_an_all_reduce_on_one_gpu_is_held_against_a_plain_copy() -> None:
    """4 ranks read and write 64 MiB each, in 10 ms."""
    line = table.shared_rate(RESULTS[1], copy=1e11)
    assert line == "# moves 54 GB/s on the GPU, 54% of a plain copy"
    assert table.shared_rate(RESULTS[2], copy=1e11) is None
    assert "4000 GB/s" in table.limit_row(LIMITS[0])


def test_json_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    REPORT.write(file)
    found = results.read([file])
    assert found.results == RESULTS
    assert found.memory == MEMORY
    assert found.environment == ENVIRONMENT
    assert found.limits == LIMITS
    assert results.read([file, file]).results == RESULTS * 2


@pytest.mark.parametrize("text", ["{}", "[]", "shape,time"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no file of this command"):
        results.read([file])


def test_a_page_has_a_table_for_each_shape_and_network() -> None:
    text = page(REPORT)
    assert "### 1x4, loopback" in text
    assert "### 4x1, 1gbit, 0.952 Gbit/s of payload in one TCP stream" in text
    assert "| all_reduce | 4 KiB | 200 µs / 1.8 ms / 400 µs | 1 ms / 9 ms / 2 ms |" in text
    assert "| all_reduce after 2ms | 4 KiB | 300 µs / 2.7 ms / 600 µs |" in text
    assert "Tokens per second: allfold 50.0, gloo 25.0." in text
    assert "| 1x4 | 64 MiB | allfold | 70 MiB | 0 MiB |" in text
    assert "allfold 100 ms, gloo 300 ms, allfold / gloo 0.33." in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_curves_of_several_sizes_are_drawn(tmp_path: Path) -> None:
    drawn = draw(REPORT, tmp_path / "plots")
    assert [path.name for path in drawn] == ["loopback-1x4-all_reduce.svg"]
    text = "".join(ElementTree.parse(drawn[0]).getroot().itertext())
    for shown in ("allfold", "gloo", "4 KiB", "64 MiB", "bus bandwidth, GB/s"):
        assert shown in text
    before = drawn[0].read_bytes()
    assert draw(REPORT, tmp_path / "plots")[0].read_bytes() == before
