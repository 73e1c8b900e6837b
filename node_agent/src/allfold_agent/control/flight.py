"""The flight recorder of this node, and the clock by which to read it."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic, time
from typing import Annotated

from fastapi import FastAPI, Query

from allfold_agent.agent import Agent
from allfold_agent.groups.flight_recorder import OpRecord
from allfold_agent.groups.outcomes import RECORDED_OPS
from allfold_agent.groups.recordings import Recording, recording_of
from allfold_core import agent_answers
from allfold_core.agent_answers import ClockReading, Clocks, Flight, Json, RecordedOp

Limit = Annotated[int, Query(ge=1, le=RECORDED_OPS)]


def add_flight(app: FastAPI, agent: Agent) -> None:
    """Add the routes of the flight recorder."""

    @app.get("/v1/clock", response_model=Json)
    async def clock() -> ClockReading:
        """The clocks of this node: who asks some times learns how far they are from its own."""
        return {"node": agent.settings.name, "clock": read_clock()}

    @app.get("/v1/flight", response_model=Json)
    async def flight(group: str = "", limit: Limit = 128) -> Flight:
        """The latest ops of all groups, or of those of one name: ended ones and those in flight.

        ``start`` of an op is on the node's monotonic clock, which ``clock`` shows at the time of
        this answer; all other times are seconds after ``start``. The groups that ended of late are
        there too. ``limit``: so many ops of each group.
        """
        found = [recording_of(each) for each in agent.registry.all() if group in ("", each.name)]
        ended = [each for each in agent.recordings.ended() if group in ("", each.group)]
        now = read_clock()
        groups = [_describe(each, limit, now) for each in [*ended, *found]]
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


def _describe(recording: Recording, limit: int, now: Clocks) -> agent_answers.Recording:
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
