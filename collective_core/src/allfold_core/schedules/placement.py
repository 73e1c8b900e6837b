"""The order of the nodes in rings and trees, in which nodes near each other are neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from allfold_core.topology import Member


def ring_order(members: Sequence[Member]) -> tuple[Member, ...]:
    """The members by zone, device type and name, so that few edges of a ring leave a zone.

    The order does not depend on that of ``members``.
    """
    return tuple(sorted(members, key=lambda member: (*_place(member), member.node)))


def tree_order(members: Sequence[Member]) -> tuple[int, ...]:
    """Indices of ``members`` from the root of a tree on, for ``Plan.tree_order``.

    The nodes of one zone are next to each other, and in it those of one device type; the compiler
    lays trees of any arity out so that neighbours in this order share a subtree. A group of n
    nodes then hangs on the rest by few edges, instead of by up to n. The largest zone comes first,
    and in each zone the most frequent device type, so the root is among its like, and large groups
    fill whole subtrees; names break ties, so the order of ``members`` does not matter.
    """
    zones = Counter(member.zone for member in members)
    places = Counter(_place(member) for member in members)

    def rank(index: int) -> tuple[int, str, int, str, str]:
        zone, device_type = place = _place(members[index])
        return -zones[zone], zone, -places[place], device_type, members[index].node

    return tuple(sorted(range(len(members)), key=rank))


def _place(member: Member) -> tuple[str, str]:
    return member.zone, member.device_type
