"""The routes of the REST API. They translate; every decision is the service's."""

from __future__ import annotations

import platform
from time import time
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from allfold_core.errors import InvalidArgument
from allfold_core.schema import MAX_OPENING, MAX_WORLD_SIZE, NAME_PATTERN, Within
from allfold_orchestrator import __version__, bodies
from allfold_orchestrator.http.metrics import all_nodes
from allfold_orchestrator.http.plan_bodies import PlanBodies
from allfold_orchestrator.http.request_limits import require_admin
from allfold_orchestrator.membership.group_state import Leave, Reason
from allfold_orchestrator.service import Orchestrator
from allfold_service.answers import Answer, ErrorAnswer


async def _service(request: Request) -> Orchestrator:
    # Not a plain function: FastAPI would run that in a thread, for each request.
    service: Orchestrator = request.app.state.orchestrator
    return service


Service = Annotated[Orchestrator, Depends(_service)]
_NAME = {"pattern": NAME_PATTERN}
NodeName = Annotated[str, Path(**_NAME, description="The node's name.")]
GroupName = Annotated[str, Path(**_NAME, description="The group's name.")]
OpeningNumber = Annotated[int, Within(0, MAX_OPENING + 1, may_be_text=True)]
RankNumber = Annotated[int, Path(ge=0, lt=MAX_WORLD_SIZE)]
Session = Annotated[str, Query(**_NAME, description="The session of the rank's process.")]
Incarnation = Annotated[
    str | None, Query(**_NAME, description="As the node registered: only the node knows it.")
]
Force = Annotated[
    bool, Query(description="Remove the node whatever its incarnation; needs the admin token.")
]
After = Annotated[str, Query(max_length=128, description="Begin behind this name.")]
Limit = Annotated[int, Query(ge=1, le=bodies.MAX_PAGE, description="Entries of one page, at most.")]
Wait = Annotated[
    float,
    Query(ge=0, le=bodies.MAX_WAIT_SECONDS, description="Seconds to wait for the others."),
]


def _errors(**reasons: str) -> dict[int | str, dict[str, Any]]:
    """Return the failures of a route for the API document: ``_errors(s409="...")``."""
    described: dict[int | str, str] = {int(status[1:]): text for status, text in reasons.items()}
    described[400] = "The request is not valid."
    described[503] = "The state store does not answer: try again."
    described["default"] = "Any other failure: no token, a body over 1 MiB or too slow, a bug."
    return {
        status: {"model": ErrorAnswer, "description": text} for status, text in described.items()
    }


def _encoded(answer: Answer) -> Response:
    """Return the answer without FastAPI's second validation: it may list thousands of ranks."""
    return Response(answer.model_dump_json(), media_type="application/json")


router = APIRouter(prefix="/v1")


@router.get("/facts", tags=["health"], summary="Clock and versions", responses=_errors())
async def facts(request: Request) -> bodies.Facts:
    """Return what ``allfold doctor`` compares between services; never asks the store."""
    return bodies.Facts(
        service="allfold-orchestrator",
        version=__version__,
        python=platform.python_version(),
        now=time(),
        needs_token=request.app.state.needs_token,
    )


@router.get(
    "/metrics/targets",
    tags=["nodes"],
    summary="The agents, for Prometheus' HTTP service discovery",
    responses=_errors(),
)
async def targets(service: Service) -> list[bodies.ScrapeTarget]:
    """Return the control port of each node that is not gone, with the labels node and token."""
    return [
        bodies.ScrapeTarget(
            targets=[urlsplit(each.control_url).netloc],
            labels={"node": each.node, "token": each.token},
        )
        async for each in all_nodes(service)
        if each.state != "gone"
    ]


@router.post(
    "/nodes",
    tags=["nodes"],
    summary="Register a node agent",
    responses=_errors(
        s409="The name is in use by an agent at another address.",
        s424="This life of the node is over; its agent registers as a new incarnation.",
    ),
)
async def register_node(
    body: bodies.RegisterNode, service: Service, request: Request
) -> bodies.Lease:
    """Start the node's lease. May be repeated; a restarted agent takes its name back."""
    peers = await service.register_node(body, request.state.token_name)
    lease: bodies.Lease = request.app.state.lease
    return lease.model_copy(update={"peers": peers})


@router.delete(
    "/nodes/{node}",
    tags=["nodes"],
    summary="Remove a node",
    responses=_errors(
        s403="The incarnation is not the node's, or force came without the admin token.",
        s404="There is no such node to remove by force.",
    ),
)
async def remove_node(
    node: NodeName,
    service: Service,
    request: Request,
    incarnation: Incarnation = None,
    force: Force = False,
) -> bodies.Empty:
    """End the lease at once; ranks that are still registered through the node are lost.

    A node removes itself, by its incarnation; doing it again is fine. An operator removes any node
    with ``force=true`` and the admin token.
    """
    if force:
        require_admin(request)
        await service.force_node_out(node)
    elif incarnation is None:
        raise InvalidArgument(
            "removing a node needs its incarnation, or force=true with the admin token",
            field="query.incarnation",
        )
    else:
        await service.remove_node(node, incarnation)
    return bodies.Empty()


