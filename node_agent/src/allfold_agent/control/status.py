"""The status of this node: its groups, and what its ops in flight wait for."""

from __future__ import annotations

from time import monotonic
from typing import Any

from fastapi import FastAPI

from allfold_agent.agent import Agent
from allfold_agent.edges.connection import EdgeCounters
from allfold_agent.edges.edge_request import Lane
from allfold_agent.groups.group import Group
from allfold_agent.groups.link_watch import describe_layout
from allfold_agent.groups.waiting import WaitingOp, waiting_ops

Json = dict[str, Any]


def add_status(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/status")
    async def status() -> Json:
        """This node: its groups, their ops in flight, the latest ops, the traffic per edge."""
        identity = agent.registration.identity
        return {
            "node": agent.settings.name,
            "control_url": identity.control_url if identity else "",
            "data_address": identity.data_address if identity else "",
            "device_type": agent.device_type,
            "ready": problem_of(agent) is None,
            "waiting_for": problem_of(agent) or "",
            "processes": agent.local_server.processes,
            "retain_bytes": agent.retention.limit,
            "incidents": [each.to_dict() for each in agent.incidents.open_ones()],
            "groups": [describe_group(group) for group in agent.registry.all()],
        }


def problem_of(agent: Agent) -> str | None:
    """Return the reason for which no rank can join at the moment; ``None`` if ranks can."""
    return agent.draining.problem or agent.registration.problem


def describe_group(group: Group) -> Json:
    now, epoch, records = monotonic(), group.current, group.lanes.records
    return {
        "name": group.name,
        "opening": group.opening,
        "epoch": epoch.ordinal,
        "term": group.agreement.term.number,
        "world_size": epoch.plan.world_size,
        "nodes": [member.node for member in epoch.plan.members],
        "ranks": list(epoch.ranks),
        "last_seq": {str(rank): last for rank, last in records.last_called().items()},
        "short_lane": group.lanes.describe(),
        "losses": list(group.epoch_table.changes),
        "layout": describe_layout(epoch.plan) if epoch.plan.layout.slow else "",
        "slow_links": group.link_watch.slow,
        "retained_bytes": group.results.nbytes,
        "evicted": group.evicted.message if group.evicted else "",
        "in_flight": [_describe_op(op, now) for op in waiting_ops(group)],
        "messages": [
            {"rank": call.rank, "what": call.describe(), "age": now - call.began}
            for call in group.p2p.waiting_calls()
        ],
        "edges": [
            _describe_edge(lane, peer, direction, counters)
            for lane, edges in (
                (Lane.OPS, group.edges),
                (Lane.PAIRS, group.p2p.edges),
                (Lane.SHORT, group.lanes),
            )
            for direction, peer, counters in edges.counters()
        ],
    }


def _describe_op(op: WaitingOp, now: float) -> Json:
    return {
        "seq": op.seq,
        "what": op.what,
        "strategy": op.strategy,
        "waiting_for": list(op.missing),
        "waiting_for_nodes": list(op.silent),
        "age": now - op.since,
    }


def _describe_edge(lane: Lane, peer: str, direction: str, counters: EdgeCounters) -> Json:
    return {
        "lane": lane.value,
        "peer": peer,
        "direction": direction,
        "payload_bytes": counters.payload_bytes,
        "frames": counters.frames,
        "scrapped_frames": counters.scrapped_frames,
    }
