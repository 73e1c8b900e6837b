"""Short names for the values that the orchestrator's tests are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from allfold_core.errors import AllfoldError
from allfold_core.group_options import GroupOptions, Joins, OnLoss
from allfold_orchestrator.membership.group_state import (
    Event,
    GroupParams,
    GroupState,
    Instruction,
    Join,
    Leave,
    NodeInfo,
    NodesLost,
    RankSeat,
    Reason,
    Rejected,
    StoreLife,
)
from allfold_orchestrator.membership.membership import step

GROUP = "train"


def node(name: str = "a", incarnation: str = "1", **facts: Any) -> NodeInfo:
    defaults = {"control_url": f"http://{name}:7401", "data_address": f"{name}:7402"}
    return NodeInfo(name, incarnation, **{**defaults, **facts})


def join(
    rank: int,
    on: NodeInfo | str = "a",
    *,
    of: int = 2,
    session: str | None = None,
    timeout: float = 30.0,
    strategies: Mapping[str, str] | None = None,
    on_loss: OnLoss = "raise",
    min_world: int = 1,
    max_world: int | None = None,
    joins: Joins = "any",
    generation: int = 0,
) -> Join:
    """Rank ``rank`` of ``of``; its session is ``s<rank>`` unless it is given.

    ``generation`` is that of the store.
    """
    info = node(on) if isinstance(on, str) else on
    seat = RankSeat(info, f"s{rank}" if session is None else session)
    options = GroupOptions(timeout, strategies or {}, on_loss, min_world, max_world, joins)
    return Join(rank, seat, GroupParams(of, options), store=StoreLife(generation, "0"))


def with_options(asked: Join, **options: Any) -> Join:
    """A join that comes with other options."""
    params = asked.params
    return replace(asked, params=replace(params, options=replace(params.options, **options)))


def lost(*nodes: str, how: str = "it was refused") -> NodesLost:
    """The first lives of these nodes are over."""
    return NodesLost({(name, "1"): how for name in nodes})


def leave(rank: int, reason: Reason = Reason.FINISHED, *, session: str | None = None) -> Leave:
    return Leave(rank, f"s{rank}" if session is None else session, reason)


def play(
    events: Iterable[Event], state: GroupState | None = None
) -> tuple[GroupState, tuple[Instruction, ...]]:
    """The state after all events, and the instructions of the last one. None may be refused."""
    state = state or GroupState(GROUP)
    last: tuple[Instruction, ...] = ()
    for event in events:
        state, last = step(state, event)
        assert not any(isinstance(instruction, Rejected) for instruction in last), last
    return state, last


def refused(state: GroupState, event: Event) -> AllfoldError:
    """The error of a refused event, which must have changed nothing but what others are told."""
    after, instructions = step(state, event)
    (instruction,) = instructions
    assert isinstance(instruction, Rejected)
    assert after is state or after == with_refusal(state, instruction.error)
    return instruction.error


def with_refusal(state: GroupState, error: AllfoldError) -> GroupState:
    """The same group, whose waiting ranks are told of this refusal."""
    assert state.forming is not None
    return replace(state, forming=replace(state.forming, refused=error.message))


def ready(world_size: int = 2) -> GroupState:
    """A complete group, one rank per node a, b, c ..."""
    return play(join(r, chr(ord("a") + r), of=world_size) for r in range(world_size))[0]
