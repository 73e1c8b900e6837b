"""One membership generation of a group on this node: its plan, edges, compiled ops and members."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from allfold_agent.compilation.op_spec import OpSpecs
from allfold_agent.edges.edge_request import Lane
from allfold_agent.edges.edges import DialFrom, Edges
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.execution.executor import Executor
from allfold_agent.execution.op import Op
from allfold_agent.execution.runner import OpOutcomes, Runner
from allfold_agent.gpu.pins import Pins
from allfold_agent.groups.departures import Departures
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.outcomes import Outcomes
from allfold_agent.p2p.engine import P2PEngine
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import AllfoldError, InvalidArgument, PeerLost
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.verdict import LEFT, name_ranks
from allfold_core.wire.frames import FrameHeader

log = logging.getLogger(__name__)

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources that all groups of a node share.

    Attributes:
        node: its name.
        dial: opens an edge: ``dial(plan, source, destination, lane)(from_frame)``.
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
        table: the ops of the group.
        outcomes: ends ops.
        ops: told of the outcome of ops that run.
        suspect: has an op judged: ``suspect(seq, reason)``.
        report_lost: announces that a member is lost.

    Attributes:
        number: of the epoch; grows with every change of the members.
        me: this node's index.
        ranks: the numbers of the ranks of this node.
        left: the last op of every rank that has left the group in order.
        broken: why no further op of this epoch can be done.
    """

    def __init__(
        self,
        plan: Plan,
        ordinal: int,
        first_seq: int,
        resources: NodeResources,
        *,
        table: OpTable,
        outcomes: Outcomes,
        ops: OpOutcomes,
        suspect: Callable[[int, str], None],
        report_lost: Callable[[Epoch, PeerLost], None],
    ) -> None:
        self.plan = plan
        self.number = plan.epoch
        self.ordinal = ordinal
        self.first_seq = first_seq
        self.me = plan.index_of_node(resources.node)
        self.ranks = plan.members[self.me].ranks
        self._departures = Departures(plan.group, first_seq)
        self.left = self._departures.last
        self.broken: PeerLost | None = None
        self._numbers: dict[str, int] = {}
        self._table = table
        self._outcomes = outcomes
        self._suspect = suspect
        self._report_lost = report_lost
        self._closing = False
        self._closed = False
        workers, buffers, reactor = resources.workers, resources.buffers, resources.reactor
        self.specs = OpSpecs(plan, self.me)
        self.edges = Edges(plan, self.me, resources.dial, self, reactor)
        self.p2p = P2PEngine(
            plan, self.me, resources.dial, workers, buffers, self.edge_lost, reactor
        )
        self.runner = Runner(plan, self.me, workers, buffers, self.edges, ops, resources.pins)

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
        self.edges.resume_all()
        self.p2p.break_(broken)

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
        self.edges.resume_all()
        self.p2p.rank_left(rank, how)

    @property
    def is_empty(self) -> bool:
        """Return True when every rank of this node has left or is dead."""
        return all(rank in self.left for rank in self.ranks)

    # Edges

    def serve_edge(self, destination: int, lane: Lane) -> OutEdge:
        """The out-edge that another node opens; ``PeerLost`` if the epoch is closed here."""
        with self._table.lock:
            if self._closed:
                raise PeerLost(f"group '{self.group}' epoch {self.number} is closed on this node")
            if lane is Lane.PAIRS:
                return self.p2p.serve_edge(destination)
            return self.edges.out(destination)

    def sink_for(self, source: int, header: FrameHeader, seconds: float) -> Executor | None:
        """The executor of a frame's op, ``None`` if the op has failed.

        Raises:
            TimeoutError: the local ranks have not all called it within ``seconds``.
        """
        deadline = monotonic() + seconds
        with self._table.lock:
            while True:
                if self._closed or self._outcomes.of(header.seq) or self.failure(header.seq):
                    return None
                op = self._running(header.seq)
                if op is not None:
                    break
                left = deadline - monotonic()
                if left <= 0 or not self._table.changed.wait(timeout=left):
                    raise TimeoutError
        if op.digest(self.plan.members[source].ranks, self.ranks) != header.fingerprint:
            self._suspect(header.seq, "mismatch")
            return None
        return op.executor

    def _running(self, seq: int) -> Op | None:
        op = self._table.in_flight.get(seq)
        return op if op is not None and op.running and op.epoch == self.number else None

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        """An in-edge is gone for good: so is its node, unless its ranks have left in order."""
        member = self.plan.members[source]
        with self._table.lock:
            if self._closing or all(rank in self.left for rank in member.ranks):
                return
        log.warning("group '%s' has lost node %s: %s", self.group, member.node, error.message)
        # Every survivor finds this out by itself, so the message has only what is the same for all.
        self._report_lost(
            self,
            PeerLost(
                f"node {member.node} of group '{self.group}' with {name_ranks(member.ranks)} "
                "cannot be reached any more",
                node=member.node,
                ranks=list(member.ranks),
                reason=error.message,
            ),
        )

    def incoherent(self, seq: int, error: AllfoldError) -> None:
        """A frame did not fit its op: find out whose fault it is."""
        log.error("%s", error)
        self._suspect(seq, f"incoherent: {error.message}")

    def close(self, linger: float) -> None:
        """End the epoch on this node, after the peers have got what they are still owed.

        Args:
            linger: seconds that they have for it.
        """
        with self._table.lock:
            if self._closing:
                return
            self._closing = True
        self.edges.finish(monotonic() + linger)
        self.p2p.finish(monotonic() + linger)
        with self._table.lock:
            self._closed = True
            self._table.changed.notify_all()
        self.edges.close()
        self.p2p.close()
