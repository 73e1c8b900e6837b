"""From the seats of a complete formation to the plan that every node follows."""

from __future__ import annotations

from collections.abc import Mapping

from allfold_core.placement import ring_order, tree_order
from allfold_core.plan import Member, Plan
from allfold_orchestrator.group_state import Formation, NodeInfo, RankSeat


def make_plan(group: str, formation: Formation) -> Plan:
    """The plan of a complete formation; the same whatever the order in which the ranks came."""
    members = ring_order(members_of(formation.seats))
    return Plan(
        group=group,
        epoch=formation.epoch,
        world_size=formation.params.world_size,
        members=members,
        tree_order=tree_order(members),
        links=formation.links,
        strategies=formation.params.strategies,
        timeout=formation.params.timeout,
    )


def members_of(seats: Mapping[int, RankSeat]) -> tuple[Member, ...]:
    """The nodes that hold the seats, sorted by their lowest rank."""
    ranks_of: dict[str, list[int]] = {}
    nodes: dict[str, NodeInfo] = {}
    for rank, seat in sorted(seats.items()):
        ranks_of.setdefault(seat.node.node, []).append(rank)
        nodes[seat.node.node] = seat.node
    return tuple(_member(nodes[name], ranks) for name, ranks in ranks_of.items())


def _member(info: NodeInfo, ranks: list[int]) -> Member:
    return Member(
        node=info.node,
        control_url=info.control_url,
        data_address=info.data_address,
        ranks=tuple(ranks),
        device_type=info.device_type,
        zone=info.zone,
    )
