"""The page of latencies and its short form, of results that nobody measured."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import summary
from benchmarks.errors import BenchmarkFailed
from benchmarks.plan import MIB
from benchmarks.results import Report
from benchmarks.summary import BEGIN, END
from tests.benchmarks.samples import result
from tests.benchmarks.test_output import ENVIRONMENT

RESULTS = [
    result({"allfold": 5e-6, "gloo": 2e-4}, size=4, shape="1x2"),
    result({"allfold": 6e-6, "gloo": 3e-4, "deepspeed": 3e-6}, size=4096, shape="1x2"),
    result({"allfold": 8e-6, "gloo": 4e-4}, size=4096, shape="1x2", computing=0.002),
    result({"allfold": 4e-5, "gloo": 4e-4}, size=4096, shape="2x1"),
    result({"allfold": 1e-3, "gloo": 1e-3}, size=64 * MIB, shape="2x1"),
    result({"allfold": 4e-4, "gloo": 8e-4}, size=4096, shape="2x1", network="1gbit"),
    result({"allfold": 0.01, "gloo": 0.02}, kind="decode", shape="2x1", network="1gbit"),
    result({"allfold": 0.3, "gloo": 0.5, "no_sync": 0.2}, kind="ddp", shape="2x2"),
]
README = f"# Title\n\n{BEGIN}\nwhat was here\n{END}\n\nThe end.\n"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README)
    page, readme = tmp_path / "docs" / "latency.md", tmp_path / "README.md"
    paths = list(summary.write(Report(ENVIRONMENT, RESULTS), page, readme))
    assert all(path.exists() for path in paths)
    return tmp_path


def test_the_page_has_every_size_with_p50_p99_mean_and_ratio(written: Path) -> None:
    text = (written / "docs" / "latency.md").read_text()
    assert "## All-reduce back to back, loopback" in text
    assert "## All-reduce after 2ms of computing, loopback" in text
    assert "### 2x1 at 1gbit" in text
    ours, gloo = "**6 µs** / 54 µs / 12 µs", "**300 µs** / 2.7 ms / 600 µs ×50"
    assert f"| 4 KiB | {ours} | {gloo} | **3 µs** / 27 µs / 6 µs ×0.5 |" in text
    assert "64 MiB" not in text


def test_the_page_has_the_speed_of_decoding_and_the_communication_of_training(
    written: Path,
) -> None:
    text = (written / "docs" / "latency.md").read_text()
    speeds = "50.0<br>**10 ms** / 90 ms / 20 ms | 25.0<br>**20 ms** / 180 ms / 40 ms"
    assert f"| 2x1 at 1gbit | {speeds} |" in text
    assert "| nodes × ranks | allfold | gloo | allfold / gloo |" in text
    assert "| 2x2 | 100 ms | 300 ms | 0.33 |" in text


def test_each_network_and_mode_has_a_plot_of_all_shapes_and_libraries(written: Path) -> None:
    images = written / "docs" / "images" / "bench"
    assert {path.name for path in images.iterdir()} == {
        "latency-loopback-back-to-back.svg",
        "latency-loopback-after-2ms-of-computing.svg",
        "latency-1gbit-back-to-back.svg",
    }
    root = ElementTree.parse(images / "latency-loopback-back-to-back.svg").getroot()
    text = "".join(root.itertext())
    for shown in ("1x2", "2x1", "allfold", "gloo", "deepspeed", "4 KiB", "p99"):
        assert shown in text


def test_the_short_form_replaces_what_is_between_the_marks_and_nothing_else(written: Path) -> None:
    text = (written / "README.md").read_text()
    before, short, after = text.partition(BEGIN)[0], text, text.partition(END)[2]
    assert (before, after) == ("# Title\n\n", "\n\nThe end.\n")
    assert "what was here" not in short
    assert "| 1x2 | back to back | 6 µs / 54 µs | 300 µs / 2.7 ms | 3 µs / 27 µs |" in short
    assert "| 1x2 | after 2ms of computing | 8 µs / 72 µs | 400 µs / 3.6 ms |  |" in short
    assert "](docs/latency.md)" in short
    assert "](docs/images/bench/latency-loopback-back-to-back.svg)" in short
    assert "| 2x1 at 1gbit | 50.0 | 25.0 |" in short


def test_a_second_summary_of_the_same_results_changes_nothing(written: Path) -> None:
    readme, page = written / "README.md", written / "docs" / "latency.md"
    before = readme.read_text(), page.read_text()
    list(summary.write(Report(ENVIRONMENT, RESULTS), page, readme))
    assert (readme.read_text(), page.read_text()) == before


def test_a_file_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n")
    with pytest.raises(BenchmarkFailed, match="does not have once a line"):
        list(summary.write(Report(ENVIRONMENT, RESULTS), tmp_path / "latency.md", readme))
    assert readme.read_text() == "# Title\n"


def test_without_a_latency_there_is_no_summary(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="of which there is none"):
        list(summary.write(Report(ENVIRONMENT, RESULTS[4:5]), tmp_path / "latency.md", None))
