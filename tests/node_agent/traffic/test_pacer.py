"""The pacer with a clock of its own: caps, classes and their order, exactly."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import pytest

from allfold_agent.traffic.pacer import FLOOR, FLOOR_BYTES, QUIET_SECONDS, Flow, LineState, Pacer
from allfold_agent.traffic.rates import CHUNK_SECONDS, Bucket, RateMeter, ZoneBytes
from allfold_core.protocol.traffic import LEAST_RATE, Cap
from tests.support.waiting import never

HIGH, NORMAL, BACKGROUND = 0, 1, 2
RATE = 25_000_000
TICK = 0.001
ALL = 1 << 40
PIECE = 64 * 1024  # what a connection asks for at once


@dataclass(eq=False)
class FakeLine:
    """A connection whose kernel says what the test wants it to.

    Attributes:
        round_trip: seconds after which what has left the line is acknowledged.
        under_way: bytes that have left it and are not acknowledged.
    """

    rate: float = 0.0
    round_trip: float = 0.0
    under_way: float = 0
    in_flight: int = 0
    segments: int = 0
    acked: float = 0
    queued: float = 0
    has_ended: bool = False
    _now: float = 0.0
    _acks: deque[tuple[float, float]] = field(default_factory=deque)

    def look(self) -> LineState | None:
        state = LineState(
            self.in_flight, self.segments, int(self.acked), int(self.queued), self.round_trip
        )
        return None if self.has_ended else state

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        gone = min(self.waiting, self.rate * seconds)
        self.under_way += gone
        self._acks.append((self._now + self.round_trip, gone))
        while self._acks and self._acks[0][0] <= self._now:
            _, came = self._acks.popleft()
            self.acked += came
            self.queued -= came
            self.under_way -= came

    @property
    def waiting(self) -> float:
        """The bytes that have not left it yet."""
        return self.queued - self.under_way


class BusyLine(FakeLine):
    """One on which something has been sent, and has arrived, whenever somebody looks."""

    def look(self) -> LineState | None:
        self.segments += 1
        return super().look()


@dataclass
class Node:
    """A pacer, its clock, and the flows on its line, of which each may carry the line's rate."""

    cap: int = 0
    now: float = 100.0
    lines: dict[Flow, FakeLine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pacer = Pacer("a", "near", self.cap, never, lambda: self.now)

    def flow(
        self,
        level: int = NORMAL,
        group: str = "g",
        zone: str = "near",
        round_trip: float = 0.0,
    ) -> Flow:
        line = FakeLine(RATE, round_trip)
        flow = self.pacer.open(group, zone, level, line)
        flow.meter.rate = RATE
        self.lines[flow] = line
        return flow

    def run(
        self, seconds: float, *flows: Flow, wanted: int = ALL
    ) -> Iterator[tuple[float, Flow, int]]:
        """Have flows write what they may, and ask again after their pauses; yields each grant.

        The kernel sends what they have written at the line's rate.
        """
        due, until = dict.fromkeys(flows, self.now), self.now + seconds
        while self.now < until:
            for flow in flows:
                while due[flow] <= self.now:
                    granted = flow.ask(wanted)
                    if not granted:
                        due[flow] = self.now + flow.pause
                        break
                    self.lines[flow].segments += 1
                    self.lines[flow].queued += granted
                    yield self.now, flow, granted
            self.now += TICK
            for line in self.lines.values():
                line.pass_time(TICK)

    def sums(self, seconds: float, *flows: Flow, wanted: int = ALL) -> Counter[Flow]:
        found: Counter[Flow] = Counter()
        for _, flow, granted in self.run(seconds, *flows, wanted=wanted):
            found[flow] += granted
        return found


# Caps


def test_without_caps_and_classes_nothing_is_asked() -> None:
    flow = Node().flow()
    assert not flow.is_paced
    assert flow.ask(ALL) == ALL


def test_a_bucket_begins_empty_and_holds_a_chunk() -> None:
    bucket = Bucket(RATE, 5.0)
    assert bucket.fill(5.0) == 0
    assert bucket.fill(5.01) == pytest.approx(RATE * 0.01)
    assert bucket.fill(99.0) == RATE * CHUNK_SECONDS
    assert bucket.seconds_to(RATE) == pytest.approx(1 - CHUNK_SECONDS)


@pytest.mark.parametrize("rate", [LEAST_RATE, RATE, 1_250_000_000])
def test_no_more_than_the_cap_goes_at_any_time_and_all_of_it_where_there_is_enough(
    rate: int,
) -> None:
    node = Node(rate)
    flow, begin, sent = node.flow(), node.now, 0
    for at, _, granted in node.run(2.0, flow):
        sent += granted
        assert sent <= rate * (at - begin) + 1
    assert sent == pytest.approx(rate * (node.now - begin), rel=0.03)


def test_a_message_shorter_than_the_chunk_goes_at_once_on_a_line_that_was_idle() -> None:
    node = Node(RATE)
    flow = node.flow()
    node.now += 1.0
    assert flow.ask(4096) == 4096
    assert flow.ask(int(RATE * CHUNK_SECONDS)) == int(RATE * CHUNK_SECONDS) - 4096
    assert flow.ask(4096) == 0
    assert flow.pause == pytest.approx(4096 / RATE, abs=TICK)


def test_flows_under_one_cap_have_equal_shares_whoever_asks_first() -> None:
    node = Node(RATE)
    flows = [node.flow(group=str(number)) for number in range(5)]
    sent = node.sums(2.0, *flows)
    assert sum(sent.values()) == pytest.approx(2 * RATE, rel=0.03)
    for flow in flows:
        assert sent[flow] == pytest.approx(2 * RATE / 5, rel=0.05)


def test_what_was_not_written_goes_back() -> None:
    node = Node(RATE)
    flow = node.flow()
    node.now += 1.0
    granted = flow.ask(ALL)
    flow.give_back(granted - 1000)
    assert flow.ask(ALL) == granted - 1000


def test_each_cap_holds_for_the_flows_that_it_is_on() -> None:
    node = Node()
    node.pacer.take(
        [
            Cap(group="slow", rate=100_000),
            Cap(zones=("far", "near"), rate=200_000),
            Cap(zones=("far", "other"), rate=70_000),
            Cap(node="b", rate=70_000),
        ]
    )
    slow, far, near = node.flow(group="slow"), node.flow(zone="far"), node.flow()
    sent = node.sums(4.0, slow, far)
    assert sent[slow] == pytest.approx(400_000, rel=0.05)
    assert sent[far] == pytest.approx(800_000, rel=0.05)
    assert not near.is_paced
    assert [str(each) for each in node.pacer.caps] == [
        "group slow: at most 800 kbit/s",
        "zones far and near: at most 1.6 Mbit/s",
    ]


def test_the_least_of_an_agents_own_cap_and_the_orchestrators_holds() -> None:
    node = Node(1_000_000)
    flow = node.flow()
    node.pacer.take([Cap(rate=2_000_000), Cap(node="a", rate=500_000)])
    assert node.sums(2.0, flow)[flow] == pytest.approx(1_000_000, rel=0.05)
    node.pacer.take([])
    assert node.sums(2.0, flow)[flow] == pytest.approx(2_000_000, rel=0.05)


def test_a_change_is_in_force_at_the_next_question_which_comes_within_a_tenth_of_a_second() -> None:
    node = Node()
    node.pacer.take([Cap(rate=LEAST_RATE)])
    flow = node.flow()
    granted = list(islice(node.run(1.0, flow), 3))
    assert flow.ask(ALL) == 0
    assert granted
    assert flow.pause <= 0.1
    node.pacer.take([Cap(rate=RATE)])
    begin, sent = node.now, node.sums(1.0, flow)[flow]
    assert sent == pytest.approx(RATE * (node.now - begin), rel=0.03)
    node.pacer.take([])
    assert not flow.is_paced


def test_after_a_lower_cap_no_more_goes_than_it_allows_from_then_on() -> None:
    node = Node(RATE)
    flow = node.flow()
    node.now += 1.0
    node.pacer.take([Cap(rate=LEAST_RATE)])
    begin, sent = node.now, 0
    for at, _, granted in node.run(1.0, flow):
        sent += granted
        assert sent <= LEAST_RATE * (at - begin + CHUNK_SECONDS) + 1


def test_who_has_gone_or_does_not_ask_again_keeps_nobody_waiting() -> None:
    node = Node(RATE)
    gone, silent, other = node.flow(), node.flow(), node.flow()
    assert not gone.ask(ALL)
    assert not silent.ask(ALL)
    gone.close()
    gone.close()
    sent = node.sums(2.0, other)[other]
    assert sent == pytest.approx(2 * RATE, rel=0.15)


# Classes


def test_a_background_flow_alone_keeps_its_line_full_and_no_more_than_a_chunk_ahead() -> None:
    node = Node()
    flow = node.flow(BACKGROUND)
    line, sent = node.lines[flow], 0
    for _, _, granted in node.run(2.0, flow):
        sent += granted
        assert line.queued <= 1.25 * RATE * CHUNK_SECONDS + 1
        assert granted >= RATE * CHUNK_SECONDS / 2 - 1, "it does not write in crumbs"
    assert sent == pytest.approx(2 * RATE, rel=0.03)


def test_on_a_long_line_the_bytes_under_way_come_on_top_of_the_chunk() -> None:
    node = Node()
    flow = node.flow(BACKGROUND, round_trip=0.08)
    assert flow.ask(ALL) == int(RATE * (0.08 + CHUNK_SECONDS))


def test_beside_bytes_of_a_class_above_it_gets_a_twentieth_in_small_pieces() -> None:
    node = Node()
    foreground, background = node.flow(NORMAL), node.flow(BACKGROUND)
    node.lines[foreground].in_flight = 3
    assert not foreground.is_paced
    pieces = [granted for _, _, granted in node.run(4.0, background)]
    assert sum(pieces) == pytest.approx(FLOOR * RATE * 4, rel=0.05)
    assert max(pieces) <= FLOOR_BYTES


def test_it_has_the_line_again_once_that_was_quiet_for_a_chunk() -> None:
    node = Node()
    foreground, background = node.flow(NORMAL), node.flow(BACKGROUND)
    node.lines[foreground].in_flight = 1
    list(node.run(1.0, background))
    node.lines[foreground].in_flight = 0
    begin = node.now
    most = next(at for at, _, granted in node.run(1.0, background) if granted > FLOOR_BYTES)
    look = QUIET_SECONDS / 4 + TICK
    assert QUIET_SECONDS - look <= most - begin <= QUIET_SECONDS + look


def test_a_message_that_has_come_and_gone_between_two_looks_counts_as_well() -> None:
    node = Node()
    background, busy = node.flow(BACKGROUND), BusyLine()
    node.pacer.open("other", "near", NORMAL, busy)
    assert node.sums(4.0, background)[background] == pytest.approx(FLOOR * RATE * 4, rel=0.05)


def test_a_class_above_that_waits_for_its_receiver_leaves_the_line_to_others() -> None:
    node = Node()
    foreground, background = node.flow(NORMAL), node.flow(BACKGROUND)
    node.lines[foreground].queued = 1 << 30  # and nothing is in flight: there is no room for it
    node.lines[foreground].rate = 0
    assert node.sums(2.0, background)[background] == pytest.approx(2 * RATE, rel=0.03)


def test_high_goes_before_normal_and_normal_is_not_asked_where_nothing_is_high() -> None:
    node = Node()
    normal = node.flow(NORMAL)
    assert not normal.is_paced
    high = node.flow(HIGH)
    assert normal.is_paced
    assert not high.is_paced
    node.lines[high].in_flight = 1
    assert node.sums(4.0, normal)[normal] == pytest.approx(FLOOR * RATE * 4, rel=0.05)
    high.close()
    assert not normal.is_paced


def test_under_a_cap_classes_share_as_on_a_line() -> None:
    node = Node(RATE)
    high, normal = node.flow(HIGH), node.flow(NORMAL)
    sent = node.sums(4.0, normal, high)
    assert sent[normal] == pytest.approx(FLOOR * 4 * RATE, rel=0.1)
    assert sent[high] + sent[normal] == pytest.approx(4 * RATE, rel=0.03)


def test_all_flows_of_a_class_share_its_floor() -> None:
    node = Node()
    node.lines[node.flow(NORMAL)].in_flight = 1
    flows = [node.flow(BACKGROUND) for _ in range(3)]
    sent = node.sums(6.0, *flows)
    assert sum(sent.values()) == pytest.approx(FLOOR * RATE * 6, rel=0.05)
    for flow in flows:
        assert sent[flow] == pytest.approx(FLOOR * RATE * 2, rel=0.1)


def test_a_line_that_has_ended_is_no_reason_to_wait() -> None:
    node = Node()
    foreground, background = node.flow(NORMAL), node.flow(BACKGROUND)
    node.lines[foreground].has_ended = True
    assert background.ask(1000) == 1000
    node.lines[background].has_ended = True
    assert background.ask(ALL) == ALL


# The rate of a line


@pytest.mark.parametrize("rate", [100_000, RATE, 1_000_000_000])
def test_a_background_flow_finds_out_what_its_line_carries(rate: int) -> None:
    node = Node()
    flow = node.flow(BACKGROUND)
    flow.meter.rate, node.lines[flow].rate = RateMeter().rate, rate
    assert sum(node.sums(3.0, flow).values()) > 0
    sent = node.sums(2.0, flow)[flow]
    assert sent == pytest.approx(2 * rate, rel=0.1)
    assert flow.meter.rate == pytest.approx(rate, rel=0.3)


@pytest.mark.parametrize("wanted", [PIECE, ALL])
@pytest.mark.parametrize("rate", [6_250_000, RATE, 125_000_000])
@pytest.mark.parametrize("round_trip", [0.001, 0.04, 0.08, 0.2])
def test_a_background_flow_alone_fills_a_long_line_and_has_a_chunk_waiting_at_most(
    round_trip: float, rate: int, wanted: int
) -> None:
    node = Node()
    flow = node.flow(BACKGROUND, round_trip=round_trip)
    flow.meter, node.lines[flow].rate = RateMeter(), rate
    node.sums(5.0, flow, wanted=wanted)
    line, sent = node.lines[flow], 0
    for _, _, granted in node.run(2.0, flow, wanted=wanted):
        sent += granted
        assert line.waiting <= 1.3 * rate * CHUNK_SECONDS
    assert sent >= 0.95 * 2 * rate


@pytest.mark.parametrize("stall", [0.0, 0.3])
@pytest.mark.parametrize("round_trip", [0.001, 0.04, 0.08, 0.2])
def test_beside_a_class_above_it_has_its_twentieth_of_a_long_line_and_after_a_stall_too(
    round_trip: float, stall: float
) -> None:
    node = Node()
    foreground = node.flow(NORMAL)
    background = node.flow(BACKGROUND, round_trip=round_trip)
    background.meter = RateMeter()
    node.sums(7.0, background, wanted=PIECE)
    line = node.lines[background]
    line.rate = 0
    node.sums(stall, background, wanted=PIECE)
    line.rate, node.lines[foreground].in_flight = RATE, 1
    pieces = [granted for _, _, granted in node.run(4.0, background, wanted=PIECE)]
    assert sum(pieces) == pytest.approx(FLOOR * RATE * 4, rel=0.2)
    assert max(pieces) <= FLOOR_BYTES
    node.lines[foreground].in_flight = 0
    node.sums(1.0, background, wanted=PIECE)
    assert node.sums(1.0, background, wanted=PIECE)[background] >= 0.9 * RATE


def test_the_rate_sinks_once_the_line_carries_less_for_longer_than_a_stall() -> None:
    node = Node()
    flow = node.flow(BACKGROUND, round_trip=0.04)
    node.sums(2.0, flow)
    node.lines[flow].rate = RATE / 4
    node.sums(2.0, flow)
    assert flow.meter.rate == pytest.approx(RATE / 4, rel=0.1)


def test_a_long_line_that_carries_more_than_before_is_full_again_in_seconds() -> None:
    node = Node()
    flow = node.flow(BACKGROUND, round_trip=0.2)
    flow.meter, node.lines[flow].rate = RateMeter(), RATE / 20
    node.sums(3.0, flow)
    node.lines[flow].rate = RATE
    node.sums(7.0, flow)
    assert node.sums(1.0, flow)[flow] >= 0.9 * RATE


def test_who_has_little_to_send_on_a_long_line_does_not_lower_its_rate() -> None:
    node = Node()
    flow = node.flow(BACKGROUND, round_trip=0.08)
    for _ in range(40):
        node.lines[flow].queued += flow.ask(PIECE)
        list(node.run(0.05))
    assert flow.meter.rate == RATE


def test_a_burst_on_a_line_that_is_shared_does_not_change_its_rate() -> None:
    node = Node()
    foreground, background = node.flow(NORMAL), node.flow(BACKGROUND)
    node.lines[foreground].in_flight = 1
    node.lines[background].rate = 100 * RATE
    node.sums(2.0, background)
    assert background.meter.rate == RATE


def test_bytes_by_zone_grow_whatever_becomes_of_the_edges_that_have_counted_them() -> None:
    zones = ZoneBytes()
    assert zones.add({("g", "b", "far"): 5, ("g", "c", "near"): 1}) == {"far": 5, "near": 1}
    assert zones.add({("g", "b", "far"): 7, ("h", "b", "far"): 2}) == {"far": 9, "near": 1}
    assert zones.add({("g", "b", "far"): 3}) == {"far": 12, "near": 1}  # it has begun anew
    assert zones.add({}) == {"far": 12, "near": 1}
