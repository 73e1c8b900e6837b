"""The exchange of the short lane: a frame from each node to each, and what goes wrong with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from allfold_agent.compilation.op_spec import OpSpecs
from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.lane.exchange import LaneExchange
from allfold_agent.groups.lane.links import LaneLinks
from allfold_agent.groups.outcomes import OpTable
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameHeader, FrameType
from tests.node_agent.groups.lane_nodes import NodesOfALane, Placement

STAMP = 7 << 40
FIRST = 10


def summing(numel: int = 4, op: ReduceOp = ReduceOp.SUM, strategy: str = AUTO) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, op, DType.FLOAT32, (numel,), -1, strategy)


SUM = summing()


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
    """The links of a node; what is sent waits until the test lets it arrive."""

    def __init__(self, source: str, on_the_way: list[Frame]) -> None:
        self._source = source
        self._on_the_way = on_the_way
        self.gone: set[str] = set()

    def to(self, node: str) -> Any:
        if node in self.gone:
            return None

        def send(seq: int, stamp: int, fingerprint: int, behind: int, payload: memoryview) -> None:
            data = bytearray(payload)
            header = FrameHeader(
                FrameType.DATA, stamp, 0, seq, 0, len(data), fingerprint, 0, behind
            )
            self._on_the_way.append(Frame(self._source, node, header, data))

        return SimpleNamespace(send=send)


class Exchanges:
    """The exchanges of all nodes of a group.

    Attributes:
        on_the_way: the frames that were sent and have not come.
        troubles: by node, what was said of ops that cannot be done.
    """

    def __init__(self, placement: Placement) -> None:
        self.nodes = NodesOfALane(placement)
        self.on_the_way: list[Frame] = []
        self.sent: list[Frame] = []
        self.names = [member.node for member in self.nodes.plan.members]
        self.threads = [HandThread() for _ in placement]
        self.links = [HandLinks(name, self.on_the_way) for name in self.names]
        self.tables = [OpTable() for _ in placement]
        self.troubles: list[list[str]] = [[] for _ in placement]
        self.all = [self._make(node) for node in range(len(placement))]

    def _make(self, node: int) -> LaneExchange:
        plan = self.nodes.plan
        epoch = SimpleNamespace(plan=plan, packed_stamp=STAMP, specs=OpSpecs(plan, node))
        return LaneExchange(
            cast(GroupEpoch, epoch),
            self.names[node],
            self.nodes.pages[node],
            cast(LaneLinks, self.links[node]),
            self.tables[node],
            cast(LaneThread, self.threads[node]),
            self.troubles[node].append,
            lambda: None,
        )

    def open(self, first: int = FIRST, nodes: Sequence[int] | None = None) -> None:
        for node in range(len(self.all)) if nodes is None else nodes:
            with self.tables[node].lock:
                self.all[node].open(first)

    def close(self, node: int) -> None:
        with self.tables[node].lock:
            self.all[node].close()

    def post(self, rank: int, seq: int, fingerprint: Fingerprint = SUM) -> None:
        """Have a rank bring 1, 10, 100, ... by its number, times the number of the op."""
        values = np.full(fingerprint.numel, 10.0**rank * seq, np.float32)
        self.nodes.post(rank, seq, fingerprint, values.tobytes())

    def post_all(self, seq: int, fingerprint: Fingerprint = SUM) -> None:
        for rank in range(self.nodes.plan.world_size):
            self.post(rank, seq, fingerprint)

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
        self.all[node].take(source, header, payload)

    def published(self, seq: int) -> list[bool]:
        return [self.nodes.is_published(node, seq) for node in range(len(self.all))]

    def sum_at(self, rank: int, seq: int, numel: int = 4) -> list[float]:
        found = self.nodes.found(rank, seq % 8, summing(numel), 4 * numel)
        return [float(each) for each in np.frombuffer(found, np.float32)]


@pytest.fixture
def two() -> Exchanges:
    return Exchanges(((0,), (1,)))


@pytest.fixture(params=[((0,), (1,)), ((0, 1), (2,), (3,))], ids=["2x1", "2+1+1"])
def group(request: pytest.FixtureRequest) -> Exchanges:
    return Exchanges(request.param)


def total(group: Exchanges, seq: int) -> float:
    return float(sum(10**rank for rank in range(group.nodes.plan.world_size)) * seq)


# Ops


def test_every_rank_finds_the_results_of_one_op_after_the_other(group: Exchanges) -> None:
    group.open()
    for seq in range(FIRST, FIRST + 20):
        group.post_all(seq)
        group.run()
        for rank in range(group.nodes.plan.world_size):
            assert group.sum_at(rank, seq) == [total(group, seq)] * 4
        assert all(group.published(seq))
    assert {each.published for each in group.all} == {FIRST + 20}
    assert not any(group.troubles)


def test_a_burst_of_ops_is_done_in_their_order(group: Exchanges) -> None:
    group.open()
    for seq in range(FIRST, FIRST + 8):
        group.post_all(seq)
    group.run()
    assert {each.published for each in group.all} == {FIRST + 8}
    for seq in range(FIRST, FIRST + 8):
        assert group.sum_at(0, seq) == [total(group, seq)] * 4


def test_each_node_sends_every_other_one_a_frame_for_each_op(group: Exchanges) -> None:
    group.open()
    group.post_all(FIRST)
    group.post_all(FIRST + 1)
    group.run()
    pairs = {(one, other) for one in group.names for other in group.names if one != other}
    assert len(group.sent) == 2 * len(pairs)
    assert {(each.source, each.to) for each in group.sent} == pairs
    assert {(each.header.seq, each.header.behind) for each in group.sent} == {
        (FIRST, 0),
        (FIRST + 1, 0),
    }
    assert {each.header.stamp for each in group.sent} == {STAMP}


def test_nothing_is_sent_before_the_last_local_rank_has_called(group: Exchanges) -> None:
    group.open()
    local = group.nodes.placement[0]
    for rank in local:
        assert not group.on_the_way
        group.post(rank, FIRST)
        group.step()
    assert {each.source for each in group.on_the_way} == {"node0"}


def test_ops_between_which_others_go_by_the_long_lane_are_done(group: Exchanges) -> None:
    group.open()
    for seq in (FIRST, FIRST + 3, FIRST + 13):
        group.post_all(seq)
        group.run()
        assert all(group.published(seq))
        assert group.sum_at(0, seq) == [total(group, seq)] * 4
    assert [each.header.behind for each in group.sent if each.to == "node0"][-1] == 9


def test_an_op_is_not_passed_over_though_only_the_one_behind_it_was_seen(two: Exchanges) -> None:
    """A rank posts two ops while the agent looks at one slot after the other."""
    two.open()
    two.step()
    page = two.nodes.pages[0]
    words, slots = page._words, [page.layout.post_word(0, slot) for slot in range(8)]

    class PostsWhileReadBetween:
        """The words; after the slot of the first op was read for nothing, two are posted."""

        def __getitem__(self, word: int) -> int:
            if word == slots[(FIRST + 1) % 8] and not two.nodes.is_published(0, FIRST):
                page._words = words
                two.post(0, FIRST)
                two.post(0, FIRST + 1)
            return words[word]

    page._words = cast(Any, PostsWhileReadBetween())
    two.post(1, FIRST)
    two.post(1, FIRST + 1)
    two.run()
    assert two.published(FIRST) == [True, True]
    assert two.published(FIRST + 1) == [True, True]


# Frames


def test_frames_of_ops_that_this_node_has_not_come_to_are_kept(two: Exchanges) -> None:
    two.open()
    two.post(1, FIRST)
    two.step()
    two.deliver()
    two.step()
    assert two.published(FIRST) == [False, False]
    two.post(0, FIRST)
    two.step(0)
    assert two.published(FIRST) == [True, False]


def test_frames_that_come_before_the_lane_is_open_here_are_kept(two: Exchanges) -> None:
    two.open(nodes=[1])
    two.post(1, FIRST)
    two.step()
    two.deliver()
    two.open(nodes=[0])
    two.post(0, FIRST)
    two.run()
    assert two.published(FIRST) == [True, True]


def frame(seq: int, *, stamp: int = STAMP, value: float = -1.0) -> tuple[FrameHeader, bytearray]:
    """A frame that node1 might have sent, with a value that nobody has brought."""
    payload = bytearray(np.full(4, value, np.float32).tobytes())
    digest = OpSpecs(NodesOfALane(((0,), (1,))).plan, 1).of(SUM.pack()).digest
    return FrameHeader(FrameType.DATA, stamp, 0, seq, 0, 16, digest, 0, 0), payload


@pytest.mark.parametrize(
    ("source", "seq", "stamp"),
    [("node1", FIRST, STAMP - 1), ("node1", FIRST, STAMP + 1), ("stranger", FIRST, STAMP)],
    ids=["of an older epoch", "of a newer one", "of nobody"],
)
def test_frames_that_are_not_of_this_epoch_are_dropped(
    two: Exchanges, source: str, seq: int, stamp: int
) -> None:
    two.open()
    two.post(0, FIRST)
    two.step(0)
    two.take(0, source, *frame(seq, stamp=stamp))
    two.step(0)
    assert two.published(FIRST) == [False, False]
    two.post(1, FIRST)
    two.run()
    assert two.sum_at(0, FIRST) == [total(two, FIRST)] * 4


def test_frames_of_ops_that_are_done_are_dropped(two: Exchanges) -> None:
    two.open()
    two.post_all(FIRST)
    two.run()
    for _ in range(2):
        two.take(0, "node1", *frame(FIRST))
        two.take(0, "node1", *frame(FIRST - 1))
    assert not two.all[0]._early


def test_of_too_many_frames_of_ops_to_come_the_oldest_are_dropped(two: Exchanges) -> None:
    two.open()
    for seq in range(FIRST, FIRST + 100):
        two.take(0, "node1", *frame(seq))
    assert sorted(two.all[0]._early) == list(range(FIRST + 36, FIRST + 100))


def test_a_node_without_a_link_is_sent_nothing_and_waited_for(two: Exchanges) -> None:
    two.links[0].gone.add("node1")
    two.open()
    two.post_all(FIRST)
    two.run()
    assert two.published(FIRST) == [True, False]
    assert not any(two.troubles)


# Trouble


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


@pytest.mark.parametrize(
    "other", [summing(op=ReduceOp.MAX), summing(2), summing(5)], ids=["op", "shorter", "longer"]
)
def test_different_calls_on_two_nodes_are_trouble_on_both(
    two: Exchanges, other: Fingerprint
) -> None:
    two.open()
    two.post(0, FIRST)
    two.post(1, FIRST, other)
    in_trouble(two, 0, 1)


def test_a_payload_of_another_size_is_trouble(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST)
    header, payload = frame(FIRST)
    two.take(0, "node1", header, payload[:-4])
    in_trouble(two, 0)
    assert "another call on node node1" in two.troubles[0][0]


def test_different_calls_on_one_node_are_trouble_there_and_nothing_is_sent() -> None:
    group = Exchanges(((0, 1), (2,), (3,)))
    group.open()
    group.post(0, FIRST)
    group.post(1, FIRST, summing(op=ReduceOp.MAX))
    group.post(2, FIRST)
    group.post(3, FIRST)
    in_trouble(group, 0)
    assert "node0" not in {each.source for each in group.sent}


def test_an_op_that_is_done_here_in_the_long_lane_and_there_in_the_short_one_is_trouble(
    two: Exchanges,
) -> None:
    """Whichever is known first: the message of the local rank, or the frame of the other node."""
    two.open()
    assert not two.all[0].note_message(FIRST)
    two.post(1, FIRST)
    two.run()
    assert len(two.troubles[0]) == 1
    two = Exchanges(((0,), (1,)))
    two.open()
    two.post(1, FIRST)
    two.run()
    assert two.all[0].note_message(FIRST)
    assert not two.all[0].note_message(FIRST + 1)


def test_ops_of_the_long_lane_are_forgotten_once_they_are_over(two: Exchanges) -> None:
    two.open()
    for seq in range(FIRST, FIRST + 5000):
        two.all[0].note_message(seq)
    assert len(two.all[0]._messages) <= 4096


def test_a_call_that_no_agent_can_do_is_trouble(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST, Fingerprint(Kind.BROADCAST, None, DType.FLOAT32, (4,), 9, AUTO))
    in_trouble(two, 0)


def test_a_failure_of_the_arithmetic_is_trouble_and_is_logged(
    two: Exchanges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not my day")

    monkeypatch.setattr("allfold_agent.groups.lane.program.LaneProgram.finish", fail)
    two.open()
    two.post_all(FIRST)
    in_trouble(two, 0, 1)
    assert "not my day" in caplog.text


def test_after_trouble_the_lane_works_once_it_is_opened_again(two: Exchanges) -> None:
    two.open()
    two.post(0, FIRST)
    two.post(1, FIRST, summing(5))
    in_trouble(two, 0, 1)
    for node in (0, 1):
        two.close(node)
    two.open(FIRST + 8)
    two.post_all(FIRST + 8)
    two.run()
    assert two.published(FIRST + 8) == [True, True]
    assert [len(each) for each in two.troubles] == [1, 1]


# Closed


def test_nothing_is_published_once_the_lane_is_closed(two: Exchanges) -> None:
    two.open()
    two.post_all(FIRST)
    two.step()
    two.close(0)
    two.run()
    assert two.published(FIRST) == [False, True]
    assert two.all[0].published == FIRST


def test_an_op_that_is_finished_as_the_lane_is_closed_is_not_published(
    two: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane's thread was just about to."""
    two.open()
    two.post_all(FIRST)
    two.step()
    program = two.all[0]._program
    assert program is not None
    monkeypatch.setattr(program, "finish", lambda *_: two.close(0))
    two.run()
    assert two.published(FIRST) == [False, True]
    assert not two.all[0].held()


def test_an_op_of_before_is_not_published_though_the_lane_is_open_again(
    two: Exchanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane's thread was about to, and did not run while it was closed."""
    two.open()
    two.post_all(FIRST)
    two.step()
    program = two.all[0]._program
    assert program is not None

    def finish(*_: object) -> None:
        two.close(0)
        two.open(FIRST + 20, nodes=[0])

    monkeypatch.setattr(program, "finish", finish)
    two.run()
    assert two.published(FIRST) == [False, True]
    assert two.all[0].published == FIRST + 20


def test_what_is_held_is_what_other_nodes_may_lack(group: Exchanges) -> None:
    group.open()
    for seq in range(FIRST, FIRST + 3):
        group.post_all(seq)
        group.run()
    # The others' frames of the last op have said that they had all those before it.
    last = FIRST + 2
    for each in group.all:
        assert each.final_everywhere() == last
        assert list(each.held()) == [last]
    group.post_all(last + 1)
    group.step()
    group.close(0)
    assert list(group.all[0].held()) == [last]
    program, slot = group.all[0].held()[last]
    held = np.frombuffer(program.held(slot).numpy().tobytes(), np.float32)
    assert held.tolist() == [total(group, last)] * 4


def test_a_node_that_is_behind_has_all_that_it_lacks_held_by_the_others() -> None:
    group = Exchanges(((0,), (1,), (2,)))
    group.open()
    group.post_all(FIRST)
    group.step()
    group.deliver(1)
    group.deliver(2)
    group.step(0)  # node0 has the op, the others lack the frame of node0
    assert group.published(FIRST) == [True, False, False]
    assert list(group.all[0].held()) == [FIRST]
    assert not group.all[1].held()


def test_frames_and_results_of_an_earlier_time_do_not_count_once_it_is_opened_again(
    two: Exchanges,
) -> None:
    two.open()
    two.post_all(FIRST)
    two.run()
    two.post(0, FIRST + 1)
    two.step()
    header, payload = frame(FIRST + 2)
    two.take(0, "node1", header._replace(behind=2), payload)
    assert list(two.all[0].held()) == [FIRST]
    for node in (0, 1):
        two.close(node)
    two.step()
    later = FIRST + 20
    two.open(later)
    assert not two.all[0].held()
    two.deliver()
    two.post_all(later)
    two.run()
    assert two.published(later) == [True, True]
    assert two.sum_at(0, later) == [total(two, later)] * 4
    assert not two.all[0]._early


def test_a_closed_lane_is_served_no_more_and_an_open_one_is(two: Exchanges) -> None:
    two.open()
    two.step()
    assert two.threads[0].lanes == [two.all[0]]
    two.close(0)
    two.step()
    assert not two.threads[0].lanes
    two.open(FIRST + 8, nodes=[0])
    two.step()
    assert two.threads[0].lanes == [two.all[0]]
