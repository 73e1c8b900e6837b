"""Rules, dashboard and page, against the catalogues and against each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold_core.incident import Cause
from allfold_service.metrics import MetricType
from tests.support.require import requires
from tools import grafana_dashboard, made_files
from tools.metrics_page import ALERTS, METRICS, alerts
from tools.pages import DOCS, renewed

SERIES = {name for metric in METRICS for name in metric.series}
LABELS = {name: metric.labels for metric in METRICS for name in metric.series}
DASHBOARD = grafana_dashboard.dashboard()
PAGE = DOCS / "metrics.md"
UNITS = ("_seconds", "_bytes", "_total", "_info")
COUNTED = (
    "_up", "_registered", "_ready", "_draining", "_ranks", "_groups", "_epoch", "_in_flight",
    "_peers", "_incidents", "_generation", "_nodes", "_missing", "_links", "_open", "_token_limit",
)  # fmt: skip


def expressions() -> Iterator[str]:
    """All of PromQL that is in the repository."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for rule in alerts():
        yield rule["expr"]


@pytest.mark.parametrize("expression", list(expressions()))
def test_what_is_queried_is_in_a_catalogue(expression: str) -> None:
    named = set(re.findall(r"\ballfold_\w+", expression))
    assert named <= SERIES
    known = {"le", "node", "token", "instance", "job"}.union(*(LABELS[name] for name in named))
    for listed in re.findall(r"by \(([^)]*)\)", expression):
        assert set(listed.split(", ")) <= known


def test_the_dashboard_shows_every_metric() -> None:
    shown = {metric for row in grafana_dashboard.ROWS.values() for p in row for metric in p.metrics}
    assert shown == set(METRICS)
    for panel in (panel for row in grafana_dashboard.ROWS.values() for panel in row):
        queried = " ".join(expression for expression, _ in panel.queries)
        for metric in panel.metrics:
            assert any(name in queried for name in metric.series) or metric.name.endswith("_info")


def test_panels_lie_within_the_dashboard_and_apart() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        x, y, w, h = (panel["gridPos"][each] for each in "xywh")
        cells = {(x + i, y + j) for i in range(w) for j in range(h)}
        assert x + w <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_legends_name_labels_that_queries_keep() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            kept = ", ".join(re.findall(r"by \(([^)]*)\)", target["expr"])).split(", ")
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in kept or " by " not in target["expr"], panel["title"]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: object) -> None:
    (found,) = (each for each in METRICS if each is metric)
    assert found.name.startswith(("allfold_agent_", "allfold_orchestrator_"))
    assert found.name.endswith((*UNITS, *COUNTED))
    assert found.name.endswith("_total") == (found.type is MetricType.COUNTER)
    assert found.help.endswith(".")
    assert not {"rank", "source", "target"} & set(found.labels)


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].endswith(".")
    assert len(rule["annotations"]["description"].split(". ")) >= 1
    assert f"**{rule['alert']}**" in PAGE.read_text()


def test_the_page_says_what_to_do_about_each_cause() -> None:
    part = PAGE.read_text().partition("### What to do about an incident")[2]
    assert set(re.findall(r"`(\w+_\w+)`", part)) >= {cause.value for cause in Cause}


def test_made_files_are_what_the_code_says() -> None:
    assert list(made_files.differences()) == []


def test_a_difference_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, file = tmp_path / "page.md", tmp_path / "file"
    page.write_text("one\n<!-- made by make docs: it -->\ntwo\n<!-- end -->\n")
    monkeypatch.setattr(made_files, "ROOT", tmp_path)
    monkeypatch.setattr(made_files, "PAGES", {page: {"it": lambda: "three\n"}})
    monkeypatch.setattr(made_files, "FILES", {file: lambda: "four\n"})
    assert {"-two\n", "+three\n", "+four\n"} <= set(made_files.differences())
    made_files.write()
    assert page.read_text() == "one\n<!-- made by make docs: it -->\nthree\n<!-- end -->\n"
    assert file.read_text() == "four\n"
    assert list(made_files.differences()) == []


def test_a_block_without_its_place_on_the_page_is_named() -> None:
    with pytest.raises(ValueError, match=r"^a\.md and the table of its blocks .* differ in it: "):
        renewed("a.md", "a page without marks", {"it": lambda: ""})


def promtool(*arguments: str | Path) -> None:
    requires("prometheus")
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", ALERTS)


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-tls.yml"])
def test_promtool_accepts_the_configuration(name: str) -> None:
    promtool("check", "config", "--syntax-only", ALERTS.with_name(name))


def test_alerts_fire_when_they_should_and_else_not() -> None:
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))


def test_every_alert_has_a_test_of_its_rule() -> None:
    tested = Path(__file__).with_name("alerts_test.yml").read_text()
    assert [r["alert"] for r in alerts() if f"alertname: {r['alert']}\n" not in tested] == []
