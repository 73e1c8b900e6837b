"""The figures of this node's groups over the last minutes."""

from __future__ import annotations

from time import time
from typing import Annotated

from fastapi import FastAPI, Query

from allfold_agent.agent import Agent
from allfold_core.agent_answers import History, Json


def add_history(app: FastAPI, agent: Agent) -> None:
    """Add the route of the history."""

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
