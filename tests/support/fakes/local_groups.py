"""The groups of several nodes in one process, joined by socket pairs that may break.

For tests that look at what agents do with each other, without orchestrator, processes or ports.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Literal

from allfold_agent.edges.opening import Dial, EdgeRequest
from allfold_agent.gpu.gpus import Pins
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.results import ResultShares
from allfold_agent.local.memberships import PROCESS_ENDED
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_agent.traffic.pacer import Pacer
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.survival.judge import packed
from allfold_core.survival.records import Term
from allfold_core.survival.reports import Doubt, Reason
from allfold_core.topology import LinkModel, Member
from tests.support.fakes.counted_pool import CountedPool
from tests.support.fakes.damaged_wire import DamagedWire
from tests.support.fakes.local_links import LocalLinks, LocalNeighbours, Notes
from tests.support.fakes.local_rank import SECONDS, LocalRank, session_of
from tests.support.fakes.relays import Dam, relay
from tests.support.waiting import wait_until

# In bytes; long enough for the largest frame, which is what must get through at once.
LONGEST_LIFE = 160_000
# A test has seen what it waits for before it closes its groups: an end that is gone owes nothing.
LINGER_SECONDS = 0.1


def make_plan(
    ranks: Sequence[Sequence[int]],
    epoch: int = 3,
    *,
    on_loss: Literal["raise", "shrink"] = "raise",
    min_world: int = 1,
) -> Plan:
    """A group whose node i holds the given ranks; the address of a node is its name."""
    world_size = sum(map(len, ranks))
    members = tuple(
        Member(f"node{index}", "", f"node{index}", tuple(held), incarnation=f"life {index}")
        for index, held in enumerate(ranks)
    )
    return Plan(
        group="test",
        opening=epoch,
        world_size=world_size,
        members=members,
        tree_order=tuple(range(len(ranks))),
        links=LinkModel(),
        options=GroupOptions(SECONDS, on_loss=on_loss, min_world=min_world),
        sessions=tuple(map(session_of, range(world_size))),
    )


class LocalGroups:
    """One group per node.

    Attributes:
        links: between the nodes, for what they agree upon.
        notes: what the groups have said.
        reactors: by node.

    Args:
        cuts: from it, after how many bytes each connection breaks; never without it.
        dam: stops what one node sends another on its way.
        life: after so many bytes, at the most, connections break.
        wire: damages what it carries; without it connections are Unix sockets.
        plan: with which the group is opened, if not :func:`make_plan` of the ranks.
        retentions: by node, the bound on what it keeps.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        cuts: random.Random | None = None,
        dam: Dam | None = None,
        life: int = LONGEST_LIFE,
        wire: DamagedWire | None = None,
        plan: Plan | None = None,
        retentions: Mapping[str, ResultShares] | None = None,
    ) -> None:
        plan = plan or make_plan(ranks)
        self.notes = Notes()
        self.links = LocalLinks(self.notes)
        self.buffers = CountedPool()
        self.connections = 0
        self.refused: set[int] = set()
        self._cuts = cuts
        self._dam = dam
        self._life = life
        self._wire = wire
        self._lock = Lock()
        self._relays: list[Thread] = []
        self._nodes = [member.node for member in plan.members]
        self._sockets: dict[int, list[socket.socket]] = {node: [] for node in range(len(ranks))}
        self._workers = WorkerPool(2)
        self.reactors = [Reactor(f"test-{member.node}") for member in plan.members]
        self._edge_reactors = [Reactor(f"test-edges-{member.node}") for member in plan.members]
        for reactor in [*self.reactors, *self._edge_reactors]:
            reactor.start()
        self.groups = [
            NodeGroup(
                plan,
                NodeResources(
                    member.node,
                    workers=self._workers,
                    buffers=self.buffers,
                    dial=self._dial,
                    reactor=reactor,
                    edge_reactor=edge_reactor,
                    pins=Pins(),
                    fetch=self.links.fetch,
                    retention=retentions[member.node] if retentions else ResultShares(),
                    pacer=Pacer(member.node, member.zone, 0, edge_reactor.later),
                ),
                LocalNeighbours(member.node, self.links),
            )
            for member, reactor, edge_reactor in zip(
                plan.members, self.reactors, self._edge_reactors, strict=True
            )
        ]
        for group, reactor in zip(self.groups, self.reactors, strict=True):
            self.links.add(group, reactor)
        self.ranks = [
            LocalRank(self.groups[plan.index_of_rank(rank)], rank)
            for rank in range(plan.world_size)
        ]

    def call_all(self, seq: int, values: Sequence[Any], **options: Any) -> None:
        for rank, own in zip(self.ranks, values, strict=True):
            rank.call(seq, own, **options)

    @property
    def rounds(self) -> int:
        """The number of rounds of agreement so far."""
        return max(group.agreement.machine.round for group in self.groups)

    @property
    def undecided(self) -> bool:
        """True while a node waits for the decision of a round."""
        return any(
            each.machine.frozen or each._doubts or each._gone()
            for each in (group.agreement for group in self.groups)
        )

    def fail(self, seq: int, error: AllfoldError) -> None:
        """Have all nodes agree that an op fails with an error, and wait for that."""
        self.groups[0].runs.doubt([Doubt(seq, Reason.FAILED, error=packed(error))])
        wait_until(lambda: all(each.failure(seq) for each in self.groups), f"op {seq} has failed")

    def lose(self, *ranks: int, how: str = PROCESS_ENDED) -> None:
        """End ranks, and wait until every node has an epoch without them."""
        gone = {session_of(rank) for rank in ranks}
        for rank in ranks:
            self.ranks[rank].end(how)
        wait_until(
            lambda: all(gone.isdisjoint(each.current.record.sessions) for each in self.groups),
            "the nodes have agreed upon an epoch without them",
        )

    def lose_node(self, node: int, how: str = "refuses connections") -> None:
        """End a node, and have the orchestrator announce a term without it."""
        self.kill(node)
        self.links.cut(self._nodes[node])
        self.announce(self.term_without(node, how=how), *self._others(node))

    def _others(self, *nodes: int) -> list[int]:
        return [node for node in range(len(self._nodes)) if node not in nodes]

    def term_without(self, *nodes: int, how: str = "refuses connections") -> Term:
        """The term that follows the newest one of all nodes, and leaves some nodes out."""
        newest = max((each.agreement.term for each in self.groups), key=lambda term: term.number)
        lives = zip(newest.voters, newest.joined, strict=True)
        left = [life for life in lives if self._nodes.index(life[0]) not in nodes]
        return Term(
            newest.number + 1,
            newest.generation,
            tuple(node for node, _ in left),
            tuple(joined for _, joined in left),
            tuple((self._nodes[node], how) for node in nodes),
        )

    def announce(self, term: Term, *nodes: int, generation: int | None = None) -> None:
        """Have the orchestrator announce a term to some nodes."""
        announced = term.generation if generation is None else generation
        for node in nodes:
            known = self.groups[node].record
            voters = {name: known.voters[name] for name in term.voters}
            record = replace(known, term=term, voters=voters, generation=announced)
            self.reactors[node].call(partial(self.groups[node].take_term, record, announced))

    def kill(self, node: int) -> None:
        """Let the connections of a node end, and refuse new ones, as if its process had died."""
        self.refused.add(node)
        self._shut_down(self._sockets[node])

    def break_connections(self) -> None:
        """Let all connections end, as a fault of the network would."""
        for sockets in self._sockets.values():
            self._shut_down(sockets)

    @staticmethod
    def _shut_down(sockets: list[socket.socket]) -> None:
        for each in list(sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        closing = [Thread(target=group.close, args=(LINGER_SECONDS,)) for group in self.groups]
        for thread in closing:
            thread.start()
        for thread in [*closing, *self._relays]:
            thread.join(timeout=10.0)
        for reactor in [*self.reactors, *self._edge_reactors]:
            reactor.close()
        self._workers.close()
        if self._wire is not None:
            self._wire.join()

    def _dial(self, request: EdgeRequest, _address: str) -> Dial:
        source, destination = self._nodes.index(request.src), self._nodes.index(request.dst)
        lane = request.lane

        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            if self.refused & {source, destination}:
                raise PeerLost("connection refused")
            take = self.groups[source].serve_edge(request).attach(from_frame)
            ours, theirs = self._wire.connection() if self._wire else socket.socketpair()
            with self._lock:
                self.connections += 1
                if self._cuts is not None:
                    theirs = self._relayed(theirs, self._cuts.randrange(1, self._life))
                dam = self._dam
                if dam and (source, destination, lane) == (dam.source, dam.destination, dam.lane):
                    theirs = self._relayed(theirs, dam.after, dam.opened)
            self._sockets[source].append(theirs)
            self._sockets[destination].append(ours)
            take(theirs)
            return ours, b""

        return dial

    def _relayed(
        self, towards_receiver: socket.socket, budget: int, opened: Event | None = None
    ) -> socket.socket:
        near, far = socket.socketpair()
        arguments = (far, towards_receiver, budget, opened)
        thread = Thread(target=relay, args=arguments, daemon=True)
        thread.start()
        self._relays.append(thread)
        return near


@contextmanager
def local_groups(
    ranks: Sequence[Sequence[int]],
    cuts: random.Random | None = None,
    dam: Dam | None = None,
    life: int = LONGEST_LIFE,
    wire: DamagedWire | None = None,
    plan: Plan | None = None,
    retentions: Mapping[str, ResultShares] | None = None,
) -> Iterator[LocalGroups]:
    groups = LocalGroups(ranks, cuts, dam, life, wire, plan, retentions)
    try:
        yield groups
    finally:
        if dam is not None:
            dam.opened.set()
        groups.close()
