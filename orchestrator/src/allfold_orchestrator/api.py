"""The HTTP face of the orchestrator: translates, and leaves every decision to the service."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from allfold_orchestrator import wire
from allfold_orchestrator.group_state import Leave, Reason
from allfold_orchestrator.plan_bodies import PlanBodies
from allfold_orchestrator.service import Orchestrator


async def _service(request: Request) -> Orchestrator:
    # Not a plain function: FastAPI would run that in a thread, for each request.
    service: Orchestrator = request.app.state.orchestrator
    return service


Service = Annotated[Orchestrator, Depends(_service)]
_NAME = {"pattern": wire.NAME_PATTERN}
NodeName = Annotated[str, Path(**_NAME, description="The node's name.")]
GroupName = Annotated[str, Path(**_NAME, description="The group's name.")]
RankNumber = Annotated[int, Path(ge=0, lt=wire.MAX_WORLD_SIZE)]
Session = Annotated[str, Query(**_NAME, description="The session of the rank's process.")]
Incarnation = Annotated[str, Query(**_NAME)]
Wait = Annotated[
    float,
    Query(ge=0, le=wire.MAX_WAIT_SECONDS, description="Seconds to wait for the others."),
]


def _errors(**reasons: str) -> dict[int | str, dict[str, Any]]:
    """The failures of a route, for its documentation: ``_errors(s409="the rank is taken")``."""
    described: dict[int | str, str] = {int(status[1:]): text for status, text in reasons.items()}
    described[400] = "The request is not valid."
    described[503] = "The state store does not answer: try again."
    described["default"] = "Any other failure: no token, a body over 1 MiB, a mistake of ours."
    return {
        status: {"model": wire.ErrorAnswer, "description": text}
        for status, text in described.items()
    }


def _encoded(answer: wire.Answer) -> Response:
    """The answer as it is: it may list every rank, too many to have each checked once more."""
    return Response(answer.model_dump_json(), media_type="application/json")


router = APIRouter(prefix="/v1")


@router.post(
    "/nodes",
    tags=["nodes"],
    summary="Register a node agent",
    responses=_errors(s409="The name is in use by an agent at another address."),
)
async def register_node(body: wire.RegisterNode, service: Service, request: Request) -> wire.Lease:
    """Starts the node's lease. Doing it again is fine, a restarted agent takes its name back."""
    peers = await service.register_node(body)
    lease: wire.Lease = request.app.state.lease
    return lease.model_copy(update={"peers": peers})


@router.post(
    "/nodes/{node}/heartbeat",
    tags=["nodes"],
    summary="Extend a node's lease",
    responses=_errors(s404="The node is not registered (any more): register again."),
)
async def heartbeat(node: NodeName, body: wire.Heartbeat, service: Service) -> wire.Empty:
    """Keeps the node alive for another lease, and notes how far its groups are."""
    await service.heartbeat(node, body)
    return wire.Empty()


@router.delete("/nodes/{node}", tags=["nodes"], summary="A node leaves", responses=_errors())
async def remove_node(node: NodeName, incarnation: Incarnation, service: Service) -> wire.Empty:
    """Ends the lease at once; seats that the node still holds are lost."""
    await service.remove_node(node, incarnation)
    return wire.Empty()


@router.get(
    "/nodes",
    tags=["nodes"],
    summary="List the nodes",
    response_model=wire.NodeList,
    responses=_errors(),
)
async def nodes(service: Service) -> Response:
    """Every node that is here, or was within the last hour."""
    return _encoded(wire.NodeList(nodes=await service.nodes()))


@router.post(
    "/groups/{group}/ranks",
    tags=["groups"],
    summary="Register a rank",
    responses=_errors(
        s404="The node is not registered (any more).",
        s409="The rank is taken, or the parameters are not those of the group.",
    ),
)
async def join(group: GroupName, body: wire.JoinGroup, service: Service) -> wire.Joined:
    """Takes a seat. The first rank of a group fixes its parameters. Retries are harmless."""
    seated = await service.join(group, body)
    return wire.Joined(epoch=seated.epoch, ready=seated.ready)


PlanAnswer = wire.PlanComplete | wire.PlanWaiting


@router.get(
    "/groups/{group}/plan",
    tags=["groups"],
    summary="Wait for the plan",
    response_model=PlanAnswer,
    responses=_errors(s410="The caller has no seat in that epoch (any more)."),
)
async def plan(
    group: GroupName,
    epoch: Annotated[int, Query(ge=0, description="As the registration answered it.")],
    session: Session,
    service: Service,
    request: Request,
    wait: Wait = 0.0,
) -> Response:
    """A long-poll: answers as soon as the group is complete, or when the wait is over."""
    found = await service.plan(group, epoch, session, wait)
    bodies: PlanBodies = request.app.state.plan_bodies
    return bodies.response(group, found, request.headers.get("accept-encoding", ""))


@router.delete(
    "/groups/{group}/ranks/{rank}",
    tags=["groups"],
    summary="Unregister a rank",
    responses=_errors(s409="The rank is not registered by this session."),
)
async def leave(
    group: GroupName,
    rank: RankNumber,
    session: Session,
    service: Service,
    reason: Annotated[Reason, Query(description="Why the rank leaves.")] = Reason.FINISHED,
    epoch: Annotated[
        int | None, Query(ge=0, description="Leave this epoch only, whatever came later.")
    ] = None,
) -> wire.Empty:
    """Gives the seat back, of a group that is forming or complete."""
    await service.leave(group, Leave(rank, session, reason, epoch))
    return wire.Empty()


@router.get(
    "/groups",
    tags=["groups"],
    summary="List the groups",
    response_model=wire.GroupList,
    responses=_errors(),
)
async def groups(service: Service) -> Response:
    """Every group that is remembered, with who is there and who is missing."""
    return _encoded(wire.GroupList(groups=await service.groups()))


@router.get(
    "/groups/{group}",
    tags=["groups"],
    summary="Show a group",
    response_model=wire.GroupView,
    responses=_errors(s404="There is no such group."),
)
async def group(group: GroupName, service: Service) -> Response:
    """Who is there, who is missing, who left and why, and the order of the nodes."""
    return _encoded(await service.group(group))
