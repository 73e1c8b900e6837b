"""The control port: health and status for people and tools."""

from __future__ import annotations

from time import monotonic
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from allfold_agent import __version__
from allfold_agent.agent import Agent
from allfold_agent.edges.connection import EdgeCounters
from allfold_agent.edges.edge_request import Lane
from allfold_agent.execution.op import Op
from allfold_agent.groups.group import Group
from allfold_agent.groups.lane_records import PostedOp
from allfold_agent.groups.link_watch import describe_layout
from allfold_agent.http.guard import Guard, StampedResponse
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError

Json = dict[str, Any]

_GROUP = "/v1/groups/{name}/openings/{opening}"


def make_app(agent: Agent) -> FastAPI:
    """The control port's application for one agent."""
    app = FastAPI(
        title="Allfold node agent", version=__version__, default_response_class=StampedResponse
    )
    app.add_middleware(Guard, token=agent.settings.token)
    _add_errors(app)
    _add_health(app, agent)
    _add_status(app, agent)
    return app


def _error(error: AllfoldError, status: int | None = None) -> StampedResponse:
    return StampedResponse({"error": error.to_dict()}, status_code=status or error.status)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AllfoldError)
    async def refuse(_: Request, error: AllfoldError) -> StampedResponse:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> StampedResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return _error(InvalidArgument(f"{place}: {first['msg']}, got {first.get('input')!r}"))

    @app.exception_handler(HTTPException)
    async def refuse_request(request: Request, error: HTTPException) -> StampedResponse:
        """Starlette's own refusals: unknown paths and methods, broken bodies."""
        answer = _error(LocalError(f"{_asked(request)}: {error.detail}"), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def report_bug(request: Request, error: Exception) -> StampedResponse:
        """A bug. The log has the traceback; the caller learns the request that failed."""
        message = f"the node agent failed on {_asked(request)}; see its log"
        return _error(ServiceError(message, cause=type(error).__name__), 500)


def _asked(request: Request) -> str:
    return f"{request.method} {request.url.path}"


def _add_health(app: FastAPI, agent: Agent) -> None:
    @app.get("/healthz")
    async def healthz() -> Json:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(response: Response) -> Json:
        """The agent is registered and accepts ranks; otherwise 503 and what it waits for."""
        problem = _problem(agent)
        response.status_code = 503 if problem else 200
        check = {"name": "orchestrator", "ok": problem is None, "reason": problem or ""}
        return {"ready": problem is None, "checks": [check]}

    @app.get("/version")
    async def version() -> Json:
        """The service's name and version."""
        return {"name": "allfold-agent", "version": __version__}


def _problem(agent: Agent) -> str | None:
    """Return the reason for which no rank can join at the moment; ``None`` if ranks can."""
    return agent.draining.problem or agent.registration.problem


def _add_status(app: FastAPI, agent: Agent) -> None:
    @app.get("/v1/status")
    async def status() -> Json:
        """This node: its groups, their ops in flight, the latest ops, the traffic per edge."""
        identity = agent.registration.identity
        return {
            "node": agent.settings.name,
            "control_url": identity.control_url if identity else "",
            "data_address": identity.data_address if identity else "",
            "device_type": agent.device_type,
            "ready": _problem(agent) is None,
            "waiting_for": _problem(agent) or "",
            "processes": agent.local_server.processes,
            "retain_bytes": agent.retention.limit,
            "groups": [_describe(group) for group in agent.registry.all()],
        }

    @app.get(_GROUP + "/ops")
    async def ops(name: str, opening: int, limit: Annotated[int, Query(ge=1, le=512)] = 64) -> Json:
        """The flight recorder: the latest ops of a group that are over, newest last."""
        group = agent.registry.find(name, opening)
        group.lanes.records.harvest()
        latest = sorted(group.outcomes.recent, key=lambda each: each.seq)[-limit:]
        return {"ops": [each.to_dict() for each in latest]}


def _describe(group: Group) -> Json:
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
        "in_flight": _describe_ops(group, now),
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


def _describe_ops(group: Group, now: float) -> list[Json]:
    ops = [_describe_op(op, now) for op in list(group.table.in_flight.values()) if op.calls]
    ops += [_describe_posted(op, now) for op in group.lanes.records.in_flight()]
    return sorted(ops, key=lambda op: int(op["seq"]))


def _describe_op(op: Op, now: float) -> Json:
    return {
        "seq": op.seq,
        "what": op.fingerprint.describe(),
        "strategy": op.strategy,
        "waiting_for": [rank for rank in op.ranks if rank not in op.arrivals],
        "waiting_for_nodes": _silent_sources(op),
        "age": now - op.first_arrival,
    }


def _describe_posted(op: PostedOp, now: float) -> Json:
    return {
        "seq": op.seq,
        "what": op.fingerprint.describe(),
        "strategy": op.strategy,
        "waiting_for": list(op.missing),
        "waiting_for_nodes": [],
        "age": now - op.first_call,
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


def _silent_sources(op: Op) -> list[str]:
    return [node for node, receiver in list(op.receivers.items()) if not receiver.all_received()]
