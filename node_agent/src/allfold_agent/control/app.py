"""The control port's application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from allfold_agent import __version__
from allfold_agent.agent import NodeAgent
from allfold_agent.control.facts import add_facts
from allfold_agent.control.metrics import add_metrics
from allfold_agent.control.peer_checks import add_peer_checks
from allfold_agent.control.status import add_flight, add_status, problem_of
from allfold_service.answers import (
    Answer,
    ErrorAnswer,
    StampedResponse,
    TokenGate,
    answer_errors,
)
from allfold_service.health import Check, probes

_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorAnswer, "description": "A failure; the status is its class's."}
}


class AgentVersion(Answer):
    """The name and version of the service."""

    name: str
    version: str


def make_app(agent: NodeAgent) -> FastAPI:
    """Return the control port's application for one agent."""
    app = FastAPI(
        title="Allfold node agent",
        version=__version__,
        default_response_class=StampedResponse,
        responses=_ERRORS,
        # Their pages load scripts from elsewhere; /openapi.json is all that tools need.
        docs_url=None,
        redoc_url=None,
    )
    # No route of this port reads a body, so that none needs a limit.
    tokens = agent.settings.credentials.tokens
    app.add_middleware(TokenGate, service="node agent", tokens=tokens)
    answer_errors(app, "node agent")

    async def checks() -> list[Check]:
        reason = problem_of(agent)
        return [Check(name="orchestrator", ok=reason is None, reason=reason or "")]

    app.include_router(probes(AgentVersion(name="allfold-agent", version=__version__), checks))
    add_status(app, agent)
    add_facts(app, agent)
    add_peer_checks(app, agent)
    add_metrics(app, agent)
    add_flight(app, agent)
    return app
