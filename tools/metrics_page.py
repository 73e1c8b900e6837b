"""The parts of docs/metrics.md that follow from the catalogues and from the rules of alerts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import yaml  # type: ignore[import-untyped]

from allfold_agent.control import catalogue as of_agent
from allfold_orchestrator.http import catalogue as of_orchestrator
from allfold_service.metrics import Metric
from tools.pages import ROOT, Blocks, table

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
METRICS = (*of_agent.CATALOGUE, *of_orchestrator.CATALOGUE)


def alerts() -> list[dict[str, Any]]:
    """The rules of all alerts."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _catalogue(metrics: Iterable[Metric]) -> str:
    lines = [
        [f"`{each.name}`", each.type, ", ".join(f"`{name}`" for name in each.labels), each.help]
        for each in metrics
    ]
    return table(["metric", "type", "labels", "what it is"], lines)


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


BLOCKS: Blocks = {
    "agent": partial(_catalogue, of_agent.CATALOGUE),
    "orchestrator": partial(_catalogue, of_orchestrator.CATALOGUE),
    "alerts": _alerts,
}
