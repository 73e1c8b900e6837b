"""The plan that every node follows, made from the seats of a complete formation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import log2

from allfold_core.plan import Plan
from allfold_core.schedules.schedule import ring_order, tree_order
from allfold_core.topology import LOOPBACK, LinkModel, Member
from allfold_orchestrator.membership.group_state import (
    Formation,
    LinkSettings,
    NodeInfo,
    RankSeat,
)
from allfold_service.addresses import parse_address

SOFTWARE_SECONDS = 100e-6
"""The agents' own part of one step, added to a measured latency."""

MOST_ON_A_MACHINE = 16
"""The most nodes at one host that are taken for agents of one machine."""


ASSUMED_CORES = 2
"""The cores of a machine whose agents do not say: the fewest on which several make sense."""


def make_plan(group: str, formation: Formation) -> Plan:
    """Return the plan of a complete formation; it does not depend on the order of the joins."""
    members = ring_order(members_of(formation.seats))
    params = formation.params
    return Plan(
        group=group,
        opening=formation.opening,
        world_size=params.world_size,
        members=members,
        tree_order=tree_order(members),
        links=links_of(formation),
        options=params.options,
        generation=formation.generation,
        sessions=tuple(formation.seats[rank].session for rank in range(params.world_size)),
    )


def links_of(formation: Formation) -> LinkModel:
    """Return the link model of a formation: each parameter as set, as measured, or by default.

    Links are taken for those of one machine only where the operator has set none.
    """
    nodes = {seat.node.node: seat.node for seat in formation.seats.values()}.values()
    configured = formation.links
    if configured == LinkSettings() and (cores := _shared_cores(nodes)):
        return replace(LOOPBACK, shared_cores=cores)
    links = _measured(nodes)
    if configured.latency is not None:
        links = replace(links, latency=configured.latency)
    if configured.bandwidth is not None:
        links = replace(links, seconds_per_byte=1 / configured.bandwidth)
    return links


def _measured(nodes: Collection[NodeInfo]) -> LinkModel:
    """Return the link model of the slowest measured link, rounded to powers of two.

    No two measurements are alike, but the same nodes should get the same plan, and so the same
    order of additions.
    """
    measured = [node for node in nodes if node.bandwidth]
    if not measured:
        return LinkModel()
    latency = max(node.latency for node in measured) + SOFTWARE_SECONDS
    bandwidth = min(node.bandwidth for node in measured)
    return LinkModel(latency=_rounded(latency), seconds_per_byte=1 / _rounded(bandwidth))


def _shared_cores(nodes: Collection[NodeInfo]) -> int:
    """Return the cores of the machine that all nodes are on; 0 where they are on several."""
    hosts = {parse_address(node.data_address)[0] for node in nodes}
    if not len(hosts) == 1 < len(nodes) <= MOST_ON_A_MACHINE:
        return 0
    return min((node.cores for node in nodes if node.cores), default=ASSUMED_CORES)


def _rounded(value: float) -> float:
    return float(2.0 ** round(log2(value)))


def members_of(seats: Mapping[int, RankSeat]) -> tuple[Member, ...]:
    """Return the nodes that hold the seats, sorted by their lowest rank."""
    ranks_of: dict[str, list[int]] = {}
    nodes: dict[str, NodeInfo] = {}
    for rank, seat in sorted(seats.items()):
        ranks_of.setdefault(seat.node.node, []).append(rank)
        nodes[seat.node.node] = seat.node
    return tuple(nodes[name].member(ranks) for name, ranks in ranks_of.items())
