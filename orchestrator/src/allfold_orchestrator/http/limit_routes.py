"""The routes of the limits that operators set: on what agents send, and on tokens' groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field

from allfold_core.protocol.traffic import Cap, checked_rate, parse_rate
from allfold_core.schema import NAME_PATTERN
from allfold_orchestrator import bodies
from allfold_orchestrator.http.request_limits import require_admin
from allfold_orchestrator.membership.admission import TokenLimit
from allfold_orchestrator.store.store import Store
from allfold_service.answers import Answer, ErrorAnswer, Shown

_Name = Annotated[str, Field(max_length=128)]
_TokenName = Annotated[str, Path(pattern=NAME_PATTERN, description="Its name, never itself.")]


class Limit(Shown):
    """A cap, for each agent by itself, on what it sends to other machines."""

    node: str = Field(description="Of this agent alone; empty: of each.")
    group: str = Field(description="For this group; empty: for all.")
    zones: list[str] = Field(description="Between these two zones, in either direction.")
    rate: int = Field(description="Bytes per second.")
    text: str = Field(description="The same, for people.")


class LimitList(Answer):
    """The limits that operators have set."""

    limits: list[Limit]
    tokens: list[TokenLimit] = Field(description="Names with a limit, or with open groups.")


class SetLimit(bodies.Request):
    """A cap to be set or removed; without node, group and zones it is on each agent."""

    node: _Name = Field(default="", description="Of this agent alone.")
    group: _Name = Field(default="", description="For this group.")
    zones: list[_Name] = Field(default=[], max_length=2, description="Between these two zones.")
    rate: int | str | None = Field(
        description='Bytes per second, or a text such as "200Mbit" or "25MB"; null removes it.'
    )


_Count = Annotated[int | None, Field(ge=0, le=10**9)]


class SetTokenLimit(bodies.Request):
    """The limit of the tokens of one name; without any number it is removed."""

    groups: _Count = Field(default=None, description="Open groups, at most; null: any number.")
    ranks: _Count = Field(default=None, description="Ranks in them, at most; null: any number.")


router = APIRouter(prefix="/v1/limits", tags=["limits"])
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The request is not valid."},
    403: {"model": ErrorAnswer, "description": "The request came without the admin token."},
    503: {"model": ErrorAnswer, "description": "The state store does not answer: try again."},
    "default": {"model": ErrorAnswer, "description": "Any other failure: no token, a bug."},
}


@router.get("", summary="List the limits", responses=_ERRORS)
async def limits(request: Request) -> LimitList:
    """Return the limits that operators have set; agents may have caps of their own."""
    return await _listed(request.app.state.store)


@router.put("", summary="Set or remove a limit", responses=_ERRORS)
async def set_limit(body: SetLimit, request: Request) -> LimitList:
    """Set a cap in place of the one on the same, or remove it. Agents keep to it within a second.

    Answers with all that are set then.
    """
    require_admin(request)
    store: Store = request.app.state.store
    cap = Cap(body.node, body.group, tuple(body.zones))
    if body.rate is None:
        await store.limits.remove(cap.scope)
    else:
        rate = parse_rate(body.rate) if isinstance(body.rate, str) else checked_rate(body.rate)
        await store.limits.put(replace(cap, rate=rate))
    return await _listed(store)


@router.put("/tokens/{token}", summary="Set or remove the limit of a token", responses=_ERRORS)
async def set_token_limit(token: _TokenName, body: SetTokenLimit, request: Request) -> LimitList:
    """Set what may be open for the tokens of a name, in place of what was set, or remove it.

    Groups that are open stay so. Answers with all limits that are set then.
    """
    require_admin(request)
    store: Store = request.app.state.store
    await store.limits.put_token(token, body.groups, body.ranks)
    return await _listed(store)


async def _listed(store: Store) -> LimitList:
    caps, tokens = await store.limits.all(), await store.limits.of_tokens()
    return LimitList(
        limits=[Limit(**each.to_dict(), text=str(each)) for each in caps], tokens=tokens
    )
