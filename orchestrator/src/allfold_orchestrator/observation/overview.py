"""One picture of everything: nodes, groups, ops in flight and incidents, put together. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from allfold_core.agent_answers import GroupStatus, RecordedOp, RoundStatus
from allfold_core.figures import GroupFigures, group_figures, link_figures
from allfold_core.group_options import NAMES
from allfold_core.in_flight import Activity, GroupMembers, activity
from allfold_orchestrator.bodies import GroupView
from allfold_orchestrator.observation.agents import AgentAnswer
from allfold_orchestrator.observation.drawing import draw
from allfold_orchestrator.observation.sentences import group_sentence, headline, worth_saying
from allfold_orchestrator.observation.series import Series

MAX_RANKED = 32
"""So many ranks are in the ranking of the slowest."""
MAX_ROUNDS = 8
"""So many of a group's latest rounds are shown."""

Json = dict[str, Any]


@dataclass(frozen=True)
class OverviewFacts:
    """Everything of which a picture is made.

    Attributes:
        at: seconds since 1970.
        nodes: as ``GET /v1/nodes`` has them.
        groups: as ``GET /v1/groups`` has them.
        answers: of the agents, by node.
        incidents: as ``GET /v1/incidents`` has them.
        is_complete: there are no further nodes or groups.
    """

    at: float
    nodes: Sequence[Json]
    groups: Sequence[Json]
    answers: Mapping[str, AgentAnswer]
    incidents: Sequence[Json]
    is_complete: bool = True


@dataclass(frozen=True)
class Picture:
    """The picture at one time, without the series of its groups.

    Attributes:
        openings: which opening of its name each group is, by its name.
    """

    at: float
    body: Json
    openings: Mapping[str, int]

    def to_dict(self, series: Series, since: float) -> Json:
        """Return the JSON form, with the points of each group after ``since``."""
        groups = [
            {**group, "series": self._points(group["name"], series, since)}
            for group in self.body["groups"]
        ]
        return {**self.body, "groups": groups}

    def _points(self, name: str, series: Series, since: float) -> list[Json]:
        opening = self.openings.get(name)
        return [] if opening is None else series.points((name, opening), since)


def picture(facts: OverviewFacts, series: Series) -> Picture:
    """Return the picture of these facts."""
    statuses = [each.status for each in facts.answers.values() if each.status is not None]
    seen = activity(statuses, facts.incidents)
    known = {each.group: each for each in seen.memberships}  # of one name the newest counts
    nodes = [_node(node, facts.answers.get(node["node"])) for node in facts.nodes]
    by_name = {node["node"]: node for node in nodes}
    groups = []
    for view in sorted(facts.groups, key=lambda each: (each["phase"] == "gone", each["group"])):
        membership = known.get(view["group"])
        measured = _measured(view["group"], membership, facts.at, series)
        groups.append(_group(view, membership, seen, facts, measured))
        _add_traffic(by_name, measured.rates)
    body = {
        "at": facts.at,
        "is_complete": facts.is_complete,
        "headline": headline(nodes, groups, seen.ops, seen.incidents),
        "nodes": nodes,
        "groups": groups,
        "ops": [op.to_dict() for op in seen.ops],
        "messages": [each.to_dict() for each in seen.messages],
        "incidents": [each.to_dict() for each in seen.incidents],
    }
    return Picture(facts.at, body, {each.group: each.opening for each in known.values()})


def _node(view: Json, answer: AgentAnswer | None) -> Json:
    status = answer.status if answer else None
    return {
        **{name: value for name, value in view.items() if name != "progress"},
        "problem": answer.problem if answer else "",
        "ready": status["ready"] if status else None,
        "waiting_for": status["waiting_for"] if status else "",
        "limits": list(status.get("limits", ())) if status else [],
        "sent_to_zones": status.get("sent_to_zones", {}) if status else {},
        "groups": {each["name"]: each["ranks"] for each in status["groups"]} if status else {},
        "bytes_sent_per_second": 0.0,
        "bytes_received_per_second": 0.0,
    }


@dataclass(frozen=True)
class _Measured:
    """Sums of what a group's nodes have counted in the last seconds.

    Attributes:
        rates: by source and target, the bytes per second over each link.
    """

    figures: GroupFigures | None
    rates: Mapping[tuple[str, str], float]


def _measured(name: str, known: GroupMembers | None, now: float, series: Series) -> _Measured:
    key = name, known.opening if known else 0
    recent = series.recent(key, now)
    rates = {(each.source, each.target): each.bytes for each in link_figures(recent)}
    return _Measured(next(iter(group_figures(recent)), None), rates)


