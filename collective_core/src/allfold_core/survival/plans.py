"""From the plan of a group's opening to the members of its later epochs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.schedules.schedule import ring_order, tree_order
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Call, may_shrink
from allfold_core.survival.term_record import TermRecord, Voter
from allfold_core.topology import AS_OPENED, Member


@dataclass(frozen=True)
class GroupPolicy:
    """The policy of a group about losses and newcomers.

    Attributes:
        group: its name.
        options: those of the group.
    """

    group: str
    options: GroupOptions

    def is_too_small(self, epoch: Epoch) -> bool:
        """Return True if too few ranks are left to run any op."""
        return len(epoch.seats) < self.options.min_world

    def waits_in_ops(self, epoch: Epoch) -> bool:
        """Return True if ops wait for others to join: too few are left.

        If others may only join at boundaries, ops fail instead, and the ranks wait at a boundary.
        """
        return self.options.is_elastic and not self.options.at_commits and self.is_too_small(epoch)

    def is_stale(self, call: Call, epoch: Epoch) -> bool:
        """Return True if a call relies on another membership than that of an epoch.

        Usually on an earlier one; on a later one if the op had begun before a member was lost, and
        goes on with that member's input. An op whose arguments do not depend on the membership is
        never stale.
        """
        return call.view != epoch.ordinal and not (self.options.shrinks and may_shrink(call.kind))


def first_term(plan: Plan) -> Term:
    """The term with which a group is opened: all nodes of its plan, the leader first."""
    nodes = tuple(member.node for member in plan.members)
    return Term(plan.opening, plan.generation, nodes, (plan.opening,) * len(nodes))


def first_record(plan: Plan) -> TermRecord:
    """The record of the group's first term: every node is a voter."""
    return TermRecord(
        opening=plan.opening,
        term=first_term(plan),
        voters={member.node: Voter.of(member) for member in plan.members},
        seats=tuple(Seat(seat.session, seat.node) for seat in first_epoch(plan).seats),
        generation=plan.generation,
        plan=without_ranks(plan),
    )


def without_ranks(plan: Plan) -> Plan:
    """Return a plan with its parameters alone: how many ranks it had, but not who and where."""
    return replace(plan, members=(), tree_order=(), sessions=(), layout=AS_OPENED)


def joining_plan(record: TermRecord) -> Plan:
    """Return the plan of a node that joins a running group: the nodes of its term, and no ranks.

    Args:
        record: of the term that admits the node; ``ValueError`` where it has no plan.
    """
    if record.plan is None:
        raise ValueError("the record of a group that takes in ranks has no plan")
    members = tuple(record.voters[node].member(node) for node in record.term.voters)
    return replace(record.plan, world_size=0, members=members)


def first_epoch(plan: Plan) -> Epoch:
    """The epoch with which a group is opened: all ranks of its plan."""
    nodes = (plan.members[plan.index_of_rank(rank)].node for rank in range(plan.world_size))
    seats = tuple(map(Seat, plan.sessions, nodes, range(plan.world_size)))
    stamp = Stamp(plan.opening, 0, plan.generation)
    return Epoch(stamp, 0, seats, seated=plan.world_size)


def plan_of(opening: Plan, epoch: Epoch, members: Mapping[str, Member]) -> Plan:
    """Return the plan of a later epoch: in the order of its layout, without nodes without ranks.

    Args:
        opening: the plan with which the group was opened, or joined by this node.
        members: all nodes of the group by name.
    """
    ranks: dict[str, list[int]] = {}
    for rank, seat in enumerate(epoch.seats):
        ranks.setdefault(seat.node, []).append(rank)
    present = [replace(members[node], ranks=tuple(held)) for node, held in ranks.items()]
    nodes = {member.node: member for member in present}
    layout = epoch.layout
    ring = _in_order([member.node for member in ring_order(present)], layout.ring)
    ordered = [nodes[node] for node in ring]
    tree = [ring[index] for index in tree_order(ordered)]
    return replace(
        opening,
        world_size=len(epoch.seats),
        members=tuple(ordered),
        tree_order=tuple(map(ring.index, _in_order(tree, layout.tree))),
        sessions=tuple(seat.session for seat in epoch.seats),
        layout=layout,
    )


def _in_order(nodes: Sequence[str], order: Sequence[str]) -> list[str]:
    """The nodes as an order has them; one that it does not name comes behind, where it was."""
    places = {node: place for place, node in enumerate(order)}
    return sorted(nodes, key=lambda node: places.get(node, len(places)))
