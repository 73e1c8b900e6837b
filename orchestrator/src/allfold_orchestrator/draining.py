"""Draining a node: it takes no more ranks, and those that it has leave where they can."""

from __future__ import annotations

import logging

from allfold_core.errors import LocalError
from allfold_core.survival.term_record import Life
from allfold_orchestrator import bodies
from allfold_orchestrator.store.failures import Refusal
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.views import group_view

log = logging.getLogger(__name__)


async def drain(store: Store, node: str) -> bodies.Draining:
    """Tell a node to drain, and return how far it is; to be repeated until no rank is left.

    Nothing is kept of it in the store: the node says with each BEAT whether it drains. Until it has
    said so it is told again, since a message to the replica that it is linked to may be lost.

    Raises:
        Refusal: 404, there is no such node.
    """
    known = await store.nodes.statuses([node])
    if not known or known[0].lease_expiry is None:
        raise Refusal(404, LocalError(f"there is no node {node}", node=node))
    (status,) = known
    life = (node, status.record.info.incarnation)
    if not status.draining:
        log.info("node is told to drain", extra={"node": node})
        await store.nodes.ask_to_drain(*life)
    return bodies.Draining(node=node, draining=status.draining, ranks=await _ranks_on(store, life))


async def _ranks_on(store: Store, life: Life) -> list[bodies.RankOnNode]:
    """Return the ranks that have a seat on a node, in the order of their groups."""
    found = []
    for group in await store.nodes.groups_of(*life):
        view = group_view(await store.groups.read(group), store.clock.now())
        numbers = {each.rank for each in (*view.present, *view.waiting) if each.node == life[0]}
        can_leave = view.max_world is not None
        found += [
            bodies.RankOnNode(group=group, rank=number, can_leave=can_leave)
            for number in sorted(numbers)
        ]
    return found
