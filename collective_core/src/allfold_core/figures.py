"""The figures of groups over the last seconds, put together from the histories of agents. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from allfold_core.agent_answers import History, RankSample, Sample

Json = dict[str, Any]
Opening = tuple[str, int]
Samples = Mapping[Opening, Mapping[str, Sequence[Sample]]]
"""Samples by group and node; each node has some, over more than no time."""


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank.

    Attributes:
        own: mean seconds from the end of an op to its next call: the straggler's are longest.
        late: mean seconds for which the ranks of its node had to wait for it.
        behind: by how many times ``own`` is longer than that of the median rank; ``None`` where
            there are no others.
    """

    rank: int
    node: str
    own: float
    late: float
    behind: float | None


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One group.

    Attributes:
        opening: distinguishes it from earlier groups of its name.
        ops: per second.
        bytes: of tensors, per second.
        latency: median seconds of an op on the slowest node; ``None`` where none was seen.
        skew: seconds from the first to the last call of an op: the median on the worst node, or, if
            that is more, how far the ranks' own times are apart over all nodes, since an op ends on
            all of them at about the same time.
        ranks: all that were seen, the one with the longest own time first.
    """

    group: str
    opening: int
    ops: float
    bytes: float
    latency: float | None
    skew: float | None
    ranks: tuple[RankFigures, ...]

    def to_dict(self) -> Json:
        """Return the JSON form."""
        return asdict(self)

    def straggler(self, times: float) -> RankFigures | None:
        """Return the slowest rank, if it takes so many times as long as the median one."""
        first = self.ranks[0] if self.ranks else None
        return first if first is not None and (first.behind or 0.0) >= times else None


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """The payload between two nodes, in bytes per second.

    It is what the sender counts; what the receiver counts, where nothing is known of the sender.
    """

    source: str
    target: str
    bytes: float


def recent_samples(histories: Iterable[History], window: float) -> Samples:
    """Return what agents have counted of late, by group and node.

    Args:
        window: seconds to look back, on each agent's own clock.
    """
    found: dict[Opening, dict[str, list[Sample]]] = {}
    for history in histories:
        for group in history["groups"]:
            young = [each for each in group["samples"] if each["at"] > history["now"] - window]
            if sum(each["seconds"] for each in young) > 0:
                nodes = found.setdefault((group["name"], group["opening"]), {})
                nodes[history["node"]] = young
    return found


def group_figures(recent: Samples) -> list[GroupFigures]:
    """Return the figures of all groups, by name."""
    return [_merged(opening, nodes) for opening, nodes in sorted(recent.items())]


def link_figures(recent: Samples) -> list[LinkFigures]:
    """Return what nodes have sent to each other, the most first."""
    sent: dict[tuple[str, str], float] = {}
    received: dict[tuple[str, str], float] = {}
    for node, samples in (each for nodes in recent.values() for each in nodes.items()):
        seconds = sum(each["seconds"] for each in samples)
        for sample in samples:
            for peer, moved in sample["edges"].items():
                sent[node, peer] = sent.get((node, peer), 0.0) + moved["out"] / seconds
                received[peer, node] = received.get((peer, node), 0.0) + moved["in"] / seconds
    rates = received | sent
    links = [LinkFigures(source, target, rate) for (source, target), rate in rates.items() if rate]
    return sorted(links, key=lambda each: -each.bytes)


def _merged(opening: Opening, nodes: Mapping[str, Sequence[Sample]]) -> GroupFigures:
    """Return the figures of a group; of rates the highest counts, as all nodes do the same ops."""
    rates = {
        node: (_rate(samples, "ops"), _rate(samples, "bytes")) for node, samples in nodes.items()
    }
    ops, nbytes = (max(values) for values in zip(*rates.values(), strict=True))
    ranks = tuple(_ranked(nodes))
    return GroupFigures(
        *opening,
        ops,
        nbytes,
        _worst(_median(samples, "latency") for samples in nodes.values()),
        _skew(nodes, ranks),
        ranks,
    )


def _skew(nodes: Mapping[str, Sequence[Sample]], ranks: Sequence[RankFigures]) -> float | None:
    seen = _worst(_median(samples, "skew") for samples in nodes.values())
    if seen is None or len(nodes) < 2 or not ranks:
        return seen
    return max(seen, ranks[0].own - ranks[-1].own)


def _rate(samples: Sequence[Sample], name: Literal["ops", "bytes"]) -> float:
    return float(sum(each[name] for each in samples) / sum(each["seconds"] for each in samples))


def _median(samples: Sequence[Sample], name: Literal["latency", "skew"]) -> float | None:
    seen = [value for each in samples if (value := each[name]) is not None]
    return statistics.median(seen) if seen else None


def _worst(values: Iterable[float | None]) -> float | None:
    return max((each for each in values if each is not None), default=None)


def _ranked(nodes: Mapping[str, Sequence[Sample]]) -> list[RankFigures]:
    seen: dict[tuple[int, str], list[RankSample]] = {}
    for node, samples in nodes.items():
        for sample in samples:
            for rank, figures in sample["ranks"].items():
                seen.setdefault((int(rank), node), []).append(figures)
    own = {place: _mean(figures, "own") for place, figures in seen.items()}
    usual = statistics.median_low(own.values()) if own else 0.0
    ranked = [
        RankFigures(
            *place,
            own[place],
            _mean(figures, "late"),
            own[place] / usual if usual > 0 and len(own) > 1 else None,
        )
        for place, figures in seen.items()
    ]
    return sorted(ranked, key=lambda each: (-each.own, each.rank))


def _mean(figures: Sequence[RankSample], name: Literal["own", "late"]) -> float:
    return statistics.fmean(each[name] for each in figures)
