"""The views of groups and nodes for people and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allfold_core.group_options import NAMES
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.bodies import (
    GroupView,
    NodeLost,
    NodeView,
    Phase,
    RankLeft,
    RankLost,
    RankPlace,
    TermView,
)
from allfold_orchestrator.membership.group_state import (
    Formation,
    GroupState,
    Opening,
    RankSeat,
    Reason,
)
from allfold_orchestrator.membership.joining import holders
from allfold_orchestrator.store.node_store import NodeStatus

_NO_PARAMS: dict[str, Any] = {**dict.fromkeys(("world_size", *NAMES)), "strategies": {}}


def group_view(state: GroupState, now: float) -> GroupView:
    """Return the view of a group: of the opening that runs, else of the one that forms."""
    forming, current = state.forming, state.current
    shown = current if forming is None or not state.is_free else forming
    waiting = forming if shown is current else None
    nodes = [member.node for member in current.plan.members] if current else []
    return GroupView(
        group=state.group,
        phase=phase_of(state),
        opening=_number(shown) if shown else state.last_opening,
        last_opening=state.last_opening,
        **(shown.params.to_dict() if shown else _NO_PARAMS),
        present=places(_present(shown)) if shown else held_by(state),
        missing=shown.missing if isinstance(shown, Formation) else [],
        refused=shown.refused if isinstance(shown, Formation) else "",
        left=_left(current) if current else [],
        lost=_lost(current) if current else [],
        waiting=places(waiting.seats) if waiting else [],
        term=_term_view(state.term, now) if state.term else None,
        ring_order=nodes,
        tree_order=[nodes[index] for index in current.plan.tree_order] if current else [],
        links=current.plan.links if current else None,
    )


def unreadable_group(name: str) -> GroupView:
    """Return the view of a group of which only the name is known."""
    return group_view(GroupState(name), 0.0).model_copy(update={"phase": "unreadable"})


def phase_of(state: GroupState) -> Phase:
    """Return the phase of a group."""
    current = state.current
    if current is None and state.term is not None:
        return "recalled"
    if current is None or current.closed:
        return "gone" if state.forming is None else "forming"
    return "ready" if current.intact else "reduced"


def _term_view(record: TermRecord, now: float) -> TermView:
    term = record.term
    return TermView(
        number=term.number,
        nodes=list(term.voters),
        lost=[NodeLost(node=node, how=how) for node, how in term.lost],
        trusted=record.is_trusted(now),
    )


def places(seats: Mapping[int, RankSeat]) -> list[RankPlace]:
    """Return ranks with their nodes, in their order."""
    return [RankPlace(rank=rank, node=seat.node.node) for rank, seat in sorted(seats.items())]


def held_by(state: GroupState) -> list[RankPlace]:
    """Return the ranks that have the name of a group, with their nodes, in their order."""
    return [RankPlace(rank=rank, node=node) for rank, node in sorted(holders(state).items())]


def _number(shown: Opening | Formation) -> int:
    return shown.opening if isinstance(shown, Formation) else shown.plan.opening


def _present(shown: Opening | Formation) -> Mapping[int, RankSeat]:
    return shown.seats if isinstance(shown, Formation) else shown.present


def _left(opening: Opening) -> list[RankLeft]:
    return [
        RankLeft(
            rank=rank,
            node=opening.seats[rank].node.node,
            reason="left" if reason is Reason.FINISHED else "withdrawn",
        )
        for rank, reason in sorted(opening.departed.items())
        if reason is Reason.FINISHED or reason is Reason.WITHDRAWN
    ]


def _lost(opening: Opening) -> list[RankLost]:
    return [
        RankLost(rank=rank, node=opening.seats[rank].node.node, reason=reason.value)
        for rank, reason in sorted(opening.departed.items())
        if reason is Reason.LOST or reason is Reason.NODE_LOST
    ]


def node_view(status: NodeStatus, *, now: float, lease_seconds: float) -> NodeView:
    """Return the view of a node; its last heartbeat was one lease before the lease's end."""
    info, expiry = status.record.info, status.lease_expiry
    age = None if expiry is None else max(0.0, now - (expiry - lease_seconds))
    return NodeView(
        **{name: value for name, value in info.to_dict().items() if name in NodeView.model_fields},
        state="gone" if expiry is None else "alive" if expiry > now else "late",
        heartbeat_age=None if age is None else round(age, 3),
        draining=status.draining,
        token=status.record.token,
        progress=list(status.progress),
    )
