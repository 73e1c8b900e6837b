"""The ops of all nodes on one clock, ours. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from allfold.cli._trace.asking import Flight
from allfold_core.agent_answers import RecordedOp, Recording

Opening = tuple[str, int]
"""The name of a group, and which of its openings it is."""


@dataclass(frozen=True, slots=True)
class SeenOp:
    """One op as one node has seen it; times are on our monotonic clock.

    Attributes:
        record: as ``GET /v1/flight`` has it.
        start: the first call of a rank of the node.
        end: its outcome, or the node's answer while it is in flight.
        arrivals: when each rank of the node called it.
    """

    node: str
    opening: Opening
    record: RecordedOp
    start: float
    end: float
    arrivals: Mapping[int, float]

    @property
    def seq(self) -> int:
        return self.record["seq"]

    @property
    def is_over(self) -> bool:
        return "done" in self.record["phases"]

    @property
    def key(self) -> tuple[str, int, int]:
        """The identity of the op on all nodes: group, opening and sequence number."""
        return (*self.opening, self.seq)

    @property
    def missing(self) -> list[int]:
        """The ranks of the node that have not called it."""
        return list(self.record["missing"])

    def phase(self, name: str) -> float | None:
        """Return when it came to a phase; ``None`` where that is not known."""
        after = self.record["phases"].get(name)
        return None if after is None else self.start + after

    @property
    def heard(self) -> dict[str, float]:
        """By node, when its first data were taken in."""
        return {node: self.start + after for node, after in self.record["heard"].items()}


def ops_of_group(flight: Flight, group: Recording) -> Iterator[SeenOp]:
    """Yield the ops of a group in a node's flight recorder."""
    for record in group["ops"]:
        start = record["start"] - flight.offset.ahead
        yield SeenOp(
            flight.node,
            (group["name"], group["opening"]),
            record,
            start,
            start + record["seconds"],
            {int(rank): start + after for rank, after in record["arrivals"].items()},
        )


def seen_ops(flights: Iterable[Flight], seconds: float | None) -> list[SeenOp]:
    """Return the ops of all nodes in the order of their starts.

    Args:
        seconds: leave out those that were over so long before their node answered.
    """
    found = [
        op
        for flight in flights
        for group in flight.groups
        for op in ops_of_group(flight, group)
        if seconds is None or not op.is_over or op.end >= flight.answered - seconds
    ]
    return sorted(found, key=lambda op: op.start)
