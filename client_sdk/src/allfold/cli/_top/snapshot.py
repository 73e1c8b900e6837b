"""One look at everything that ``allfold top`` shows, taken again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from allfold.cli._asking import SECONDS, ask_all, read
from allfold.cli._report import StatusReport, gather
from allfold_cluster.http import get_json
from allfold_core.agent_answers import History, Json, Status, history
from allfold_core.figures import (
    GroupFigures,
    LinkFigures,
    group_figures,
    link_figures,
    recent_samples,
)


@dataclass(frozen=True)
class Look:
    """The state of an Allfold at one time.

    Attributes:
        at: when, in seconds since 1970.
        report: nodes, groups, ops in flight and incidents, as ``allfold status`` has them.
        groups: the figures of the last seconds.
        links: the traffic between nodes, the most first.
    """

    at: float
    report: StatusReport
    groups: list[GroupFigures]
    links: list[LinkFigures]

    def to_dict(self) -> Json:
        """Return the JSON form; docs/cli.md describes it."""
        report = self.report
        return {
            "schema": 1,
            "at": self.at,
            "orchestrator": report.orchestrator,
            "nodes": self.nodes(),
            "groups": [
                {**each.to_dict(), "world_size": self.world_size(each)} for each in self.groups
            ],
            "links": [asdict(each) for each in self.links],
            **report.activity.to_dict(),
            "problems": report.all_problems(),
        }

    def world_size(self, figures: GroupFigures) -> int | None:
        """Return the number of a group's ranks; ``None`` if no agent says it."""
        told = (
            group.get("world_size")
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


def _ranks(agent: Status) -> int:
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

    def look(self) -> Look:
        """Look once. Once something has answered, nothing that fails ends the watch.

        Raises:
            AllfoldError: nothing has answered yet, and why.
        """
        urls = dict.fromkeys([*self._agent_urls, *self._known])
        report = gather(self._orchestrators, list(urls), self._token, needs_all=not self._has_seen)
        self._has_seen = True
        self._known = [*dict.fromkeys([*self._known, *report.agents])]
        self._forget_gone(report)
        # One of another version has no figures, nor has one that has just ended.
        histories = ask_all(report.agents, self._history).found.values()
        recent = recent_samples(histories, self._window)
        return Look(time.time(), report, group_figures(recent), link_figures(recent))

    def _forget_gone(self, report: StatusReport) -> None:
        gone = {each["control_url"] for each in report.nodes if each["state"] == "gone"}
        self._known = [url for url in self._known if url not in gone]
        for url in gone - set(self._agent_urls):
            report.problems.pop(url, None)

    def _history(self, url: str) -> History:
        """Return an agent's latest samples."""
        question = history(max(0.0, self._clocks.get(url, 0.0) - self._window))
        answer = get_json(url + question.path, self._token, seconds=SECONDS)
        found = read(question, url, answer)
        self._clocks[url] = found["now"]
        return found
