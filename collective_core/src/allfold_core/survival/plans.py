"""From the plan of a group's opening to the members of its later epochs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from allfold_core.plan import Plan
from allfold_core.survival.decision import GroupPolicy
from allfold_core.survival.records import Epoch, Seat, Stamp, Term


def first_term(plan: Plan) -> Term:
    """The term with which a group is opened: all nodes of its plan, the leader first."""
    nodes = tuple(member.node for member in plan.members)
    return Term(plan.epoch, plan.generation, nodes, (plan.epoch,) * len(nodes))


def first_record(plan: Plan) -> dict[str, Any]:
    """The record of the group's first term, as JSON: what agents register until a later term."""
    return {
        "epoch": plan.epoch,
        "term": asdict(first_term(plan)),
        "voters": {
            member.node: {
                "incarnation": member.incarnation,
                "data_address": member.data_address,
                "control_url": member.control_url,
            }
            for member in plan.members
        },
        "seats": [list(seat) for seat in first_epoch(plan).seats],
        "generation": plan.generation,
        "recall": None,
    }


def first_epoch(plan: Plan) -> Epoch:
    """The epoch with which a group is opened: all ranks of its plan."""
    nodes = (plan.members[plan.index_of_rank(rank)].node for rank in range(plan.world_size))
    seats = tuple(map(Seat, plan.sessions, nodes))
    return Epoch(Stamp(plan.epoch, 0, plan.generation), 0, seats)


def policy_of(plan: Plan) -> GroupPolicy:
    """The policy of a group about losses, as its plan has it."""
    return GroupPolicy(plan.group, plan.on_loss == "shrink", plan.min_world)


def plan_of(opening: Plan, epoch: Epoch) -> Plan:
    """The plan of a later epoch: in the order of its layout, without nodes that have no rank.

    Args:
        opening: the plan with which the group was opened.
    """
    ranks: dict[str, list[int]] = {}
    for rank, seat in enumerate(epoch.seats):
        ranks.setdefault(seat.node, []).append(rank)
    layout, opened = epoch.layout, [member.node for member in opening.members]
    ring = _in_order([node for node in opened if node in ranks], layout.ring)
    tree = [opened[index] for index in opening.tree_order if opened[index] in ranks]
    return replace(
        opening,
        world_size=len(epoch.seats),
        members=tuple(
            replace(opening.members[opening.index_of_node(node)], ranks=tuple(ranks[node]))
            for node in ring
        ),
        tree_order=tuple(map(ring.index, _in_order(tree, layout.tree))),
        sessions=tuple(seat.session for seat in epoch.seats),
        layout=layout,
    )


def _in_order(nodes: Sequence[str], order: Sequence[str]) -> list[str]:
    """The nodes as an order has them; one that it does not name comes behind, where it was."""
    places = {node: place for place, node in enumerate(order)}
    return sorted(nodes, key=lambda node: places.get(node, len(places)))