@router.post(
    "/nodes/{node}/drain",
    tags=["nodes"],
    summary="Drain a node",
    responses=_errors(
        s403="The request came without the admin token.", s404="There is no such node."
    ),
)
async def drain_node(node: NodeName, service: Service, request: Request) -> bodies.Draining:
    """Make a node take no more ranks; its ranks of elastic groups leave at their next boundary.

    Answers at once; repeat it until no rank is left. A node drains until its agent is restarted.
    """
    require_admin(request)
    return await service.drain_node(node)


@router.get(
    "/nodes",
    tags=["nodes"],
    summary="List the nodes",
    response_model=bodies.NodeList,
    responses=_errors(),
)
async def nodes(
    service: Service, after: After = "", limit: Limit = bodies.DEFAULT_PAGE
) -> Response:
    """Return one page of the nodes that are registered, or were within the last hour."""
    return _encoded(await service.nodes(after, limit))


@router.post(
    "/groups/{group}/ranks",
    tags=["groups"],
    summary="Register a rank",
    responses=_errors(
        s404="The node is not registered (any more).",
        s409="The rank is taken, or does not fit the group, or its token's limit is reached.",
    ),
)
async def join(group: GroupName, body: bodies.JoinGroup, service: Service) -> bodies.Joined:
    """Register a rank. The first rank of a group fixes its parameters. May be repeated.

    A group that runs takes in further ranks if it was opened with ``max_world``.
    """
    seated = await service.join(group, body)
    return bodies.Joined(opening=seated.opening, ready=seated.ready)


PlanAnswer = bodies.PlanComplete | bodies.RunningGroup | bodies.PlanWaiting


@router.get(
    "/groups/{group}/plan",
    tags=["groups"],
    summary="Wait for the plan",
    response_model=PlanAnswer,
    responses=_errors(s410="The caller is not registered in that opening (any more)."),
)
async def plan(
    group: GroupName,
    opening: Annotated[
        OpeningNumber, Query(alias="epoch", description="As the registration answered it.")
    ],
    session: Session,
    service: Service,
    request: Request,
    wait: Wait = 0.0,
) -> Response:
    """Answer once the group is complete, or when the wait is over (a long poll)."""
    found = await service.plan(group, opening, session, wait)
    plan_bodies: PlanBodies = request.app.state.plan_bodies
    return plan_bodies.response(group, found, request.headers.get("accept-encoding", ""))


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
    reason: Annotated[bodies.LeaveReason, Query(description="Why the rank leaves.")] = "finished",
    ended: Annotated[
        OpeningNumber,
        Query(description="The opening that its nodes say all others have left."),
    ] = 0,
    was_joining: Annotated[
        bool, Query(description="Its node may not know yet that the group is complete.")
    ] = False,
) -> bodies.Empty:
    """Take a rank out of a group that is forming or complete, which goes on with the others."""
    leave = Leave(rank, session, Reason(reason), ended, was_joining=was_joining)
    await service.leave(group, leave)
    return bodies.Empty()


@router.get(
    "/groups",
    tags=["groups"],
    summary="List the groups",
    response_model=bodies.GroupList,
    responses=_errors(),
)
async def groups(
    service: Service, after: After = "", limit: Limit = bodies.DEFAULT_PAGE
) -> Response:
    """Return one page of the groups, with the present and the missing ranks of each."""
    return _encoded(await service.groups(after, limit))


@router.get(
    "/groups/{group}",
    tags=["groups"],
    summary="Show a group",
    response_model=bodies.GroupAnswer,
    responses=_errors(s404="There is no such group."),
)
async def group(group: GroupName, service: Service) -> Response:
    """Return the present and missing ranks, those that left, and the order of the nodes."""
    view = await service.group(group)
    return _encoded(bodies.GroupAnswer.model_construct(**dict(view)))


@router.get(
    "/incidents",
    tags=["incidents"],
    summary="List the incidents",
    response_model=bodies.IncidentList,
    responses=_errors(),
)
async def incidents(service: Service, limit: Limit = bodies.DEFAULT_PAGE) -> Response:
    """Return what is wrong and what was, with the culprit: open incidents first, then the newest.

    The latest 512 are kept. One that its agent does not repeat for 15 seconds is taken to be over.
    """
    found = await service.incidents.latest(limit)
    return _encoded(bodies.IncidentList.model_validate({"incidents": found}))
