"""One membership generation of a group on this node: its plan, compiled ops and members."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_agent.edges.edges import DialFrom, Edges
from allfold_agent.execution.runner import OpOutcomes, Runner
from allfold_agent.gpu.pins import Pins
from allfold_agent.groups.departures import Departures
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.outcomes import Outcomes
from allfold_agent.p2p.engine import P2PEngine
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import InvalidArgument, PeerLost
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.survival.records import Stamp
from allfold_core.verdict import LEFT, name_ranks
from allfold_core.wire.local_wire import OpMessage, check_timeout

log = logging.getLogger(__name__)

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources that all groups of a node share.

    Attributes:
        node: its name.
        dial: opens an edge: ``dial(request, address)(from_frame)``.
        reactor: reads the short frames of other nodes.
        pins: memory of the host that GPUs reach.
    """

    node: str
    workers: WorkerPool
    buffers: BufferPool
    dial: DialFrom
    reactor: Reactor
    pins: Pins


class Epoch:
    """The members of a group during one epoch, and all that follows from its plan.

    Every rank number and node index here is one of this epoch. What lasts longer is a session: one
    rank's registration with the group.

    Args:
        ordinal: how many epochs the group had before: the number of this one for its ranks.
        first_seq: the number of the first op that begins in this epoch.
        numbers: the seat number of each session: the number of its rank in the first epoch.
        table: the ops of the group.
        outcomes: ends ops.
        ops: told of the outcome of ops that run.
        edges: of the group, to and from the other nodes.
        p2p: the sends and receives of the group.

    Attributes:
        number: of the epoch; grows with every change of the members.
        stamp: tells the frames of this epoch from those of others; the newer one's is greater.
        me: this node's index.
        ranks: the numbers of the ranks of this node.
        seats: by rank, its seat number, by which messages know it.
        left: the last op of every rank that has left the group in order.
        broken: why no further op of this epoch can be done.
        superseded: whether the group has a newer epoch.
    """

    def __init__(
        self,
        plan: Plan,
        ordinal: int,
        first_seq: int,
        resources: NodeResources,
        *,
        numbers: Mapping[str, int],
        table: OpTable,
        outcomes: Outcomes,
        ops: OpOutcomes,
        edges: Edges,
        p2p: P2PEngine,
    ) -> None:
        self.plan = plan
        self.number = plan.epoch
        self.ordinal = ordinal
        self.stamp = Stamp(plan.epoch, 0, plan.generation).pack()
        self.first_seq = first_seq
        self.me = plan.index_of_node(resources.node)
        self.ranks = plan.members[self.me].ranks
        sessions = dict(enumerate(plan.sessions))
        self.seats = tuple(
            numbers.get(sessions.get(rank, ""), rank) for rank in range(plan.world_size)
        )
        self._departures = Departures(plan.group, first_seq)
        self.left = self._departures.last
        self.broken: PeerLost | None = None
        self.superseded = False
        self._numbers: dict[str, int] = {}
        self._table = table
        self._outcomes = outcomes
        self._edges = edges
        self._p2p = p2p
        self.specs = OpSpecs(plan, self.me)
        self.runner = Runner(
            plan,
            self.me,
            self.stamp,
            resources.workers,
            resources.buffers,
            edges,
            ops,
            resources.pins,
        )

    @property
    def group(self) -> str:
        """The group's name."""
        return self.plan.group

    # Local ranks

    def seat(self, session: str, rank: int) -> None:
        """Bind a local session to its rank number.

        Raises:
            InvalidArgument: the plan has no such rank on this node.
        """
        if rank not in self.ranks:
            raise InvalidArgument(
                f"rank {rank} is not on this node in epoch {self.number} of group '{self.group}': "
                f"it has {name_ranks(self.ranks)}"
            )
        self._numbers[session] = rank

    def has(self, session: str) -> bool:
        """Return True if a local session has a rank number here."""
        return session in self._numbers

    def rank_of(self, session: str) -> int:
        """The rank number of a local session; ``InvalidArgument`` if it has none."""
        rank = self._numbers.get(session)
        if rank is None:
            raise InvalidArgument(
                f"the caller is not a rank of epoch {self.number} of group '{self.group}'"
            )
        return rank

    def sessions(self) -> dict[int, str]:
        """The session of each rank of this node that is seated."""
        return {rank: session for session, rank in list(self._numbers.items())}

    def view(self, session: str) -> dict[str, Any]:
        """The epoch as a rank sees it: its numbers, and the size of the group."""
        return {
            "epoch": self.ordinal,
            "rank": self.rank_of(session),
            "world_size": self.plan.world_size,
            "nodes": len(self.plan.members),
        }

    def explain(self, kind: str, nbytes: int) -> str:
        """The strategy that is chosen for an op of a size; ``InvalidArgument`` for no kind."""
        found = next((each for each in Kind if each.label == kind), None)
        if found is None:
            known = ", ".join(each.label for each in Kind)
            raise InvalidArgument(f"{kind!r} is no collective; there are {known}")
        return LOCAL if len(self.plan.members) == 1 else choose(found, self.plan, nbytes)

    def spec_of(self, message: OpMessage) -> OpSpec:
        """The spec of a local rank's call; ``ValueError`` says what is wrong with it."""
        check_timeout(message.timeout)
        spec = self.specs.of(message.fingerprint)
        itemsize = spec.fingerprint.dtype.itemsize
        if message.source.offset % itemsize or message.target.offset % itemsize:
            raise InvalidArgument(
                f"a {spec.fingerprint.dtype.label} cannot lie at byte "
                f"{message.source.offset} or {message.target.offset}"
            )
        return spec

    # Members

    def failure(self, seq: int) -> PeerLost | None:
        """The error of an op that the members left cannot do; ``None`` if they may."""
        return self.broken or self._departures.error(seq)

    def break_(self, error: PeerLost) -> None:
        """A member is lost: fail what is in flight and every later op of this epoch."""
        with self._table.lock:
            if self.broken is None:
                self.broken = error
                log.warning("group '%s' epoch %d is broken: %s", self.group, self.number, error)
            broken = self.broken
            for op in self._table.of_epoch(self.number):
                self._outcomes.fail(op, broken)
            self._table.changed.notify_all()
        self._edges.resume_all()
        if not self.superseded:  # else its members may be those that are lost
            self._p2p.break_(broken)

    def rank_left(self, rank: int, last_seq: int, how: str = LEFT) -> None:
        """A rank has left in order after an op: later ones, which would wait for it, fail.

        Args:
            how: a phrase to follow its name.
        """
        with self._table.lock:
            self._departures.add(rank, last_seq, how)
            for op in self._table.of_epoch(self.number):
                if error := self.failure(op.seq):
                    self._outcomes.fail(op, error)
            self._table.changed.notify_all()
        self._edges.resume_all()
        self._p2p.rank_left(self.seats[rank], how)

    def awaits(self, node: str) -> bool:
        """Return True if a node has ranks in this epoch that have not left in order."""
        return any(rank not in self.left for rank in self.plan.ranks_on(node))

    def node_lost(self, node: str, reason: str) -> PeerLost:
        """Return the error of the loss of a node.

        Every survivor finds this out by itself, so the message has only what is the same for all.
        """
        ranks = self.plan.ranks_on(node)
        return PeerLost(
            f"node {node} of group '{self.group}' with {name_ranks(ranks)} cannot be reached any "
            "more",
            node=node,
            ranks=list(ranks),
            reason=reason,
        )

    @property
    def is_empty(self) -> bool:
        """Return True when every rank of this node has left or is dead."""
        return all(rank in self.left for rank in self.ranks)
