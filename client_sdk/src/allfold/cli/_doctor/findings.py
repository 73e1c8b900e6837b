"""The findings of ``allfold doctor``: one per check and place, with the next step of a bad one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

Json = dict[str, Any]

HERE = "this machine"


class Level(StrEnum):
    """``skipped``: it could not be checked; another finding says why."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The outcome of one check.

    Attributes:
        check: its name, e.g. ``data port``.
        where: ``this machine``, ``orchestrator``, ``node b``, ``node a -> node b``.
        found: what was found.
        advice: what to do next; every ``warn`` and ``fail`` has one.
    """

    level: Level
    check: str
    where: str
    found: str
    advice: str = ""


def ok(check: str, where: str, found: str) -> CheckFinding:
    """Return a finding that is fine."""
    return CheckFinding(Level.OK, check, where, found)


def warn(check: str, where: str, found: str, advice: str) -> CheckFinding:
    """Return a finding that may become a problem."""
    return CheckFinding(Level.WARN, check, where, found, advice)


def fail(check: str, where: str, found: str, advice: str) -> CheckFinding:
    """Return a finding with which jobs fail or hang."""
    return CheckFinding(Level.FAIL, check, where, found, advice)


def skipped(check: str, where: str, why: str) -> CheckFinding:
    """Return the finding of a check that could not be made."""
    return CheckFinding(Level.SKIPPED, check, where, why)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The measured way from one node to another.

    Attributes:
        source: the node that sends.
        target: the node that receives, and has measured.
        latency: seconds, one way.
        bandwidth: bytes per second.
        path: ``network``, or ``machine`` between agents of one machine.
    """

    source: str
    target: str
    latency: float
    bandwidth: float
    path: str


@dataclass
class Diagnosis:
    """The findings of all checks, and the facts behind them.

    Attributes:
        orchestrators: the facts of every replica that has answered, by URL.
        nodes: the facts of every agent that has answered, by node.
        links: the ways between nodes that were measured.
    """

    findings: list[CheckFinding] = field(default_factory=list)
    orchestrators: dict[str, Json] = field(default_factory=dict)
    nodes: dict[str, Json] = field(default_factory=dict)
    links: list[LinkSpeed] = field(default_factory=list)

    def add(self, findings: Iterable[CheckFinding]) -> None:
        """Note what a check has found."""
        self.findings += findings

    @property
    def level(self) -> Level:
        """The worst level of all findings."""
        levels = {each.level for each in self.findings}
        return next((each for each in (Level.FAIL, Level.WARN) if each in levels), Level.OK)

    def summary(self) -> str:
        """``1 failed, 2 warnings, 9 fine, 3 not checked``."""
        counts = Counter(each.level for each in self.findings)
        words = [
            (counts[Level.FAIL], "failed"),
            (counts[Level.WARN], "warnings" if counts[Level.WARN] != 1 else "warning"),
            (counts[Level.OK], "fine"),
            (counts[Level.SKIPPED], "not checked"),
        ]
        return ", ".join(f"{count} {word}" for count, word in words if count)

    def to_dict(self) -> Json:
        """Return the JSON form; docs/cli.md describes it."""
        counts = Counter(each.level.value for each in self.findings)
        return {
            "schema": 1,
            "status": self.level.value,
            "counts": {each.value: counts[each.value] for each in Level},
            "findings": [asdict(each) for each in self.findings],
            "orchestrators": self.orchestrators,
            "nodes": self.nodes,
            "links": [asdict(each) for each in self.links],
        }
