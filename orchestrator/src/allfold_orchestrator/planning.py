"""From the seats of a complete formation to the plan that every node follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import log2

from allfold_core.placement import ring_order, tree_order
from allfold_core.plan import LinkModel, Member, Plan
from allfold_orchestrator.group_state import Formation, NodeInfo, RankSeat

SOFTWARE_SECONDS = 100e-6
"""What agents themselves take for one step, beside the link."""

MOST_ON_A_MACHINE = 16
"""More nodes than this are not looked at for whether they share a machine."""


def make_plan(group: str, formation: Formation) -> Plan:
    """The plan of a complete formation; the same whatever the order in which the ranks came."""
    members = ring_order(members_of(formation.seats))
    return Plan(
        group=group,
        epoch=formation.epoch,
        world_size=formation.params.world_size,
        members=members,
        tree_order=tree_order(members),
        links=links_of(formation),
        strategies=formation.params.strategies,
        timeout=formation.params.timeout,
    )


def links_of(formation: Formation) -> LinkModel:
    """What a link of the formation costs: as it is configured, else as the slowest was measured.

    What is measured is rounded to powers of two. No two measurements are alike, but the same nodes
    should get the same plan, and so the same order of additions.
    """
    nodes = {seat.node.node: seat.node for seat in formation.seats.values()}.values()
    measured = [node for node in nodes if node.bandwidth]
    if formation.links != LinkModel():
        return formation.links
    links = replace(formation.links, shared=_share_a_machine(nodes))
    if not measured:
        return links
    latency = max(node.latency for node in measured) + SOFTWARE_SECONDS
    bandwidth = min(node.bandwidth for node in measured)
    return replace(links, latency=_rounded(latency), seconds_per_byte=1 / _rounded(bandwidth))


def _share_a_machine(nodes: Collection[NodeInfo]) -> bool:
    hosts = {node.data_address.rpartition(":")[0] for node in nodes}
    return len(hosts) == 1 < len(nodes) <= MOST_ON_A_MACHINE


def _rounded(value: float) -> float:
    return float(2.0 ** round(log2(value)))


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
