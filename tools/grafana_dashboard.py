"""The dashboard for Grafana, ``deploy/grafana/allfold.json``: its panels, from the catalogues.

A panel's description is what the catalogue says of its metrics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allfold_agent.control import catalogue as agent
from allfold_orchestrator.http import catalogue as orchestrator
from allfold_service.metrics import Metric

_COLUMNS, _HEIGHT, _STAT_HEIGHT = 24, 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RATE = "$__rate_interval"
_GROUP = 'group=~"$group"'
_INCIDENT = ("group", "effect", "cause", "culprit", "sentence")


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        metrics: that it shows.
        queries: expressions of PromQL, with the legend of each.
        unit: as Grafana calls it.
        kind: ``timeseries``, ``stat`` or ``table``, which shows the labels ``columns``.
        width: of 24 columns.
    """

    title: str
    metrics: tuple[Metric, ...]
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    columns: tuple[str, ...] = ()


def _one(title: str, metric: Metric, expression: str, legend: str, unit: str = "short") -> Panel:
    return Panel(title, (metric,), ((expression, legend),), unit)


def _stat(title: str, metric: Metric, expression: str) -> Panel:
    return Panel(title, (metric,), ((expression, ""),), kind="stat", width=4)


def _quantiles(title: str, metric: Metric, by: str, selector: str = "") -> Panel:
    rate = f"sum by ({by}, le) (rate({metric.name}_bucket{selector}[{_RATE}]))"
    legend = " ".join("{{" + label + "}}" for label in by.split(", "))
    quantiles = tuple(
        (f"histogram_quantile({share}, {rate})", f"{legend} p{share:.0%}".rstrip("%"))
        for share in (0.5, 0.99)
    )
    return Panel(title, (metric,), quantiles, "s")


ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        _stat("Nodes alive", orchestrator.NODES, 'max(allfold_orchestrator_nodes{state="alive"})'),
        _stat("Store answers", orchestrator.STORE_UP, f"min({orchestrator.STORE_UP.name})"),
        _stat(
            "Open incidents",
            orchestrator.INCIDENTS,
            f"sum(max by (cause, effect) ({orchestrator.INCIDENTS.name})) or vector(0)",
        ),
        _stat(
            "Ranks missing", orchestrator.RANKS_MISSING, f"max({orchestrator.RANKS_MISSING.name})"
        ),
        _stat("Ranks connected", agent.RANKS, f"sum({agent.RANKS.name})"),
        _stat("Agents not ready", agent.READY, f"count({agent.READY.name} == 0) or vector(0)"),
    ),
    "Ops": (
        Panel(
            "What hinders ops now",
            (orchestrator.INCIDENT_INFO,),
            ((f"max by ({', '.join(_INCIDENT)}) ({orchestrator.INCIDENT_INFO.name})", ""),),
            kind="table",
            width=24,
            columns=_INCIDENT,
        ),
        _one(
            "Collectives per second",
            agent.COLLECTIVES,
            f"max by (group) (rate({agent.COLLECTIVES.name}{{{_GROUP}}}[{_RATE}]))",
            "{{group}}",
            "ops",
        ),
        _quantiles("Seconds of a collective", agent.SECONDS, "op, lane", f"{{{_GROUP}}}"),
        _quantiles("Wait for the last local rank", agent.SKEW, "group", f"{{{_GROUP}}}"),
        _one(
            "Age of the oldest collective",
            agent.OLDEST,
            f"max by (group) ({agent.OLDEST.name}{{{_GROUP}}})",
            "{{group}}",
            "s",
        ),
        _one(
            "Collectives in flight",
            agent.IN_FLIGHT,
            f"max by (group) ({agent.IN_FLIGHT.name}{{{_GROUP}}})",
            "{{group}}",
        ),
        _one(
            "Failed collectives per second",
            agent.ERRORS,
            f"sum by (code) (rate({agent.ERRORS.name}[{_RATE}])) > 0",
            "{{code}}",
            "ops",
        ),
        _one(
            "Open incidents by cause",
            orchestrator.INCIDENTS,
            f"max by (cause, effect) ({orchestrator.INCIDENTS.name})",
            "{{cause}} ({{effect}})",
        ),
        _one(
            "Incidents found",
            agent.INCIDENTS_TOTAL,
            f"sum by (cause) (increase({agent.INCIDENTS_TOTAL.name}[1h])) > 0",
            "{{cause}}",
        ),
        Panel(
            "Rounds per hour, and ranks not waited for",
            (agent.ROUNDS, agent.LATE_RANKS),
            (
                (f"max by (group) (increase({agent.ROUNDS.name}{{{_GROUP}}}[1h]))", "{{group}}"),
                (
                    f"sum by (group) (increase({agent.LATE_RANKS.name}{{{_GROUP}}}[1h]))",
                    "{{group}}: late ranks",
                ),
            ),
        ),
        Panel(
            "Members of groups",
            (agent.GROUP_RANKS, agent.GROUP_EPOCH),
            (
                (f"max by (group) ({agent.GROUP_RANKS.name}{{{_GROUP}}})", "{{group}}: ranks"),
                (f"max by (group) ({agent.GROUP_EPOCH.name}{{{_GROUP}}})", "{{group}}: epoch"),
            ),
        ),
    ),
    "Between nodes": (
        _one(
            "Bytes per second",
            agent.EDGE_BYTES,
            f"sum by (node, direction) (rate({agent.EDGE_BYTES.name}{{{_GROUP}}}[{_RATE}]))",
            "{{node}} {{direction}}",
            "Bps",
        ),
        Panel(
            "Sent between zones, and limits",
            (agent.ZONE_BYTES, agent.LIMIT),
            (
                (
                    f"sum by (source_zone, target_zone) (rate({agent.ZONE_BYTES.name}[{_RATE}]))",
                    "{{source_zone}} to {{target_zone}}",
                ),
                (f"max by (scope) ({agent.LIMIT.name})", "limit: {{scope}}"),
                (f"sum by (token) (rate({agent.ZONE_BYTES.name}[{_RATE}]))", "token {{token}}"),
            ),
            "Bps",
        ),
        Panel(
            "Round trip between agents",
            (agent.RTT_MAXIMUM, agent.RTT),
            (
                (f"max by (node) ({agent.RTT_MAXIMUM.name})", "{{node}} to its furthest"),
                (f"quantile(0.5, {agent.RTT.name})", "median"),
            ),
            "s",
        ),
        _one(
            "TCP segments sent again per second",
            agent.RETRANSMITTED,
            f"sum by (node) (rate({agent.RETRANSMITTED.name}[{_RATE}]))",
            "{{node}}",
        ),
        _one(
            "Agents without a link",
            agent.PEERS,
            f'sum by (node) ({agent.PEERS.name}{{state="unlinked"}})',
            "{{node}}",
        ),
    ),
    "Agents": (
        Panel(
            "Memory",
            (agent.ARENA, agent.BUFFERS, agent.RETAINED, agent.RETAIN_LIMIT),
            (
                (f"sum by (node) ({agent.ARENA.name})", "{{node}}: arenas"),
                (f"sum by (node, state) ({agent.BUFFERS.name})", "{{node}}: buffers {{state}}"),
                (f"sum by (node) ({agent.RETAINED.name})", "{{node}}: kept results"),
                (f"sum by (node) ({agent.RETAIN_LIMIT.name})", "{{node}}: limit of these"),
            ),
            "bytes",
        ),
        _one(
            "Lateness of loops",
            agent.LAG,
            f"max by (node, loop) ({agent.LAG.name})",
            "{{node}} {{loop}}",
            "s",
        ),
        _one(
            "CPU of agents",
            agent.BUILD,
            f'rate(process_cpu_seconds_total{{job="allfold-agent"}}[{_RATE}])',
            "{{node}}",
            "percentunit",
        ),
        Panel(
            "Agents by state",
            (agent.REGISTERED, agent.READY, agent.DRAINING, agent.GROUPS),
            (
                (f"sum({agent.REGISTERED.name})", "registered"),
                (f"sum({agent.READY.name})", "ready"),
                (f"sum({agent.DRAINING.name})", "draining"),
                (f"sum({agent.GROUPS.name})", "groups, over all agents"),
            ),
        ),
        _one(
            "Incidents by the agent that found them",
            agent.INCIDENTS,
            f"sum by (node, cause) ({agent.INCIDENTS.name})",
            "{{node}} {{cause}}",
        ),
    ),
    "Orchestrator": (
        Panel(
            "Time until certificates end",
            (orchestrator.CERTIFICATE_END, agent.CERTIFICATE_END),
            tuple(
                (f"min by (instance) ({each.name}) - time()", "{{instance}}")
                for each in (orchestrator.CERTIFICATE_END, agent.CERTIFICATE_END)
            ),
            "s",
        ),
        Panel(
            "Nodes",
            (orchestrator.NODES, orchestrator.NODES_DRAINING),
            (
                (f"max by (state) ({orchestrator.NODES.name})", "{{state}}"),
                (f"max({orchestrator.NODES_DRAINING.name})", "draining"),
            ),
        ),
        _one(
            "Groups",
            orchestrator.GROUPS,
            f"max by (phase) ({orchestrator.GROUPS.name})",
            "{{phase}}",
        ),
        Panel(
            "Open for each token, and limits",
            (orchestrator.TOKEN_OPEN, orchestrator.TOKEN_LIMIT),
            (
                (f"max by (token, of) ({orchestrator.TOKEN_OPEN.name})", "{{token}}: {{of}}"),
                (
                    f"max by (token, of) ({orchestrator.TOKEN_LIMIT.name})",
                    "{{token}}: {{of}}, at most",
                ),
            ),
        ),
        _one(
            "Lives of nodes ended, by reason",
            orchestrator.NODES_ENDED,
            f"sum by (reason) (increase({orchestrator.NODES_ENDED.name}[1h])) > 0",
            "{{reason}}",
        ),
        _one(
            "Age of heartbeats",
            orchestrator.HEARTBEAT_AGE,
            f"max by (node) ({orchestrator.HEARTBEAT_AGE.name})",
            "{{node}}",
            "s",
        ),
        _quantiles("Commands to the store", orchestrator.STORE_SECONDS, "instance"),
        _one(
            "Failed commands per second",
            orchestrator.STORE_FAILURES,
            f"sum by (instance) (rate({orchestrator.STORE_FAILURES.name}[{_RATE}]))",
            "{{instance}}",
        ),
        _one(
            "Requests per second",
            orchestrator.REQUESTS,
            f"sum by (route, status) (rate({orchestrator.REQUESTS.name}[{_RATE}]))",
            "{{route}} {{status}}",
            "reqps",
        ),
        _quantiles("Seconds of requests", orchestrator.REQUEST_SECONDS, "route"),
        Panel(
            "Replicas",
            (orchestrator.LINKS, orchestrator.LAG, orchestrator.GENERATION),
            (
                (orchestrator.LINKS.name, "{{instance}}: linked agents"),
                (orchestrator.LAG.name, "{{instance}}: lateness of its loop, s"),
                (f"max({orchestrator.GENERATION.name})", "generation of the store"),
            ),
        ),
        _one(
            "Incidents reported",
            orchestrator.INCIDENTS_TOTAL,
            f"sum by (cause) (increase({orchestrator.INCIDENTS_TOTAL.name}[1h])) > 0",
            "{{cause}}",
        ),
        _one(
            "Versions",
            orchestrator.BUILD,
            f"count by (version) ({orchestrator.BUILD.name} or {agent.BUILD.name})",
            "{{version}}",
        ),
    ),
}


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard, in the form in which Grafana imports and provisions it."""
    return {
        "uid": "allfold",
        "title": "Allfold",
        "tags": ["allfold"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[dict[str, Any]]:
    query = f"label_values({agent.GROUP_RANKS.name}, group)"
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "group",
            "label": "Group",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": "group"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
             "gridPos": place, "panels": []}
        )  # fmt: skip
        y = _add_row(panels, row, y + 1)
    return panels


def _add_row(panels: list[dict[str, Any]], row: Sequence[Panel], y: int) -> int:
    """Add panels from left to right; return the place of what comes below."""
    x = height = 0
    for panel in row:
        if x + panel.width > _COLUMNS:
            x, y = 0, y + height
        height = _HEIGHT if panel.kind == "timeseries" else _STAT_HEIGHT
        place = {"x": x, "y": y, "w": panel.width, "h": height}
        panels.append(_panel(panel, len(panels) + 1, place))
        x += panel.width
    return y + height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    drawn = _drawn(panel, number, place)
    if panel.columns:
        for target in drawn["targets"]:
            target.update(format="table", instant=True)
        order = {label: index for index, label in enumerate(panel.columns)}
        hidden = {"Time": True, "Value": True}
        drawn["transformations"] = [
            {"id": "organize", "options": {"indexByName": order, "excludeByName": hidden}}
        ]
    return drawn


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": "\n\n".join(f"{each.name}: {each.help}" for each in panel.metrics),
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression,
             "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip
