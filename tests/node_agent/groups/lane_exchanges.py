"""The exchanges of the short lane of all nodes of a group: a test moves threads and frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from allfold_agent.edges.outgoing import FilePlace
from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.lane.exchange import LaneExchange
from allfold_agent.groups.lane.links import LaneLinks
from allfold_agent.groups.lane.op_memory import SharedBytes
from allfold_agent.groups.lane.payloads import Payload
from allfold_agent.groups.outcomes import OpTable
from allfold_agent.runtime.buffers import BufferPool, SharedFile
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameHeader, FrameType
from allfold_core.protocol.rank_messages import Region
from tests.node_agent.groups.lane_nodes import NodesOfALane, Placement

STAMP = 7 << 40
FIRST = 10
NO_FILE = SharedFile(None)


def summing(numel: int = 4, op: ReduceOp = ReduceOp.SUM, strategy: str = AUTO) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, op, DType.FLOAT32, (numel,), -1, strategy)


SUM = summing()


def frame(
    seq: int,
    *,
    stamp: int = STAMP,
    value: float = -1.0,
    fingerprint: Fingerprint = SUM,
    start: int = 0,
    numel: int = 4,
    behind: int = 0,
) -> tuple[FrameHeader, bytearray]:
    """A frame that node1 of two might have sent, with a value that nobody has brought."""
    payload = bytearray(np.full(numel, value, np.float32).tobytes())
    digest = NodesOfALane(((0,), (1,))).spec(1, fingerprint.pack()).digest
    header = FrameHeader(FrameType.DATA, stamp, 0, seq, start, len(payload), digest, 0, behind)
    return header, payload


class Frame(NamedTuple):
    source: str
    to: str
    header: FrameHeader
    payload: bytearray


class HandThread:
    """The lane's thread, as far as tests let it run."""

    wake_descriptor = -1

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self.lanes: list[LaneExchange] = []

    def call(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def add(self, lane: LaneExchange) -> None:
        if lane not in self.lanes:
            self.lanes.append(lane)

    def remove(self, lane: LaneExchange) -> None:
        if lane in self.lanes:
            self.lanes.remove(lane)

    def run(self) -> None:
        """Go on until there is nothing to do."""
        while self.tasks:
            self.tasks.pop(0)()
        while sum(lane.advance() for lane in self.lanes):
            pass


class HandLinks:
    """The links of a node; what is sent waits until the test lets it arrive.

    Attributes:
        gone: the nodes to which there is no link.
        are_full: the connections take no more.
        when_asked: called before it says that all has been sent.
        lets_go: how often the links were told to use no memory any more.
        freed: the payloads that were given back.
    """

    def __init__(self, source: str, on_the_way: list[Frame]) -> None:
        self._source = source
        self._on_the_way = on_the_way
        self.gone: set[str] = set()
        self.are_full = False
        self.when_asked: Callable[[], None] = lambda: None
        self.lets_go = 0
        self.freed: list[Payload] = []

    @property
    def have_sent(self) -> bool:
        self.when_asked()
        return not self.are_full

    def let_go(self) -> None:
        self.lets_go += 1

    def rest(self) -> None:
        """There is no memory."""

    def free(self, payload: Payload) -> None:
        self.freed.append(payload)

    def link_to(self, node: str) -> Any:
        if node in self.gone:
            return None

        def send(
            seq: int,
            stamp: int,
            fingerprint: int,
            behind: int,
            start: int,
            payload: memoryview,
            _place: FilePlace | None = None,
            kind: FrameType = FrameType.DATA,
        ) -> None:
            data = bytearray(payload)
            header = FrameHeader(kind, stamp, 0, seq, start, len(data), fingerprint, 0, behind)
            self._on_the_way.append(Frame(self._source, node, header, data))

        return SimpleNamespace(send=send)


class Exchanges:
    """The exchanges of all nodes of a group.

    Args:
        nodes: the pages, and the arenas of the ranks.

    Attributes:
        on_the_way: the frames that were sent and have not come.
        troubles: by node, what was said of ops that cannot be done.
        pools: by node, the memory for what fits no page.
        unknown: the ranks and segments that the agents do not know yet.
        come_in_place: frames come to where the exchange wants them, as long ones do.
        are_final: all ops of the long lane are final on all nodes.
        finals: by node, what was said to be final.
    """

    def __init__(self, nodes: NodesOfALane | Placement) -> None:
        self.nodes = nodes if isinstance(nodes, NodesOfALane) else NodesOfALane(nodes)
        count = range(len(self.nodes.placement))
        self.on_the_way: list[Frame] = []
        self.sent: list[Frame] = []
        self.names = [member.node for member in self.nodes.plan.members]
        self.threads = [HandThread() for _ in count]
        self.links = [HandLinks(name, self.on_the_way) for name in self.names]
        self.tables = [OpTable() for _ in count]
        self.pools = [BufferPool(1 << 30, lambda *_: None) for _ in count]
        self.troubles: list[list[str]] = [[] for _ in count]
        self.unknown: set[tuple[int, int]] = set()
        self.come_in_place = False
        self.are_final = True
        self.finals: list[list[int]] = [[] for _ in count]
        self.all = [self._make(node) for node in count]

    def _make(self, node: int) -> LaneExchange:
        nodes = self.nodes
        specs = SimpleNamespace(of=lambda packed: nodes.spec(node, packed))
        epoch = SimpleNamespace(plan=nodes.plan, packed_stamp=STAMP, specs=specs)

        def rank_input(row: int, region: Region, nbytes: int) -> SharedBytes | None:
            key = nodes.placement[node][row], region.segment
            if key in self.unknown:
                return None
            memory = nodes.arenas[key][region.offset : region.offset + nbytes]
            return SharedBytes(memory.numpy().data, NO_FILE, region.offset)

        return LaneExchange(
            cast(GroupEpoch, epoch),
            self.names[node],
            nodes.pages[node],
            rank_input,
            cast(LaneLinks, self.links[node]),
            self.tables[node],
            self.pools[node],
            cast(LaneThread, self.threads[node]),
            self.troubles[node].append,
            lambda _: None,
            lambda _: self.are_final,
            self.finals[node].append,
        )

    def open(self, first: int = FIRST, nodes: Sequence[int] | None = None) -> None:
        for node in range(len(self.all)) if nodes is None else nodes:
            with self.tables[node].lock:
                self.all[node].open(first)

    def close(self, *nodes: int) -> None:
        for node in nodes:
            with self.tables[node].lock:
                self.all[node].close()

    def post(self, rank: int, seq: int, fingerprint: Fingerprint = SUM) -> None:
        """Have a rank bring 1, 10, 100, ... by its number, times the number of the op."""
        values = np.full(fingerprint.numel, 10.0**rank * seq, np.float32)
        self.nodes.post(rank, seq, fingerprint, values.tobytes())

    def post_all(self, seq: int, fingerprint: Fingerprint = SUM) -> None:
        for rank in range(self.nodes.plan.world_size):
            self.post(rank, seq, fingerprint)

    def finish_all(self, end: int) -> None:
        """Have all ranks say that they need no result of an op below this number."""
        for rank in range(self.nodes.plan.world_size):
            self.nodes.finish(rank, end)

    def run(self) -> None:
        """Let the threads go on until no frame is on its way."""
        self.step()
        while self.on_the_way:
            self.deliver()
            self.step()

    def step(self, *nodes: int) -> None:
        """Let threads go on, and no frame arrive."""
        for node in nodes or range(len(self.all)):
            self.threads[node].run()
        self.sent += [each for each in self.on_the_way if each not in self.sent]

    def deliver(self, source: int | None = None) -> None:
        """Let frames arrive, those of one node or all."""
        now = [each for each in self.on_the_way if source in (None, self.names.index(each.source))]
        for each in now:
            self.on_the_way.remove(each)
            self.take(self.names.index(each.to), each.source, each.header, each.payload)

    def take(self, node: int, source: str, header: FrameHeader, payload: bytearray) -> None:
        """Let a frame arrive, as a link does it."""
        may_be = self.come_in_place and payload
        there = self.all[node].destination(source, header) if may_be else None
        if there is None:
            self.all[node].take(source, header, payload)
            return
        there[:] = payload
        self.all[node].take(source, header, there, is_there=True)

    def published(self, seq: int) -> list[bool]:
        return [self.nodes.is_published(node, seq) for node in range(len(self.all))]

    def sum_at(self, rank: int, seq: int, numel: int = 4) -> list[float]:
        """Return what a rank takes from its slot."""
        found = self.nodes.found(rank, seq % 8, summing(numel), 4 * numel)
        return floats(found)

    def sum_in_place(self, rank: int, seq: int, fingerprint: Fingerprint) -> list[float]:
        """Return what a rank takes from the place of an op."""
        return floats(self.nodes.found_in_place(rank, seq, fingerprint)[: 4 * fingerprint.numel])


def floats(data: bytes | memoryview) -> list[float]:
    """Return the numbers in some memory."""
    return [float(each) for each in np.frombuffer(data, np.float32)]


def total(group: Exchanges, seq: int) -> float:
    """The sum of what all ranks bring for an op."""
    return float(sum(10**rank for rank in range(group.nodes.plan.world_size)) * seq)


def in_trouble(group: Exchanges, *nodes: int) -> None:
    """These nodes say so once, however often they look again, and nothing is published."""
    group.run()
    for _ in range(3):
        group.post_all(FIRST + 1)
        group.run()
    assert [len(each) for each in group.troubles] == [
        int(node in nodes) for node in range(len(group.all))
    ]
    assert not any(group.published(FIRST))
    assert not any(group.published(FIRST + 1))
