"""A group as its observers see it, of plain objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from allfold_agent.groups.flight_recorder import OpRecord, OpStage
from allfold_agent.groups.group import NodeGroup


def observed_group(nodes: Mapping[int, str], node: str = "a") -> Any:
    """Return a group in its first epoch, looked at on its leader, ``node``.

    Args:
        nodes: the node of each rank.
    """
    group = SimpleNamespace(
        name="dp",
        opening=1,
        node=node,
        sent=[],
        sockets=[],
        deferred=[],
        outcomes=SimpleNamespace(recent=deque()),
        agreement=SimpleNamespace(
            term=SimpleNamespace(leader=node, voters=sorted(set(nodes.values())))
        ),
        p2p=SimpleNamespace(
            edges=SimpleNamespace(counters=list, sending=list),
            unmatched_calls=list,
            waiting_calls=list,
        ),
        lanes=SimpleNamespace(
            counters=list,
            sending=list,
            records=SimpleNamespace(harvest=lambda: None, last_called=dict),
        ),
    )
    group.edges = SimpleNamespace(counters=list, sending=lambda: group.sockets)
    group.send = lambda to, kind, body: group.sent.append((to, body))
    enter_epoch(group, 0, nodes)
    return group


def enter_epoch(group: Any, ordinal: int, nodes: Mapping[int, str]) -> None:
    """Give the group's ranks new numbers."""
    group.current = SimpleNamespace(
        ordinal=ordinal,
        stamp=(1, ordinal),
        ranks=[rank for rank, node in nodes.items() if node == group.node],
        plan=SimpleNamespace(sessions=[f"session {rank}" for rank in nodes]),
        record=SimpleNamespace(seats=[SimpleNamespace(node=node) for node in nodes.values()]),
    )


def as_group(group: Any) -> NodeGroup:
    """Return the same object under the type that observers take."""
    return cast(NodeGroup, group)


def completed(seq: int, epoch: int, start: float, arrivals: Mapping[int, float]) -> OpRecord:
    """Return the record of an op that took a millisecond after the last call."""
    seconds = max(arrivals.values()) + 0.001
    return OpRecord(
        seq, epoch, len(arrivals), None, "ring", OpStage.COMPLETED, start, seconds, arrivals
    )
