"""The views of groups and nodes for people and the command line."""

from __future__ import annotations

from collections.abc import Mapping

from allfold_orchestrator.membership.group_state import (
    Epoch,
    Formation,
    GroupParams,
    GroupState,
    RankSeat,
    Reason,
)
from allfold_orchestrator.store.node_store import NodeStatus
from allfold_orchestrator.wire import GroupView, NodeView, Phase, RankLeft, RankPlace


def group_view(state: GroupState) -> GroupView:
    """Return the view of a group."""
    forming, current = state.forming, state.current
    params = _params(forming, current)
    nodes = [member.node for member in current.plan.members] if current else []
    return GroupView(
        group=state.group,
        phase=phase_of(state),
        epoch=_epoch_number(state),
        last_epoch=state.last_epoch,
        world_size=params.world_size if params else None,
        timeout=params.timeout if params else None,
        strategies=dict(params.strategies) if params else {},
        on_loss=params.on_loss if params else None,
        min_world=params.min_world if params else None,
        present=_present(forming, current),
        missing=forming.missing if forming else [],
        left=_left(current) if current else [],
        lost=_lost(current) if current else [],
        ring_order=nodes,
        tree_order=[nodes[index] for index in current.plan.tree_order] if current else [],
        links=current.plan.links if current else None,
    )


def unreadable_group(name: str) -> GroupView:
    """Return the view of a group of which only the name is known."""
    return group_view(GroupState(name)).model_copy(update={"phase": "unreadable"})


def phase_of(state: GroupState) -> Phase:
    """Return the phase of a group."""
    if state.current is not None and state.current.intact:
        return "ready"
    if state.forming is not None:
        return "forming"
    if state.current is None or state.current.closed:
        return "gone"
    return "broken" if state.current.broken else "closing"


def _epoch_number(state: GroupState) -> int:
    if state.forming is not None:
        return state.forming.epoch
    return state.current.plan.epoch if state.current else state.last_epoch


def _params(forming: Formation | None, current: Epoch | None) -> GroupParams | None:
    if forming is not None:
        return forming.params
    return current.params if current is not None else None


def _present(forming: Formation | None, current: Epoch | None) -> list[RankPlace]:
    if forming is not None:
        return _places(forming.seats)
    if current is None:
        return []
    return _places({r: seat for r, seat in current.seats.items() if r not in current.departed})


def _places(seats: Mapping[int, RankSeat]) -> list[RankPlace]:
    return [RankPlace(rank=rank, node=seat.node.node) for rank, seat in sorted(seats.items())]


def _left(epoch: Epoch) -> list[RankLeft]:
    return [
        RankLeft(rank=rank, node=epoch.seats[rank].node.node, reason=reason.value)
        for rank, reason in sorted(epoch.departed.items())
        if reason is not Reason.LOST
    ]


def _lost(epoch: Epoch) -> list[RankPlace]:
    return [
        RankPlace(rank=rank, node=epoch.seats[rank].node.node)
        for rank, reason in sorted(epoch.departed.items())
        if reason is Reason.LOST
    ]


def node_view(status: NodeStatus, *, now: float, lease_seconds: float) -> NodeView:
    """Return the view of a node; its last heartbeat was one lease before the lease's end."""
    info, expiry = status.record.info, status.lease_expiry
    age = None if expiry is None else max(0.0, now - (expiry - lease_seconds))
    return NodeView(
        node=info.node,
        state="gone" if expiry is None else "alive" if expiry > now else "late",
        heartbeat_age=None if age is None else round(age, 3),
        control_url=info.control_url,
        data_address=info.data_address,
        device_type=info.device_type,
        zone=info.zone,
        version=status.record.version,
        progress=list(status.progress),
    )
