"""The recordings of a node's groups, of those that are open and of those that ended of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allfold_agent.groups.flight_recorder import OpRecord, record_in_flight

if TYPE_CHECKING:
    from allfold_agent.groups.agreeing_group import AgreeingGroup

_ENDED_KEPT = 16


@dataclass(frozen=True, slots=True)
class Recording:
    """The flight recorder of one group, and what is needed to read it.

    Attributes:
        epoch: the ordinal of the newest epoch; ``world_size``, ``nodes`` and ``ranks`` (those of
            this node) are of that.
        last_seq: the last op that each rank of this node has called; -1 for none.
        is_open: the group is not over on this node.
        ops: in the order of their numbers.
    """

    group: str
    opening: int
    epoch: int
    world_size: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    last_seq: Mapping[int, int]
    is_open: bool
    ops: tuple[OpRecord, ...]


def recording_of(group: AgreeingGroup, *, is_open: bool = True) -> Recording:
    """Return the recording of a group: its latest ops, and those in flight. From any thread."""
    records = group.lanes.records
    records.harvest()
    with group.table.lock:
        epoch, called = group.current, records.last_called()
        ops = list(group.outcomes.recent)
        ops += [record_in_flight(op) for op in group.table.in_flight.values() if op.calls]
        ops += [posted.record for posted in records.in_flight()]
    return Recording(
        group.name,
        group.opening,
        epoch.ordinal,
        epoch.plan.world_size,
        tuple(member.node for member in epoch.plan.members),
        epoch.ranks,
        called,
        is_open,
        tuple(sorted(ops, key=lambda each: each.seq)),
    )


class Recordings:
    """Keeps the recordings of the latest groups that are over: a job that failed is looked at then.

    From any thread.
    """

    def __init__(self) -> None:
        self._ended: deque[Recording] = deque(maxlen=_ENDED_KEPT)

    def keep(self, group: AgreeingGroup) -> None:
        """Take the recording of a group that is over."""
        self._ended.append(recording_of(group, is_open=False))

    def ended(self) -> list[Recording]:
        """Return the recordings of groups that are over, the latest last."""
        return list(self._ended)
