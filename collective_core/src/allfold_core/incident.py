"""Incidents: what keeps the ops of a group from going on, who causes it, and how that is known.

An incident is found by the agent that stands closest to its culprit: the ranks of its own machine,
the links over which it sends. It travels as JSON to the other agents of the group and to the
orchestrator, so that exceptions, ``allfold status``, the page, logs and metrics say one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from typing import Any

REPEAT_SECONDS = 5.0
"""The agent that has found an incident repeats it so often while it lasts."""

LOST_SECONDS = 3 * REPEAT_SECONDS
"""An incident that was not repeated for so long is over, or its reporter is gone."""

MAX_SENTENCE = 4096
MAX_EVIDENCE_TEXT = 512
"""The most characters of a sentence, and of a text in the evidence: receivers refuse more."""


class Effect(StrEnum):
    """The effect of an incident on the ops of a group."""

    HANG = "hang"
    SLOW = "slow"
    FAILED = "failed"


class Cause(StrEnum):
    """The kind of an incident.

    ===============  ===============================================================
    LATE_RANK        a rank has not called an op that others wait in; its process runs
    STOPPED_RANK     the process of a rank is stopped by a signal or a debugger
    LOCKED_RANK      a thread of a rank holds the interpreter lock and does not let go
    EXITED_RANK      the process of a rank has ended
    WRONG_CALL       ranks have called different things
    SLOW_RANK        a rank needs longer than the others between two ops
    STARVED_RANK     a rank wants to run, but its node has no CPU for it
    SLOW_LINK        a link carries much less than before, or than others
    LOSSY_LINK       a link loses packets
    LOST_NODE        the agent of a node is dead, or the node is
    SILENT_NODE      the agent of a node does not answer
    OUT_OF_MEMORY    a rank or an agent got no memory
    DISK_FULL        a rank could not write to a full disk
    STORE_FAILED     the orchestrator's store answers no more, or takes no writes
    ===============  ===============================================================
    """

    LATE_RANK = "late_rank"
    STOPPED_RANK = "stopped_rank"
    LOCKED_RANK = "locked_rank"
    EXITED_RANK = "exited_rank"
    WRONG_CALL = "wrong_call"
    SLOW_RANK = "slow_rank"
    STARVED_RANK = "starved_rank"
    SLOW_LINK = "slow_link"
    LOSSY_LINK = "lossy_link"
    LOST_NODE = "lost_node"
    SILENT_NODE = "silent_node"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    STORE_FAILED = "store_failed"

    @property
    def is_communication(self) -> bool:
        """True where links or agents are at fault, False where it is a rank or its machine."""
        return self in _COMMUNICATION


_COMMUNICATION = frozenset(
    {Cause.SLOW_LINK, Cause.LOSSY_LINK, Cause.LOST_NODE, Cause.SILENT_NODE, Cause.STORE_FAILED}
)


@dataclass(frozen=True, slots=True)
class Culprit:
    """The rank, node, link or store that causes an incident.

    Attributes:
        kind: ``rank``, ``node``, ``link`` or ``store``.
        node: the node, the rank's node, or the node that sends over the link.
        rank: its number in the group.
        to: the node at the other end of the link.
    """

    kind: str
    node: str = ""
    rank: int | None = None
    to: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "rank":
                return f"rank {self.rank} on node {self.node}"
            case "link":
                return f"the link from node {self.node} to node {self.to}"
            case "node":
                return f"node {self.node}"
            case _:
                return "the orchestrator's store"


def rank_culprit(rank: int, node: str) -> Culprit:
    """Return a rank as the culprit."""
    return Culprit("rank", node, rank=rank)


def node_culprit(node: str) -> Culprit:
    """Return a node as the culprit."""
    return Culprit("node", node)


def link_culprit(source: str, target: str) -> Culprit:
    """Return the link from one node to another as the culprit."""
    return Culprit("link", source, to=target)


STORE = Culprit("store")


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident.

    Attributes:
        id: unique among all agents; the same while the incident lasts.
        cause: its kind.
        effect: what it does to the group's ops.
        culprit: who causes it.
        sentence: the evidence, for people: no full stop at its end.
        group: the group that suffers, ``""`` if it is not about one.
        opening: which opening of that name.
        seq: the op that waits or has failed; ``None`` if it is not about one.
        began: when it began, as far as is known, in seconds since 1970.
        seen: when it was found.
        ended: when it was over; ``None`` while it lasts.
        reporter: the node that has found it; ``""`` for the orchestrator.
        evidence: the numbers of the sentence, for programs.
    """

    id: str
    cause: Cause
    effect: Effect
    culprit: Culprit
    sentence: str
    group: str = ""
    opening: int = 0
    seq: int | None = None
    began: float = 0.0
    seen: float = 0.0
    ended: float | None = None
    reporter: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """True while it lasts."""
        return self.ended is None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        culprit = self.culprit
        return {
            "id": self.id,
            "cause": self.cause.value,
            "communication": self.cause.is_communication,
            "effect": self.effect.value,
            "culprit": {
                "kind": culprit.kind,
                "node": culprit.node,
                "rank": culprit.rank,
                "to": culprit.to,
            },
            "sentence": self.sentence,
            "group": self.group,
            "opening": self.opening,
            "seq": self.seq,
            "began": self.began,
            "seen": self.seen,
            "ended": self.ended,
            "reporter": self.reporter,
            "evidence": dict(self.evidence),
        }


