"""The figures of groups over time, put together from the histories of their nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

WINDOW_SECONDS = 300
"""So far back the charts go."""

RECENT_SECONDS = 10
"""Current figures are means of so many seconds."""

SETTLED_SECONDS = 2
"""A second is over once no node adds to it any more."""

MAX_CHARTED_RANKS = 64

Json = dict[str, Any]
GroupKey = tuple[str, int]


class Sample(NamedTuple):
    """One second of a group on one node."""

    ops: float
    nbytes: float
    latency: float | None
    skew: float | None
    ranks: dict[int, tuple[float, float]]
    sent: dict[str, float]
    received: dict[str, float]


class RankTimes(NamedTuple):
    """A rank's mean own time between two ops, and its lateness after the first rank of its node."""

    rank: int
    node: str
    own: float
    late: float


class Series:
    """The latest seconds of each group, as their nodes have counted them.

    Seconds are those of this machine's clock: how far an agent's is from it follows from the time
    of its answer.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[int, dict[str, Sample]]] = {}
        self._seen: dict[str, float] = {}

    def since(self, node: str, now: float) -> float:
        """Return the time, on the node's clock, up to which its samples are known."""
        return self._seen.get(node, now - WINDOW_SECONDS)

    def take(self, node: str, history: Json, received: float) -> None:
        """Add what a node answered to ``GET /v1/history``.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is of another form.
        """
        offset = received - history["now"]
        for group in history["groups"]:
            seconds = self._groups.setdefault((group["name"], group["opening"]), {})
            for sample in group["samples"]:
                second = round(sample["at"] + offset)
                seconds.setdefault(second, {})[node] = _sample(sample)
                self._seen[node] = max(self._seen.get(node, 0.0), sample["at"])

    def trim(self, now: float) -> None:
        """Drop what is older than the window."""
        for key, seconds in list(self._groups.items()):
            for second in [each for each in seconds if each < now - WINDOW_SECONDS]:
                del seconds[second]
            if not seconds:
                del self._groups[key]

    def points(self, key: GroupKey, since: float, until: float) -> list[Json]:
        """Return one point per second after ``since`` that is over at ``until``."""
        seconds = self._groups.get(key, {})
        over = sorted(each for each in seconds if since < each <= until - SETTLED_SECONDS)
        return [_point(second, seconds[second].values()) for second in over]

    def recent(self, key: GroupKey, now: float) -> list[Json]:
        """Return the points of the latest seconds, for current figures."""
        return self.points(key, now - RECENT_SECONDS - SETTLED_SECONDS, now)

    def rates(self, key: GroupKey, now: float) -> dict[tuple[str, str], float]:
        """Return the bytes per second over each link, by sender and receiver.

        A sender that does not answer is replaced by its receiver.
        """
        found: dict[tuple[str, str], list[float]] = {}
        heard: dict[tuple[str, str], list[float]] = {}
        for by_node in self._latest(key, now):
            for node, sample in by_node.items():
                for peer, rate in sample.sent.items():
                    found.setdefault((node, peer), []).append(rate)
                for peer, rate in sample.received.items():
                    heard.setdefault((peer, node), []).append(rate)
        return {link: fmean(rates) for link, rates in (heard | found).items()}

    def rank_times(self, key: GroupKey, now: float) -> list[RankTimes]:
        """Return the times of the ranks, the one with the longest own time first."""
        found: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for by_node in self._latest(key, now):
            for node, sample in by_node.items():
                for rank, times in sample.ranks.items():
                    found.setdefault((rank, node), []).append(times)
        ranks = [
            RankTimes(rank, node, fmean(own for own, _ in times), fmean(late for _, late in times))
            for (rank, node), times in found.items()
        ]
        return sorted(ranks, key=lambda each: (-each.own, each.rank))

    def _latest(self, key: GroupKey, now: float) -> list[dict[str, Sample]]:
        seconds = self._groups.get(key, {})
        return [by_node for second, by_node in seconds.items() if second > now - RECENT_SECONDS]


def mean_of(points: Iterable[Json], name: str) -> float | None:
    """Return the mean of a figure where it is known; ``None`` where it never is."""
    known = [point[name] for point in points if point[name] is not None]
    return fmean(known) if known else None


def _sample(data: Json) -> Sample:
    seconds = float(data["seconds"]) or 1.0
    return Sample(
        ops=data["ops"] / seconds,
        nbytes=data["bytes"] / seconds,
        latency=data["latency"],
        skew=data["skew"],
        ranks={int(rank): (each["own"], each["late"]) for rank, each in data["ranks"].items()},
        sent={peer: each["out"] / seconds for peer, each in data["edges"].items()},
        received={peer: each["in"] / seconds for peer, each in data["edges"].items()},
    )


def _point(second: int, samples: Iterable[Sample]) -> Json:
    """One second over all nodes: each has a part in the same ops, so the largest figure counts.

    A node knows how far its own ranks are apart. Over all nodes this is how far the ranks' own
    times are, since an op ends for all at about the same time.
    """
    every = list(samples)
    ranks = {rank: own for each in every for rank, (own, _) in each.ranks.items()}
    skews = [each.skew for each in every if each.skew is not None]
    if skews and len(ranks) > 1:
        skews.append(max(ranks.values()) - min(ranks.values()))
    return {
        "at": second,
        "ops_per_second": max(each.ops for each in every),
        "bytes_per_second": max(each.nbytes for each in every),
        "latency": max((each.latency for each in every if each.latency is not None), default=None),
        "skew": max(skews, default=None),
        "own": dict(sorted(ranks.items())) if len(ranks) <= MAX_CHARTED_RANKS else {},
    }
