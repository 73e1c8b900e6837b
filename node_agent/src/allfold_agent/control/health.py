"""Health of this agent: alive, ready, version."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from allfold_agent import __version__
from allfold_agent.agent import Agent

Json = dict[str, Any]


def add_health(app: FastAPI, agent: Agent) -> None:
    @app.get("/healthz")
    async def healthz() -> Json:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(response: Response) -> Json:
        """The agent is registered and accepts ranks; otherwise 503 and what it waits for."""
        reason = problem_of(agent)
        response.status_code = 503 if reason else 200
        check = {"name": "orchestrator", "ok": reason is None, "reason": reason or ""}
        return {"ready": reason is None, "checks": [check]}

    @app.get("/version")
    async def version() -> Json:
        """The service's name and version."""
        return {"name": "allfold-agent", "version": __version__}


def problem_of(agent: Agent) -> str | None:
    """Return the reason for which no rank can join at the moment; ``None`` if ranks can."""
    return agent.draining.problem or agent.registration.problem