def bounded(incident: Incident) -> Incident:
    """Return an incident whose texts are single lines of printable characters, within the limits.

    They quote what programs of users say: the exception of a rank, the names of its functions.
    """
    evidence = {
        name: one_line(value, MAX_EVIDENCE_TEXT) if isinstance(value, str) else value
        for name, value in incident.evidence.items()
    }
    return replace(incident, sentence=one_line(incident.sentence, MAX_SENTENCE), evidence=evidence)


def printable(text: str) -> str:
    """Return text with a space for each character that is not printable.

    So text of others neither forges a line of a log nor controls a terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text)


def one_line(text: str, most: int) -> str:
    """Return text as one line of printable characters, cut to at most ``most`` of them."""
    line = " ".join(printable(text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def from_dict(data: Mapping[str, Any]) -> Incident:
    """Return the incident of a JSON form, with its texts within the limits.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    culprit, seq, ended = data["culprit"], data["seq"], data["ended"]
    rank = culprit["rank"]
    found = Incident(
        str(data["id"]),
        Cause(data["cause"]),
        Effect(data["effect"]),
        Culprit(
            str(culprit["kind"]),
            str(culprit["node"]),
            None if rank is None else _whole(rank),
            str(culprit["to"]),
        ),
        str(data["sentence"]),
        str(data["group"]),
        _whole(data["opening"]),
        None if seq is None else _whole(seq),
        _finite(data["began"]),
        _finite(data["seen"]),
        None if ended is None else _finite(ended),
        str(data["reporter"]),
        dict(data["evidence"]),
    )
    return bounded(found)


def _finite(value: Any) -> float:
    """Return a time; JSON as Python reads it also has NaN and Infinity, which no browser reads."""
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"expected a time, got {value!r}")
    return number


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected an integer, got {value!r}")
    return value


def merged(told: Iterable[Mapping[str, Any]]) -> list[Incident]:
    """Return each incident once: open ones first, the oldest of them first; then the latest ended.

    Of one that some call open the end counts, if anybody knows it. What is no incident of this
    version is left out.
    """
    found: dict[str, Incident] = {}
    for data in told:
        try:
            incident = from_dict(data)
        except (KeyError, TypeError, ValueError):
            continue
        if incident.id not in found or not incident.is_open:
            found[incident.id] = incident
    open_ones = [each for each in found.values() if each.is_open]
    ended = [each for each in found.values() if not each.is_open]
    return [
        *sorted(open_ones, key=lambda each: each.began),
        *sorted(ended, key=lambda each: each.ended or 0.0, reverse=True),
    ]
