"""One look at everything that ``allfold top`` shows, taken again and again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from allfold.cli._report import Report, gather
from allfold_cluster.http import NoAnswer, get_json
from allfold_core.errors import AllfoldError
from allfold_core.figures import GroupFigures, LinkFigures, group_figures, link_figures

_SECONDS = 3.0
_AT_ONCE = 32

Json = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The state of an Allfold at one time.

    Attributes:
        at: when, in seconds since 1970.
        report: nodes, groups, ops in flight and incidents, as ``allfold status`` has them.
        groups: the figures of the last seconds.
        links: the traffic between nodes, the most first.
    """

    at: float
    report: Report
    groups: list[GroupFigures]
    links: list[LinkFigures]

    def to_dict(self) -> Json:
        """Return the JSON form; docs/cli.md describes it."""
        report = self.report.to_dict()
        return {
            "schema": 1,
            "at": self.at,
            "orchestrator": report["orchestrator"],
            "nodes": self.nodes(),
            "groups": [
                {**each.to_dict(), "world_size": self.world_size(each)} for each in self.groups
            ],
            "links": [asdict(each) for each in self.links],
            "ops_in_flight": report["ops_in_flight"],
            "messages_in_flight": report["messages_in_flight"],
            "incidents": report["incidents"],
            "problems": report["problems"],
        }

    def world_size(self, figures: GroupFigures) -> int | None:
        """Return the number of a group's ranks; ``None`` if no agent says it."""
        told = (
            int(group["world_size"])
            for agent in self.report.agents.values()
            for group in agent["groups"]
            if (group["name"], group["opening"]) == (figures.group, figures.opening)
        )
        return next(told, None)

    def nodes(self) -> list[Json]:
        """Return the nodes that the orchestrator knows, and those whose agents have answered."""
        agents = {each["node"]: each for each in self.report.agents.values()}
        states = {each["node"]: each for each in self.report.nodes}
        return [
            {
                "node": name,
                "state": states[name]["state"] if name in states else None,
                "heartbeat_age": states[name]["heartbeat_age"] if name in states else None,
                "answers": name in agents,
                "waiting_for": agents[name]["waiting_for"] if name in agents else None,
                "ranks": _ranks(agents[name]) if name in agents else None,
            }
            for name in sorted(agents.keys() | states.keys())
        ]


def _ranks(agent: Json) -> int:
    return sum(len(group["ranks"]) for group in agent["groups"])


class Watcher:
    """Looks again and again, also while the orchestrator or some agents do not answer.

    Args:
        orchestrators: the replicas; none: agents only.
        window: seconds that the figures are of.
    """

    def __init__(
        self, orchestrators: Sequence[str], agent_urls: Sequence[str], token: str, window: float
    ) -> None:
        self._orchestrators = orchestrators
        self._agent_urls = agent_urls
        self._token = token
        self._window = window
        self._clocks: dict[str, float] = {}
        self._known: list[str] = []
        self._has_seen = False

    def look(self) -> Snapshot:
        """Look once. Once something has answered, nothing that fails ends the watch.

        Raises:
            AllfoldError: nothing has answered yet, and why.
        """
        urls = dict.fromkeys([*self._agent_urls, *self._known])
        report = gather(self._orchestrators, list(urls), self._token, needs_all=not self._has_seen)
        self._has_seen = True
        self._known = [*dict.fromkeys([*self._known, *report.agents])]
        self._forget_gone(report)
        histories = self._histories(report.agents)
        return Snapshot(
            time.time(),
            report,
            group_figures(histories, self._window),
            link_figures(histories, self._window),
        )

    def _forget_gone(self, report: Report) -> None:
        gone = {each["control_url"] for each in report.nodes if each["state"] == "gone"}
        self._known = [url for url in self._known if url not in gone]
        for url in gone - set(self._agent_urls):
            report.problems.pop(url, None)

    def _histories(self, urls: Iterable[str]) -> list[Json]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return [each for each in pool.map(self._history, urls) if each is not None]

    def _history(self, url: str) -> Json | None:
        """Return an agent's latest samples; ``None`` if it keeps none, or has just ended."""
        since = max(0.0, self._clocks.get(url, 0.0) - self._window)
        try:
            history = get_json(f"{url}/v1/history?since={since}", self._token, seconds=_SECONDS)
            self._clocks[url] = float(history["now"])
        except (NoAnswer, AllfoldError, KeyError, TypeError, ValueError):
            return None  # or it is of another version
        return history
