"""The use cases of the orchestrator, free of HTTP: membership decides, the store applies."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError
from allfold_core.plan import Plan
from allfold_core.schedules.registry import parse_overrides
from allfold_core.survival.term_record import Life, TermRecord
from allfold_orchestrator import bodies
from allfold_orchestrator.draining import drain
from allfold_orchestrator.incidents import IncidentLog
from allfold_orchestrator.membership.group_state import (
    Event,
    GroupParams,
    GroupState,
    Instruction,
    Join,
    Leave,
    LinkSettings,
    NodeHolds,
    NodeInfo,
    NodesLost,
    PlanReady,
    RanksDeparted,
    RankSeat,
    Reason,
    Rejected,
    Seated,
    SeatsFreed,
)
from allfold_orchestrator.membership.joining import takes_in
from allfold_orchestrator.membership.nodes import (
    REMOVED,
    SIGNED_OFF,
    NodeRecord,
    RecentNodes,
    WantedNames,
)
from allfold_orchestrator.plan_waits import await_plan
from allfold_orchestrator.store.failures import Refusal
from allfold_orchestrator.store.groups import EventOf
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.views import group_view, node_view, unreadable_group

log = logging.getLogger(__name__)

_RECENT_SECONDS = 0.5

_DEPARTURES = {
    Reason.FINISHED: "ranks left the group",
    Reason.WITHDRAWN: "ranks withdrew: they do not wait for the group any more",
    Reason.LOST: "ranks lost: they ended without leaving the group",
    Reason.NODE_LOST: "ranks lost with their node",
}


class Orchestrator:
    """The use cases of one replica of the control plane."""

    def __init__(self, store: Store, links: LinkSettings) -> None:
        self._store = store
        self._links = links
        self._recent_nodes = RecentNodes()
        self.wanted = WantedNames()
        self.incidents = IncidentLog(store.incidents)

    # Nodes

    async def register_node(self, request: bodies.RegisterNode, token: str = "") -> list[str]:
        """Register a node, after the seats of its earlier incarnations were freed.

        ``token`` is the name of the one that it brought, for which groups of its ranks count.
        Returns the data addresses of some other nodes that registered lately.
        """
        record = NodeRecord(_info(request), self._store.clock.now(), token=token)
        await self._clear_up_after(request.node)
        outcome = await self._store.nodes.register(record)
        if isinstance(outcome, AllfoldError):
            raise outcome
        if outcome is not None:
            log.warning("node restarted, its earlier ranks are lost", extra={"node": outcome.node})
            await self.clear_up([(outcome.node, outcome.incarnation)])
        for group, opening in request.holds.items():
            await self._apply(group, NodeHolds(request.node, opening))
        log.info("node registered", extra={"node": request.node, "at": request.data_address})
        return self._recent_nodes.add(request.node, request.data_address)

    async def remove_node(self, node: str, incarnation: str) -> None:
        """Remove a node that leaves by itself; seats that it still has are lost. Twice is fine.

        Raises:
            Refusal: 403, the node lives in another incarnation.
        """
        record = await self._store.nodes.get(node)
        if record is not None and not record.may_be_ended_by(incarnation):
            raise Refusal(403, _another_incarnation(node))
        await self._end(node, incarnation, SIGNED_OFF)

    async def force_node_out(self, node: str) -> None:
        """Remove a node whatever its incarnation.

        Raises:
            Refusal: 404, there is no such node.
        """
        record = await self._store.nodes.get(node)
        if record is None or record.lost_at is not None:
            raise Refusal(404, LocalError(f"there is no node {node}", node=node))
        await self._end(node, record.info.incarnation, REMOVED)

    async def drain_node(self, node: str) -> bodies.Draining:
        """Tell a node to drain; see :func:`allfold_orchestrator.draining.drain`."""
        return await drain(self._store, node)

    async def _end(self, node: str, incarnation: str, how: str) -> None:
        if await self._store.nodes.evict(node, incarnation, how):
            log.info("node is gone: %s", how, extra={"node": node})
        await self.clear_up([(node, incarnation)])
        await self.incidents.reporter_left(node)

    async def nodes(self, after: str, limit: int) -> bodies.NodeList:
        """Return the next ``limit`` nodes behind the name ``after``."""
        now, lease = self._store.clock.now(), self._store.nodes.lease_seconds
        names, more = _page(await self._store.nodes.names(), after, limit)
        statuses = await self._store.nodes.statuses(names)
        views = [node_view(status, now=now, lease_seconds=lease) for status in statuses]
        return bodies.NodeList(nodes=views, next=names[-1] if more else None)

    async def clear_up(
        self,
        lives: Collection[Life],
        groups: Iterable[str] = (),
        known: Mapping[Life, str] | None = None,
    ) -> None:
        """Free all seats of lives that are over, together. May run twice, also on two replicas.

        Args:
            groups: that they are in, besides those in which they took a seat.
            known: how their ends are known, where the store has lost the records of their nodes.
        """
        if not lives:
            return
        nodes = self._store.nodes
        for node, _ in lives:
            self._recent_nodes.remove(node)
        ends, store, seated = await asyncio.gather(
            nodes.ends_of(lives, known),
            self._store.lives.read(),
            asyncio.gather(*(nodes.groups_of(*life) for life in lives)),
        )
        lost = NodesLost(ends, store, self._store.clock.now() + nodes.lease_seconds)
        # All at once: the others of each group wait for it.
        await asyncio.gather(*(self._lose(group, lost) for group in {*groups}.union(*seated)))
        for life in lives:
            await nodes.forget_eviction(*life)

    async def _lose(self, group: str, lost: NodesLost) -> None:
        try:
            await self._apply(group, lost)
        except ServiceError as error:
            if not error.details.get("unreadable"):
                raise
            # One group that cannot be read must not keep the others waiting for a lost rank.
            log.error("%s", error.message, extra={"group": group, "nodes": len(lost.lives)})

    async def _clear_up_after(self, node: str) -> None:
        """Finish the clearing up of this node that another replica began before it died."""
        unfinished = await self._store.nodes.unfinished_evictions(node)
        await self.clear_up([(node, incarnation) for incarnation in unfinished])

    # Ranks

    async def join(self, group: str, request: bodies.JoinGroup) -> Seated:
        """Give a rank its seat.

        Raises:
            Refusal: 404, the node is not registered in this incarnation.
            AllfoldError: the group refuses the rank.
        """
        strategies = _canonical(request.strategies)
        params = GroupParams.from_dict({**dict(request), "strategies": strategies})
        store, now = await self._store.lives.present(), self._store.clock.now()

        def join(node: NodeRecord) -> Join:
            seat = RankSeat(node.info, request.session)
            return Join(request.rank, seat, params, self._links, store, now, node.token)

        try:
            await self._check_is_heard(group, now)
            instructions = await self._apply(group, join, (request.node, request.incarnation))
        except ServiceError:
            self.wanted.refused(group, now)
            raise
        for instruction in instructions or ():
            if isinstance(instruction, Seated):
                if not instruction.ready:
                    self.wanted.waits(group)
                return instruction
        raise _unknown_node(request.node)

    async def _check_is_heard(self, group: str, now: float) -> None:
        """Raise an error if a rank would join nodes that are silent, and that nobody can evict.

        So it is where the record was lost, and not all of its nodes have registered since.
        """
        state = await self._store.groups.read(group, _RECENT_SECONDS)
        if state.term is None or state.term.recall is None or not takes_in(state):
            return
        leases = await self._store.nodes.leases([*state.term.lives])
        if all(expiry is None or expiry < now for expiry in leases.values()):
            raise ServiceError(
                f"group {group} takes in nobody at the moment: none of its nodes is heard, and the "
                "orchestrator has lost its record of it; it is over if this stays so",
                group=group,
            )

    async def leave(self, group: str, leave: Leave) -> None:
        """Take a rank's seat back."""
        await self._apply(group, replace(leave, store=await self._store.lives.present()))

    async def plan(
        self, group: str, opening: int, session: str, wait: float, *, max_age: float = 0.0
    ) -> Plan | TermRecord | GroupState:
        """Return the plan of the caller's opening; see :func:`~.plan_waits.await_plan`."""
        return await await_plan(self._store, group, opening, session, wait, max_age=max_age)

    # Groups

    async def groups(self, after: str, limit: int) -> bodies.GroupList:
        """Return the next ``limit`` groups with a record behind the name ``after``."""
        views = []
        names, more = _page(await self._store.groups.names(), after, limit)
        for name in names:
            try:
                state = await self._store.groups.read(name)
            except ServiceError as error:
                if not error.details.get("unreadable"):
                    raise
                log.error("%s", error.message, extra={"group": name})
                views.append(unreadable_group(name))
                continue
            if state.forming is None and state.current is None and state.term is None:
                await self._store.groups.prune(name)
            else:
                views.append(group_view(state, self._store.clock.now()))
        return bodies.GroupList(groups=views, next=names[-1] if more else None)

    async def group(self, group: str) -> bodies.GroupView:
        """Return one group; raises ``Refusal`` (404) if there is none of this name."""
        state = await self._store.groups.read(group)
        if state == GroupState(group):
            raise Refusal(404, LocalError(f"there is no group {group}", group=group))
        return group_view(state, self._store.clock.now())

    async def _apply(
        self, group: str, event: Event | EventOf, life: Life | None = None
    ) -> tuple[Instruction, ...] | None:
        instructions = await self._store.groups.submit(group, event, life)
        for instruction in instructions or ():
            if isinstance(instruction, Rejected):
                raise instruction.error
            self._announce(group, instruction)
        return instructions

    def _announce(self, group: str, instruction: Instruction) -> None:
        """Wake this replica's waiters without a round trip to the store, and log the change."""
        match instruction:
            case PlanReady(plan):
                nodes = len(plan.members)
                facts = {"group": group, "epoch": plan.opening, "nodes": nodes}
                log.info("group complete", extra={**facts, "ranks": plan.world_size})
            case SeatsFreed(opening, ranks, reason) | RanksDeparted(opening, ranks, reason):
                level = logging.WARNING if reason.is_loss else logging.INFO
                facts = {"group": group, "epoch": opening, "ranks": list(ranks)}
                log.log(level, "%s", _DEPARTURES[reason], extra=facts)
            case _:
                return
        self._store.notifications.notify(group)


