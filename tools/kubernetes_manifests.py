"""The manifests of deploy/kubernetes that are made from the chart, and the table of its values.

The chart in deploy/helm is the one source. What kustomize builds on is what Helm renders from it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tools import grafana_dashboard, kubernetes
from tools.pages import ROOT, Blocks, table

CHART = ROOT / "deploy" / "helm" / "allfold"
FOLDER = ROOT / "deploy" / "kubernetes"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
HEAD = "# Made from deploy/helm/allfold by `make docs`: change it there.\n"
BASE = ("namespace.create=true",)
CERT_MANAGER = (*BASE, "tls.enabled=true", "tls.certManager.enabled=true")
MONITORING = (
    *BASE,
    "monitoring.enabled=true",
    "monitoring.dashboard=true",
    "monitoring.from[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring",
)
_SOURCE = re.compile(r"^---\n# Source: allfold/templates/(\S+)\n", re.MULTILINE)


@cache
def rendered(values: Sequence[str] = (), namespace: str = "allfold") -> dict[str, str]:
    """Return what Helm makes of each template.

    Args:
        values: as for Helm's ``--set``.
    """
    given = [argument for each in values for argument in ("--set", each)]
    text = kubernetes.run("helm", "template", "allfold", CHART, "--namespace", namespace, *given)
    parts = _SOURCE.split(text)
    found = defaultdict[str, list[str]](list)
    for name, document in zip(parts[1::2], parts[2::2], strict=True):
        found[name].append(f"{document.strip()}\n")
    return {name: "---\n".join(documents) for name, documents in found.items()}


def _of_base(template: str) -> str:
    """Return a file of the base; its kustomization says the namespace, so patches need not."""
    return HEAD + rendered(BASE)[template].replace('\n  namespace: "allfold"\n', "\n")


def _of_component(template: str, values: Sequence[str]) -> str:
    return HEAD + rendered(tuple(values))[template]


def values_table() -> str:
    """Return the values of the chart, each with its default and what it is for, in Markdown."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = []
    for path, default, description in _values(schema, defaults):
        shown = json.dumps(default) if isinstance(default, dict | list | bool) else str(default)
        lines.append([f"`{path}`", f"`{shown}`" if shown else "", description])
    return table(["value", "default", ""], lines)


def _values(
    schema: Mapping[str, Any], defaults: Mapping[str, Any], within: str = ""
) -> Iterator[tuple[str, Any, str]]:
    for name, described in schema["properties"].items():
        if name not in defaults:  # "global", which Helm has for itself
            continue
        path, default = f"{within}{name}", defaults[name]
        if "properties" in described and not path.endswith("resources"):
            yield from _values(described, default, f"{path}.")
        else:
            yield path, default, described["description"]


BLOCKS: Blocks = {"values": values_table}
FILES: Mapping[Path, Callable[[], str]] = {
    # What a chart uses has to lie in its folder.
    CHART / "files" / "alerts.yml": ALERTS.read_text,
    CHART / "files" / "allfold.json": grafana_dashboard.text,
    **{
        FOLDER / "base" / f"{name}.yaml": partial(_of_base, f"{name}.yaml")
        for name in ("namespace", "priority", "redis", "orchestrator", "agent", "network")
    },
    FOLDER / "components" / "cert-manager" / "certificate.yaml": partial(
        _of_component, "tls.yaml", CERT_MANAGER
    ),
    FOLDER / "components" / "monitoring" / "monitoring.yaml": partial(
        _of_component, "monitoring.yaml", MONITORING
    ),
}
