"""The output of ``allfold top`` for people: tables on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from allfold.cli._report import incident_lines
from allfold.cli._showing import duration, rate, table
from allfold.cli._top.snapshot import Look
from allfold_core.figures import GroupFigures, RankFigures

_SHOWN_RANKS = 5
_SHOWN_LINKS = 6
_SHOWN_LINES = 12
_YOUNG_SECONDS = 0.5
# A rank that needs so many times as long as the median one is called slow.
_STRAGGLES = 1.3


def screen(snapshot: Look) -> Group:
    """Return everything, for a terminal."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
    where = snapshot.report.orchestrator or "agents alone"
    parts: list[Text | Table] = [Text(f"allfold top  {clock}  {where}", style="bold")]
    parts += [Text(line, style="bold red") for line in _incidents(snapshot)]
    parts += [_nodes(snapshot), _groups(snapshot)]
    if any(each.ranks for each in snapshot.groups):
        parts.append(_ranks(snapshot.groups))
    if snapshot.links:
        parts.append(_links(snapshot))
    parts += [Text(line) for line in [*snapshot.report.traffic(), *_waits(snapshot)]]
    return Group(*parts)


def plain(snapshot: Look) -> Iterator[str]:
    """Yield the lines of one refresh, for a file or a pipe."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
    if not snapshot.groups:
        nodes = snapshot.nodes()
        yield f"{clock} {len(nodes)} node{'' if len(nodes) == 1 else 's'}, no group"
    for group in snapshot.groups:
        figures = f"{group.ops:.1f} ops/s, {rate(group.bytes)}"
        times = f"latency {_seconds(group.latency)}, skew {_seconds(group.skew)}"
        slow = group.straggler(_STRAGGLES)
        told = "" if slow is None else f", {_place(slow)} is slow: {_comparison(slow)}"
        yield f"{clock} group {group.group}: {figures}, {times}{told}"
    for line in [*_incidents(snapshot), *_waits(snapshot)]:
        yield f"{clock} {line}"


def _incidents(snapshot: Look) -> list[str]:
    return incident_lines(snapshot.report.activity.incidents, snapshot.at)[:_SHOWN_LINES]


def _waits(snapshot: Look) -> list[str]:
    """Return lines on what ops wait for, and on services that do not answer.

    Without ops that have just begun, and those that an incident speaks of.
    """
    report = snapshot.report
    lines = [op.sentence() for op in report.other_ops() if op.age > _YOUNG_SECONDS]
    lines += [each.sentence() for each in report.activity.messages if each.age > _YOUNG_SECONDS]
    lines = lines[:_SHOWN_LINES]
    lines += [f"no answer: {problem}" for problem in report.problems.values()][:_SHOWN_LINES]
    if report.failure is not None:
        lines.append(report.failure.message)
    return lines


def _nodes(snapshot: Look) -> Table:
    made = table("Nodes", ("node", "state", "heartbeat", "ranks"))
    for node in snapshot.nodes():
        state = node["state"] or "answers"
        if node["waiting_for"]:
            state = f"not ready: {node['waiting_for']}"
        elif not node["answers"] and node["state"] != "gone":
            state = f"{node['state']}, no answer from here"
        age, ranks = node["heartbeat_age"], node["ranks"]
        beat = "-" if age is None else f"{age:.1f} s ago"
        made.add_row(node["node"], state, beat, "-" if ranks is None else str(ranks))
    return made


def _groups(snapshot: Look) -> Table:
    columns = ("group", "ranks", "ops/s", "tensors", "latency", "skew", "slow")
    made = table("Groups", columns)
    for group in snapshot.groups:
        slow = group.straggler(_STRAGGLES)
        made.add_row(
            group.group,
            str(snapshot.world_size(group) or "-"),
            f"{group.ops:.1f}",
            rate(group.bytes),
            _seconds(group.latency),
            _seconds(group.skew),
            "-" if slow is None else _place(slow),
        )
    return made


def _ranks(groups: Iterable[GroupFigures]) -> Table:
    """The ranks that compute longest between two ops."""
    columns = ("group", "rank", "node", "between ops", "its node waits", "to the median")
    made = table("Slowest ranks", columns)
    for group in groups:
        for each in group.ranks[:_SHOWN_RANKS]:
            behind = "-" if each.behind is None else f"{each.behind:.1f} x"
            is_slow = (each.behind or 0.0) >= _STRAGGLES
            cells = (_seconds(each.own), _seconds(each.late), behind)
            style = "bold yellow" if is_slow else ""
            made.add_row(group.group, str(each.rank), each.node, *cells, style=style)
    return made


def _links(snapshot: Look) -> Table:
    shown = snapshot.links[:_SHOWN_LINKS]
    rows = ((link.source, link.target, rate(link.bytes)) for link in shown)
    return table("Busiest links", ("from", "to", "payload"), rows)


def _place(rank: RankFigures) -> str:
    return f"rank {rank.rank} on node {rank.node}"


def _comparison(rank: RankFigures) -> str:
    return f"{_seconds(rank.own)} between ops, {rank.behind:.1f} x the median"


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)