def _page(names: Sequence[str], after: str, limit: int) -> tuple[Sequence[str], bool]:
    """Return up to ``limit`` of the sorted ``names`` behind ``after``; and True if more follow."""
    begin = bisect_right(names, after)
    return names[begin : begin + limit], begin + limit < len(names)


def _canonical(strategies: dict[str, str]) -> dict[str, str]:
    """Return the overrides in one spelling, so that ``tree`` and ``tree(2)`` agree."""
    canonical: dict[str, str] = {}
    for kind, strategy in strategies.items():
        try:
            canonical |= parse_overrides(f"{kind}={strategy}")
        except InvalidArgument as error:
            error.details.setdefault("field", f"strategies.{kind}")
            raise
    return dict(sorted(canonical.items()))


def _info(request: bodies.RegisterNode) -> NodeInfo:
    link = request.link.model_dump() if request.link else {}
    return NodeInfo(**request.model_dump(exclude={"link", "holds"}), **link)


def _unknown_node(node: str) -> Refusal:
    error = LocalError(
        f"node {node} is not registered in this incarnation: its lease ended, another agent has "
        "its name, or the orchestrator lost its memory; the agent registers again",
        node=node,
    )
    return Refusal(404, error)


def _another_incarnation(node: str) -> LocalError:
    return LocalError(
        f"node {node} was registered in another incarnation, and only the node itself knows it; "
        "an operator removes a node with force=true and the admin token",
        node=node,
    )
