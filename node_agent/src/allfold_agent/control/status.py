"""The answers on this node's groups: status, history, incidents and flight recorder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from time import monotonic, time
from typing import Annotated

from fastapi import FastAPI, Query

from allfold_agent.agent import NodeAgent
from allfold_agent.edges.connections import EdgeCounters
from allfold_agent.edges.opening import Traffic
from allfold_agent.groups.deadlines import WaitingOp, waiting_ops
from allfold_agent.groups.flight_recorder import GroupRecording, OpRecord, recording_of
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.neighbours import describe_layout
from allfold_agent.groups.outcomes import RECORDED_OPS
from allfold_core import agent_answers
from allfold_core.agent_answers import (
    ClockReading,
    Clocks,
    FlightAnswer,
    GroupStatus,
    History,
    Json,
    OpStatus,
    RecordedOp,
    RoundStatus,
    Status,
)

Limit = Annotated[int, Query(ge=1, le=RECORDED_OPS)]


def add_status(app: FastAPI, agent: NodeAgent) -> None:
    """Add the routes of the status, the history and the incidents."""

    @app.get("/v1/status", response_model=Json)
    async def status() -> Status:
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
            "limits": [str(each) for each in agent.pacer.caps],
            "sent_to_zones": sent_to_zones(agent),
            "groups": [describe_group(group) for group in agent.registry.all()],
        }

    @app.get("/v1/history", response_model=Json)
    async def history(since: Annotated[float, Query(ge=0)] = 0.0) -> History:
        """One sample per second and group for the last 10 minutes, newest last.

        ``since``: seconds since 1970. ``own`` is a rank's mean time from the end of an op to its
        next call, ``late`` its mean time after the first local call, in seconds.
        """
        groups = agent.observer.history(since)
        return {"node": agent.settings.name, "now": time(), "groups": groups}

    @app.get("/v1/incidents")
    async def incidents() -> Json:
        """The incidents of this node's groups: open ones first, then the newest that are over."""
        found = [*agent.incidents.open_ones(), *agent.incidents.recent()]
        return {"node": agent.settings.name, "incidents": [each.to_dict() for each in found]}


def problem_of(agent: NodeAgent) -> str | None:
    """Return the reason for which no rank can join at the moment; ``None`` if ranks can."""
    return agent.draining.problem or agent.registration.problem


def describe_group(group: NodeGroup) -> GroupStatus:
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
            for lane, direction, peer, counters in edge_counters(group)
        ],
        "rounds": [_describe_round(each, time() - now) for each in [*group.outcomes.tally.rounds]],
    }


def edge_counters(group: NodeGroup) -> Iterator[tuple[Traffic, str, str, EdgeCounters]]:
    """Yield the kind of traffic, direction, peer and counters of each edge of a group."""
    ops, pairs, short = group.edges, group.p2p.edges, group.lanes
    for kind, edges in ((Traffic.OPS, ops), (Traffic.PAIRS, pairs), (Traffic.SHORT, short)):
        for direction, peer, counters in edges.counters():
            yield kind, direction, peer, counters


def sent_to_zones(agent: NodeAgent) -> Counter[str]:
    """Return the payload that was sent to the nodes of each zone, in bytes; of the event loop."""
    found = {
        (group.name, group.opening, kind.value, peer, group.members[peer].zone): counters
        for group in agent.registry.all()
        for kind, direction, peer, counters in edge_counters(group)
        if direction == "out"
    }
    return agent.zone_bytes.add({key: each.payload_bytes for key, each in found.items()})


def _describe_round(record: OpRecord, wall_ahead: float) -> RoundStatus:
    assert record.round is not None
    return {
        "seq": record.seq,
        "world_size": record.world_size,
        "ended_at": record.start + record.seconds + wall_ahead,
        "seconds": record.seconds,
        **record.round,
    }


def _describe_op(op: WaitingOp, now: float) -> OpStatus:
    return {
        "seq": op.seq,
        "what": op.what,
        "strategy": op.strategy,
        "waiting_for": list(op.missing),
        "waiting_for_nodes": list(op.silent),
        "age": now - op.since,
    }


def _describe_edge(lane: Traffic, peer: str, direction: str, counters: EdgeCounters) -> Json:
    return {
        "lane": lane.value,
        "peer": peer,
        "direction": direction,
        "payload_bytes": counters.payload_bytes,
        "frames": counters.frames,
        "scrapped_frames": counters.scrapped_frames,
    }


def add_flight(app: FastAPI, agent: NodeAgent) -> None:
    """Add the routes of the flight recorder."""

    @app.get("/v1/clock", response_model=Json)
    async def clock() -> ClockReading:
        """The clocks of this node: who asks some times learns how far they are from its own."""
        return {"node": agent.settings.name, "clock": read_clock()}

    @app.get("/v1/flight", response_model=Json)
    async def flight(group: str = "", limit: Limit = 128) -> FlightAnswer:
        """The latest ops of all groups, or of those of one name: ended ones and those in flight.

        ``start`` of an op is on the node's monotonic clock, which ``clock`` shows at the time of
        this answer; all other times are seconds after ``start``. The groups that ended of late are
        there too. ``limit``: so many ops of each group.
        """
        found = [recording_of(each) for each in agent.registry.all() if group in ("", each.name)]
        ended = [each for each in agent.recordings.ended() if group in ("", each.group)]
        now = read_clock()
        groups = [_describe_recording(each, limit, now) for each in [*ended, *found]]
        return {"node": agent.settings.name, "clock": now, "groups": groups}

    @app.get("/v1/groups/{name}/openings/{opening}/ops")
    async def ops(name: str, opening: int, limit: Limit = 64) -> Json:
        """The latest ops of a group that are over, newest last; in the form of ``/v1/flight``."""
        recording = recording_of(agent.registry.find(name, opening))
        over = [each for each in recording.ops if each.state.is_over]
        return {"ops": _describe_ops(over[-limit:], read_clock())}


def read_clock() -> Clocks:
    """Read this machine's clocks."""
    return {"monotonic": monotonic(), "wall": time()}


def _describe_recording(
    recording: GroupRecording, limit: int, now: Clocks
) -> agent_answers.RecordingAnswer:
    return {
        "name": recording.group,
        "opening": recording.opening,
        "open": recording.is_open,
        "epoch": recording.epoch,
        "world_size": recording.world_size,
        "nodes": list(recording.nodes),
        "ranks": list(recording.ranks),
        "last_seq": {str(rank): last for rank, last in recording.last_seq.items()},
        "ops": _describe_ops(recording.ops[-limit:], now),
    }


def _describe_ops(records: Iterable[OpRecord], now: Clocks) -> list[RecordedOp]:
    return [each.to_dict(now) for each in records]
