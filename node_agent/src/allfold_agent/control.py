"""The control port: health and status for people and tools, testimony and verdicts for peers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Annotated, Any

from fastapi import Body, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from allfold_agent import __version__
from allfold_agent.agent import Agent
from allfold_agent.edge_request import Lane
from allfold_agent.group import Group
from allfold_agent.out_edge import EdgeCounters
from allfold_agent.registry import PLAN_LAG_SECONDS
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, PeerLost, from_dict

_OPEN_PATHS = ("/healthz", "/readyz", "/version")
_MAX_BODY = 1 << 20

Json = dict[str, Any]


def make_app(agent: Agent) -> FastAPI:
    """The control port's application for one agent."""
    app = FastAPI(title="Allfold node agent", version=__version__)
    _guard(app, agent.settings.token)
    _add_health(app, agent)
    _add_status(app, agent)
    _add_judgement(app, agent)
    return app


def _error(error: AllfoldError) -> JSONResponse:
    return JSONResponse({"error": error.to_dict()}, status_code=error.status)


def _guard(app: FastAPI, token: str) -> None:
    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def authorize(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        given = request.headers.get("authorization", "").encode()
        open_path = request.url.path in _OPEN_PATHS
        if token and not open_path and not hmac.compare_digest(given, expected):
            refusal = LocalError("this port needs the join token: Authorization: Bearer <token>")
            return JSONResponse({"error": refusal.to_dict()}, status_code=401)
        if int(request.headers.get("content-length", "0") or 0) > _MAX_BODY:
            refusal = InvalidArgument(f"a body here has at most {_MAX_BODY} bytes")
            return JSONResponse({"error": refusal.to_dict()}, status_code=413)
        return await call_next(request)

    @app.exception_handler(AllfoldError)
    async def refuse(_: Request, error: AllfoldError) -> JSONResponse:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return _error(InvalidArgument(f"{place}: {first['msg']}, got {first.get('input')!r}"))


def _add_health(app: FastAPI, agent: Agent) -> None:
    @app.get("/healthz")
    async def healthz() -> Json:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(response: Response) -> Json:
        """The agent is registered and can seat ranks; otherwise 503 and what it waits for."""
        problem = agent.enrolment.problem
        response.status_code = 503 if problem else 200
        check = {"name": "orchestrator", "ok": problem is None, "reason": problem or ""}
        return {"ready": problem is None, "checks": [check]}

    @app.get("/version")
    async def version() -> Json:
        return {"name": "allfold-agent", "version": __version__}


def _add_status(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/status")
    async def status() -> Json:
        """This node: its groups, their ops in flight, the latest ops, the traffic per edge."""
        identity = agent.enrolment.identity
        return {
            "node": agent.settings.name,
            "control_url": identity.control_url if identity else "",
            "data_address": identity.data_address if identity else "",
            "device_type": agent.device_type,
            "ready": agent.enrolment.problem is None,
            "waiting_for": agent.enrolment.problem or "",
            "processes": agent.hub.processes,
            "groups": [_describe(group) for group in agent.registry.all()],
        }

    @app.get("/v1/groups/{name}/epochs/{epoch}/ops")
    async def ops(name: str, epoch: int, limit: Annotated[int, Query(ge=1, le=512)] = 64) -> Json:
        """The flight recorder: the latest ops of a group that are over, newest last."""
        group = agent.registry.find(name, epoch)
        return {"ops": [each.to_dict() for each in list(group.recent)[-limit:]]}


def _describe(group: Group) -> Json:
    now = monotonic()
    return {
        "name": group.name,
        "epoch": group.epoch,
        "world_size": group.plan.world_size,
        "nodes": [member.node for member in group.plan.members],
        "ranks": list(group.ranks),
        "last_seq": {str(rank): last for rank, last in group.last_seq.items()},
        "left": sorted(group.fates.left),
        "broken": group.fates.broken.message if group.fates.broken else "",
        "in_flight": [
            {
                "seq": op.seq,
                "what": op.fingerprint.describe(),
                "strategy": op.strategy,
                "waiting_for": [rank for rank in group.ranks if rank not in op.arrivals],
                "waiting_for_nodes": _silent_sources(group, op.seq),
                "age": now - op.first_arrival,
            }
            for op in sorted(group.ops.values(), key=lambda op: op.seq)
            if op.arrivals
        ],
        "messages": [
            {"rank": call.rank, "what": call.describe(), "age": now - call.began}
            for call in group.pairs.waiting_calls()
        ],
        "edges": [
            _describe_edge(group, lane, peer, direction, counters)
            for lane, edges in ((Lane.OPS, group.edges), (Lane.PAIRS, group.pairs.edges))
            for direction, peer, counters in edges.counters()
        ],
    }


def _describe_edge(
    group: Group, lane: Lane, peer: int, direction: str, counters: EdgeCounters
) -> Json:
    return {
        "lane": lane.value,
        "peer": group.plan.members[peer].node,
        "direction": direction,
        "payload_bytes": counters.payload_bytes,
        "frames": counters.frames,
    }


def _silent_sources(group: Group, seq: int) -> list[str]:
    op = group.ops.get(seq)
    if op is None or op.exchange is None:
        return []
    return [group.plan.members[peer].node for peer in op.exchange.awaited_sources()]


def _add_judgement(app: FastAPI, agent: Agent) -> None:
    base = "/v1/groups/{name}/epochs/{epoch}"

    @app.get(base + "/ops/{seq}")
    async def testify(
        name: str, epoch: int, seq: int, wait: Annotated[float, Query(ge=0, le=5)] = 0.0
    ) -> Json:
        """What this node knows of an op: who has called it, and with which fingerprint."""
        return await agent.peers.testify(agent.registry.find(name, epoch), seq, wait)

    @app.post(base + "/ops/{seq}/suspicion")
    async def suspicion(
        name: str,
        epoch: int,
        seq: int,
        reason: Annotated[str, Body()],
        waited: Annotated[float, Body()],
    ) -> Json:
        """A node suspects an op: judge it, as the group's leader."""
        group = agent.registry.find(name, epoch)
        verdict = await agent.peers.lead(group, seq, reason, waited)
        return {"error": verdict.to_dict() if verdict else None}

    @app.post(base + "/ops/{seq}/verdict")
    async def verdict(
        name: str, epoch: int, seq: int, error: Annotated[Json, Body()], final: bool = True
    ) -> Json:
        """The leader's verdict on an op; answers whether the op has failed here."""
        group = agent.registry.find(name, epoch)
        return {"failed": group.fail(seq, from_dict(error), final=final)}

    @app.post(base + "/losses")
    async def losses(name: str, epoch: int, error: Annotated[Json, Body()]) -> Json:
        """A member of the group is lost."""
        loss = from_dict(error)
        if not isinstance(loss, PeerLost):
            raise InvalidArgument(f"a loss is a PeerLost, got {type(loss).__name__}")
        group = await asyncio.to_thread(agent.registry.look_for, name, epoch, PLAN_LAG_SECONDS)
        if group is not None:
            group.break_(loss)
        return {}

    @app.post(base + "/departures")
    async def departures(
        name: str, epoch: int, rank: Annotated[int, Body()], last_seq: Annotated[int, Body()]
    ) -> Json:
        """A rank has left the group in order."""
        group = await asyncio.to_thread(agent.registry.look_for, name, epoch, PLAN_LAG_SECONDS)
        if group is not None:
            group.rank_left(rank, last_seq)
        return {}