def _group(
    view: Json,
    known: GroupMembers | None,
    seen: Activity,
    facts: OverviewFacts,
    measured: _Measured,
) -> Json:
    name, opening = view["group"], known.opening if known else 0
    own_ops = [op for op in seen.ops if op.group == name]
    told = _told(name, opening, facts.answers)
    figures = measured.figures
    nodes = _order(view, told)
    last = _last_op(name, opening, facts.answers)
    root = _root_node(view, last)
    return {
        "name": name,
        **{each: view[each] for each in _KEPT},
        "sentence": group_sentence(view, own_ops, figures.ops if figures else None),
        "is_waiting": worth_saying(own_ops) is not None,
        "opening": known.opening if known else None,
        "term": view["term"]["number"] if view["term"] else None,
        "changes": list(known.losses) if known else [],
        "links": list(known.links) if known else [],
        "lanes": list(known.lanes) if known else [],
        "drawing": draw(nodes, view["tree_order"], last, root, measured.rates),
        "rounds": _latest_rounds(told),
        "last_op": None if last is None else _op(last, facts.at),
        "figures": _figures(figures),
        "stragglers": [asdict(each) for each in figures.ranks[:MAX_RANKED]] if figures else [],
    }


_KEPT = (
    "phase",
    "epoch",
    "world_size",
    *(name for name in NAMES if name in GroupView.model_fields),
    "present",
    "missing",
    "left",
    "lost",
    "waiting",
)


def _told(name: str, opening: int, answers: Mapping[str, AgentAnswer]) -> list[GroupStatus]:
    """Return what the agents say of a group."""
    return [
        group
        for answer in answers.values()
        if answer.status is not None
        for group in answer.status["groups"]
        if (group["name"], group["opening"]) == (name, opening)
    ]


def _order(view: Json, told: Sequence[GroupStatus]) -> list[str]:
    """Return the group's nodes in the order of its ring, as the newest agent has it."""
    if told:
        return list(max(told, key=lambda each: (each["term"], each["epoch"]))["nodes"])
    return list(view["ring_order"] or dict.fromkeys(each["node"] for each in view["present"]))


def _last_op(name: str, opening: int, answers: Mapping[str, AgentAnswer]) -> RecordedOp | None:
    """Return the latest op that any flight recorder has of a group."""
    found = [
        op
        for answer in answers.values()
        if answer.flight is not None
        for group in answer.flight["groups"]
        if (group["name"], group["opening"]) == (name, opening)
        for op in group["ops"]
    ]
    return max(found, key=lambda op: op["seq"], default=None)


def _root_node(view: Json, op: RecordedOp | None) -> str:
    root = -1 if op is None else op.get("root", -1)
    return next((each["node"] for each in view["present"] if each["rank"] == root), "")


def _op(op: RecordedOp, now: float) -> Json:
    return {
        **{name: op[name] for name in ("seq", "what", "strategy", "state", "seconds", "error")},
        "age": max(0.0, now - op["started_at"]),
    }


def _figures(figures: GroupFigures | None) -> Json:
    return {
        "ops_per_second": figures.ops if figures else None,
        "bytes_per_second": figures.bytes if figures else None,
        "latency": figures.latency if figures else None,
        "skew": figures.skew if figures else None,
    }


def _add_traffic(nodes: Mapping[str, Json], rates: Mapping[tuple[str, str], float]) -> None:
    """Add to nodes, by name, what they send and receive in a group.

    Not from its drawing, which leaves out most links of a large group.
    """
    for (source, target), rate in rates.items():
        if source in nodes:
            nodes[source]["bytes_sent_per_second"] += rate
        if target in nodes:
            nodes[target]["bytes_received_per_second"] += rate


def _latest_rounds(statuses: Iterable[GroupStatus]) -> list[Json]:
    """Return the latest rounds, the newest first.

    Args:
        statuses: of one group, of its nodes.
    """
    told: defaultdict[int, list[RoundStatus]] = defaultdict(list)
    for status in statuses:
        for each in status.get("rounds", ()):
            told[each["seq"]].append(each)
    return [_merged_round(told[seq]) for seq in sorted(told, reverse=True)[:MAX_ROUNDS]]


def _merged_round(parts: Sequence[RoundStatus]) -> Json:
    """Put together one round: its late ranks and its bytes each node knows of its own alone."""
    return {
        **parts[0],
        "late": sorted({rank for each in parts for rank in each["late"]}),
        "sent_bytes": sum(each["sent_bytes"] for each in parts),
        "seconds": max(each["seconds"] for each in parts),
        "ended_at": max(each["ended_at"] for each in parts),
    }
