"""The figures of groups over time, put together from the histories of their nodes. Pure."""

from __future__ import annotations

from typing import Any

from allfold_core.agent_answers import History, Sample
from allfold_core.figures import Samples, group_figures

WINDOW_SECONDS = 300
"""So far back the charts go."""

RECENT_SECONDS = 10
"""Current figures are of so many seconds."""

SETTLED_SECONDS = 2
"""A second is over once no node adds to it any more."""

MAX_CHARTED_RANKS = 64

Json = dict[str, Any]
GroupKey = tuple[str, int]


class Series:
    """The latest seconds of each group.

    Seconds are those of this machine's clock: how far an agent's is from it follows from the time
    of its answer.
    """

    def __init__(self) -> None:
        self._samples: dict[GroupKey, dict[int, dict[str, Sample]]] = {}
        self._points: dict[GroupKey, dict[int, Json]] = {}
        self._seen: dict[str, float] = {}

    def since(self, node: str, now: float) -> float:
        """Return the time, on the node's clock, up to which its samples are known."""
        return self._seen.get(node, now - WINDOW_SECONDS)

    def take(self, node: str, history: History, received: float) -> None:
        """Add the history of a node."""
        offset = received - history["now"]
        for group in history["groups"]:
            seconds = self._samples.setdefault((group["name"], group["opening"]), {})
            for sample in group["samples"]:
                second = round(sample["at"] + offset)
                # Counted before its clock was set back, or over no time, by another version.
                if second > received + 1 or not sample["seconds"] > 0:
                    continue
                seconds.setdefault(second, {})[node] = {**sample, "at": second}
                self._seen[node] = max(self._seen.get(node, 0.0), sample["at"])
        # After its clock was set back, what it counts from now on is older than what it has told.
        if node in self._seen:
            self._seen[node] = min(self._seen[node], history["now"])

    def settle(self, now: float) -> None:
        """Make a point of each second that is over; drop what is not needed any more."""
        for key, seconds in self._samples.items():
            points = self._points.setdefault(key, {})
            for second in sorted(each for each in seconds if each <= now - SETTLED_SECONDS):
                if second not in points:
                    points[second] = _point(second, key, seconds[second])
                if second < now - RECENT_SECONDS - SETTLED_SECONDS:
                    del seconds[second]
            for second in [each for each in points if each < now - WINDOW_SECONDS]:
                del points[second]
        for key in [key for key, points in self._points.items() if not points]:
            if not self._samples[key]:
                del self._points[key], self._samples[key]

    def points(self, key: GroupKey, since: float) -> list[Json]:
        """Return one point per second after ``since`` that is over."""
        points = self._points.get(key, {})
        return [points[second] for second in sorted(points) if second > since]

    def recent(self, key: GroupKey, now: float) -> Samples:
        """Return the samples of the latest seconds of a group, for current figures."""
        by_node: dict[str, list[Sample]] = {}
        for second, samples in self._samples.get(key, {}).items():
            if second > now - RECENT_SECONDS:
                for node, sample in samples.items():
                    by_node.setdefault(node, []).append(sample)
        return {key: by_node} if by_node else {}


def _point(second: int, key: GroupKey, samples: dict[str, Sample]) -> Json:
    (found,) = group_figures({key: {node: [sample] for node, sample in samples.items()}})
    ranks = sorted(found.ranks, key=lambda each: each.rank)
    return {
        "at": second,
        "ops_per_second": found.ops,
        "bytes_per_second": found.bytes,
        "latency": found.latency,
        "skew": found.skew,
        "own": {each.rank: each.own for each in ranks} if len(ranks) <= MAX_CHARTED_RANKS else {},
    }
