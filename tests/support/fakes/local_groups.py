"""The groups of several nodes in one process, joined by socket pairs that may break.

For tests that look at what agents do with each other, without orchestrator, processes or ports.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

import numpy as np
import torch

from allfold_agent.edges.edge_request import EdgeRequest, Lane
from allfold_agent.edges.opening import Dial
from allfold_agent.gpu.pins import Pins
from allfold_agent.groups.epoch import Epoch, NodeResources
from allfold_agent.groups.group import Group
from allfold_agent.runtime.mapping import MappedMemory
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.codecs import Wire
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, PeerLost, from_dict
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.plan import LinkModel, Member, Plan
from allfold_core.wire.local_wire import (
    FIRST_PAIR,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    Region,
)
from tests.support.fakes.counted_pool import CountedPool
from tests.support.fakes.damaged_wire import DamagedWire
from tests.support.fakes.relays import Dam, relay

SECONDS = 20.0
# In bytes; long enough for the largest frame, which is what must get through at once.
LONGEST_LIFE = 160_000
# What the memory for a result holds before.
UNWRITTEN = -12345.0
_ROOM = 1 << 25


def make_plan(ranks: Sequence[Sequence[int]], epoch: int = 3, sessions: Sequence[str] = ()) -> Plan:
    """A group whose node i holds the given ranks."""
    world_size = sum(map(len, ranks))
    members = tuple(
        Member(f"node{index}", "", "", tuple(held), incarnation=f"life {index}")
        for index, held in enumerate(ranks)
    )
    return Plan(
        group="test",
        epoch=epoch,
        world_size=world_size,
        members=members,
        tree_order=tuple(range(len(ranks))),
        links=LinkModel(),
        strategies={},
        timeout=SECONDS,
        sessions=tuple(sessions or map(session_of, range(world_size))),
    )


def session_of(rank: int) -> str:
    """The session of a rank of the first epoch."""
    return f"session of {rank}"


class LocalRank:
    """A rank as its agent sees it: memory, calls, and the outcomes that it is sent."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.session = session_of(rank)
        group.current.seat(self.session, rank)
        self._bytes = torch.zeros(_ROOM, dtype=torch.uint8)
        self._free = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._inputs: dict[int, tuple[int, int]] = {}
        self._outcomes: SimpleQueue[tuple[int, AllfoldError | None]] = SimpleQueue()
        self.sources: dict[int, int] = {}
        self.told: dict[int, Outcome] = {}

    def memory(self, region: Region, nbytes: int) -> torch.Tensor:
        return self._bytes[region.offset : region.offset + nbytes]

    place = memory

    def mapping(self, segment: int) -> MappedMemory:
        raise AssertionError("no rank has memory on a GPU")

    def send_outcome(self, outcome: Outcome) -> None:
        seq, body = outcome.seq, outcome.body or {}
        self.told[seq] = outcome
        failed = outcome.kind is Message.FAILED
        if not failed and body:
            self.sources[seq] = body["source"]
        self._outcomes.put((seq, from_dict(body) if failed else None))

    def call(
        self,
        seq: int,
        values: Any,
        *,
        strategy: str = "direct",
        op: ReduceOp = ReduceOp.SUM,
        timeout: float = SECONDS,
        shift: int = 0,
        called: float | None = None,
    ) -> None:
        """An all-reduce of float32 values, ``shift`` bytes from where they would lie.

        Args:
            called: when the rank called (monotonic), if its data are there only now.
        """
        data = torch.from_numpy(np.asarray(values, np.float32)).view(torch.uint8)
        self._free += shift
        place = Region(0, self._free)
        self._places[seq] = (self._free, len(data))
        self._bytes[self._free : self._free + len(data)] = data
        self._free += len(data)
        print_ = Fingerprint(Kind.ALL_REDUCE, op, DType.FLOAT32, (len(values),), -1, strategy)
        message = OpMessage(0, seq, timeout, place, place, print_.pack())
        self.group.submit(self.session, self, 0, message, called)

    def run(
        self,
        seq: int,
        kind: Kind,
        values: Any,
        shape: int,
        gets: int,
        *,
        strategy: str = "direct",
        op: ReduceOp | None = None,
        root: int = -1,
        wire: Wire = Wire.NATIVE,
        counts: tuple[int, ...] = (),
    ) -> None:
        """A collective of float32 values whose result, of ``gets`` elements, goes elsewhere."""
        source = self._put(np.asarray(values, np.float32))
        target = self._put(np.full(gets, UNWRITTEN, np.float32))
        self._inputs[seq] = (source.offset, 4 * len(values))
        self._places[seq] = (target.offset, 4 * gets)
        print_ = Fingerprint(kind, op, DType.FLOAT32, (shape,), root, strategy, wire, counts=counts)
        message = OpMessage(0, seq, SECONDS, source, target, print_.pack())
        self.group.submit(self.session, self, 0, message)

    def _put(self, values: Any) -> Region:
        """New memory with these values, which begins at a whole line of the cache."""
        data = torch.from_numpy(values.view(np.uint8))
        self._free = -(-self._free // 64) * 64
        place = Region(0, self._free)
        self._bytes[self._free : self._free + len(data)] = data
        self._free += len(data)
        return place

    def exchange(
        self,
        kind: Message,
        number: int,
        values: Any,
        peer: int,
        *,
        tag: int = 0,
        timeout: float = SECONDS,
    ) -> None:
        """A send or receive of float32 values."""
        data = torch.from_numpy(np.asarray(values, np.float32).view(np.uint8))
        place = Region(0, self._free)
        seq = FIRST_PAIR + number
        self._places[seq] = (self._free, len(data))
        self._bytes[self._free : self._free + len(data)] = data
        self._free += len(data)
        message = P2PMessage(kind, 0, seq, timeout, peer, tag, DType.FLOAT32.code, place, len(data))
        self.group.submit_message(self.session, self, 0, message)

    def outcome(self, seconds: float = SECONDS) -> tuple[int, AllfoldError | None]:
        """The next one: which op, and its error."""
        return self._outcomes.get(timeout=seconds)

    def result(self, seq: int) -> Any:
        """A copy of what lies where the result goes."""
        return self._memory(*self._places[seq]).copy()

    def given(self, seq: int) -> Any:
        """A copy of what lies where the input of :meth:`run` was."""
        return self._memory(*self._inputs[seq]).copy()

    def overwrite(self, seq: int, value: float) -> None:
        """Use the memory of an op that is over for something else: its input and its output."""
        self._memory(*self._inputs[seq])[:] = value
        self._memory(*self._places[seq])[:] = value

    def _memory(self, offset: int, nbytes: int) -> Any:
        return self._bytes[offset : offset + nbytes].view(torch.float32).numpy()


class Notes:
    """A failure reporter that only takes notes."""

    def __init__(self) -> None:
        self.suspicions: list[tuple[int, str]] = []
        self.losses: list[PeerLost] = []

    def suspect(self, group: Group, seq: int, reason: str, waited: float = 0.0) -> None:
        self.suspicions.append((seq, reason))

    def report_lost(self, epoch: Epoch, error: PeerLost) -> None:
        self.losses.append(error)
        epoch.break_(error)


class LocalGroups:
    """One group per node.

    Args:
        cuts: from it, after how many bytes each connection breaks; never without it.
        dam: stops point-to-point messages on their way.
        life: after so many bytes, at the most, connections break.
        wire: damages what it carries; without it connections are Unix sockets.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[int]],
        cuts: random.Random | None = None,
        dam: Dam | None = None,
        life: int = LONGEST_LIFE,
        wire: DamagedWire | None = None,
    ) -> None:
        plan = make_plan(ranks)
        self.notes = Notes()
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
        self._reactors = [Reactor(f"test-{member.node}") for member in plan.members]
        for reactor in self._reactors:
            reactor.start()
        self.groups = [
            Group(
                plan,
                NodeResources(
                    member.node,
                    workers=self._workers,
                    buffers=self.buffers,
                    dial=self._dial,
                    reactor=reactor,
                    pins=Pins(),
                ),
                self.notes,
            )
            for member, reactor in zip(plan.members, self._reactors, strict=True)
        ]
        self.ranks = [
            LocalRank(self.groups[plan.index_of_rank(rank)], rank)
            for rank in range(plan.world_size)
        ]

    def call_all(self, seq: int, values: Sequence[Any], **options: Any) -> None:
        for rank, own in zip(self.ranks, values, strict=True):
            rank.call(seq, own, **options)

    def install(
        self,
        ranks: Sequence[Sequence[int]],
        numbers: dict[int, int],
        first_seq: int | None,
        epoch: int = 4,
    ) -> None:
        """Have every node take in another epoch.

        Args:
            ranks: of each node, as that epoch numbers them.
            numbers: the rank in that epoch of each that goes on, by its rank in the first one.
        """
        olds = {new: old for old, new in numbers.items()}
        plan = make_plan(ranks, epoch, [session_of(olds[new]) for new in range(len(olds))])
        for group in self.groups:
            group.install(plan, first_seq)
        for old, new in numbers.items():
            self.ranks[old].group.current.seat(self.ranks[old].session, new)

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
        closing = [Thread(target=group.close, args=(2.0,)) for group in self.groups]
        for thread in closing:
            thread.start()
        for thread in [*closing, *self._relays]:
            thread.join(timeout=10.0)
        for reactor in self._reactors:
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
                if dam and (source, destination, lane) == (dam.source, dam.destination, Lane.PAIRS):
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
) -> Iterator[LocalGroups]:
    groups = LocalGroups(ranks, cuts, dam, life, wire)
    try:
        yield groups
    finally:
        if dam is not None:
            dam.opened.set()
        groups.close()


def no_outcome(rank: LocalRank, seconds: float) -> bool:
    """Tell if no outcome comes for a while."""
    deadline = monotonic() + seconds
    try:
        rank.outcome(deadline - monotonic())
    except Empty:
        return True
    return False
