"""The parts of docs/metrics.md that follow from the catalogues and from the rules of alerts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from allfold_agent.control import catalogue as of_agent
from allfold_orchestrator.http import catalogue as of_orchestrator
from allfold_service.metrics import Metric

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
METRICS = (*of_agent.CATALOGUE, *of_orchestrator.CATALOGUE)
_BLOCK = re.compile(
    r"(<!-- made by tests/metrics_page.py: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)


def alerts() -> list[dict[str, Any]]:
    """The rules of all alerts."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _catalogue(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | type | labels | what it is |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def _alerts() -> str:
    parts = []
    for rule in alerts():
        notes, waits = rule["annotations"], rule.get("for")
        after = f", after {waits}" if waits else ""
        head = f"**{rule['alert']}** ({rule['labels']['severity']}{after})."
        parts.append(f"{head} {_plain(notes['summary'])} {_plain(notes['description'])}\n")
    return "\n".join(parts)


def _plain(template: str) -> str:
    """Return a text of an alert with the names of the labels instead of their values."""
    queried = re.sub(r"{{ *with .*?\| query *}}(.*?){{ *end *}}", r"\1", template)
    named = re.sub(r'{{[^}]*\blabel "(\w+)" *}}', r"`\1`", queried)
    return re.sub(r"{{ *\$(?:labels\.)?(\w+)[^}]*}}", r"`\1`", named)


BLOCKS: dict[str, Callable[[], str]] = {
    "agent": lambda: _catalogue(of_agent.CATALOGUE),
    "orchestrator": lambda: _catalogue(of_orchestrator.CATALOGUE),
    "alerts": _alerts,
}


def renewed(page: str) -> str:
    """The page with every block as the code has it."""
    return _BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]]() + found[4], page)
