"""Ops of the short lane: ranks post to a page and finish by themselves, or the agent decides."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from time import monotonic, sleep, thread_time
from typing import Any

import numpy as np
import pytest

import allfold
from allfold_core.dtypes import DType
from allfold_core.errors import AgentLost, MismatchError, PeerMissing
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.protocol.rank_messages import Message, Outcome
from allfold_core.short_lane.page import FIRST, HELD, NEVER
from tests.support.fakes.page_ranks import Ranks, ranks
from tests.support.waiting import wait_until


@pytest.fixture
def two() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


def started(group: allfold.Group, value: float = 1.0, size: int = 4) -> tuple[Any, Any]:
    tensor = np.full(size, value, np.float32)
    return tensor, group.all_reduce(tensor, async_op=True)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_many_ops_in_a_row_have_the_sums_of_all(count: int) -> None:
    def program(group: allfold.Group) -> list[float]:
        tensor, sums = np.empty(16, np.float32), []
        for step in range(200):
            tensor[:] = step * (group.rank + 1)
            sums.append(float(group.all_reduce(tensor)[-1]))
        return sums

    with ranks(count) as made:
        total = count * (count + 1) / 2
        assert made.all_do(program) == [[step * total for step in range(200)]] * count


def test_handles_may_be_waited_for_in_any_order(two: Ranks) -> None:
    def program(group: allfold.Group) -> list[float]:
        works = [started(group, 10.0 * group.rank + each) for each in range(6)]
        for _, work in reversed(works):
            work.wait()
        return [float(tensor[0]) for tensor, _ in works]

    assert two.all_do(program) == [[10.0 + 2 * each for each in range(6)]] * 2


def test_a_full_ring_is_no_place_for_another_post(two: Ranks) -> None:
    lane, slots = two.lane(0), two.page.layout.slots
    for seq in range(slots):
        assert lane.slot_for(seq) == seq
        started(two.groups[0])
    assert lane.slot_for(slots) == -1


def test_a_slot_is_free_once_its_result_was_taken_and_all_have_finished(two: Ranks) -> None:
    first, second = two.groups
    slots = two.page.layout.slots
    _, work = started(first)
    for _ in range(slots - 1):
        started(first)
    _, others = started(second)
    work.wait()
    assert two.lane(0).slot_for(slots) == -1, "the other rank has not read it yet"
    others.wait()
    assert two.lane(0).slot_for(slots) == 0


def test_an_op_that_is_the_agents_is_never_finished_by_the_rank(two: Ranks) -> None:
    (mine, work), (_, other) = started(two.groups[0]), started(two.groups[1])
    two.page.words[FIRST] = NEVER
    assert not work.is_completed()
    assert not work.settle_within(0.1)
    assert mine[0] == 1.0
    assert not other.is_completed()


def test_an_op_that_is_held_is_finished_although_the_lane_was_closed(two: Ranks) -> None:
    (mine, work), _ = started(two.groups[0]), started(two.groups[1])
    two.page.words[FIRST] = NEVER
    two.page.words[HELD] = 1
    work.wait(5.0)
    assert mine[0] == 2.0


def test_an_op_beyond_what_is_held_waits_for_the_word_of_the_agent(two: Ranks) -> None:
    _ = [started(group) for group in two.groups]
    (_, work), _ = started(two.groups[0]), started(two.groups[1])
    two.page.words[FIRST] = NEVER
    two.page.words[HELD] = 1
    with pytest.raises(PeerMissing):
        work.wait(0.2)
    error = PeerMissing("rank 1 is late", timeout=1.0)
    outcome = Outcome(Message.FAILED, 1, 1, 0, 0, {})
    assert two.groups[0].membership.epochs.settle(outcome, error)
    with pytest.raises(PeerMissing, match="rank 1 is late"):
        work.wait(5.0)


def test_a_closed_lane_takes_no_posts(two: Ranks) -> None:
    two.page.words[FIRST] = NEVER
    assert two.lane(0).slot_for(0) == -1
    two.page.words[FIRST] = 3
    assert two.lane(0).slot_for(2) == -1
    assert two.lane(0).slot_for(3) == 3


LONG = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (100_000,), -1, AUTO).pack()


def test_a_rank_posts_nothing_while_the_agent_has_to_read_a_message_of_it(two: Ranks) -> None:
    lane, layout = two.lane(0), two.page.layout
    lane.note_message(4, LONG)
    assert lane.slot_for(5) == -1
    two.page.words[layout.read_word(0)] = 4 + 1
    assert lane.slot_for(5) == 5


def test_a_rank_that_waits_for_the_reader_is_woken(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold._lane.lane_page._READ_SECONDS", 30.0)
    lane, layout, words = two.lane(0), two.page.layout, two.page.words
    lane.note_message(4, LONG)
    with ThreadPoolExecutor(1) as pool:
        slot = pool.submit(lane.slot_for, 5)
        wait_until(lambda: words[layout.waiting_word(0)], "the rank blocks")
        words[layout.read_word(0)] = 4 + 1
        lane.page.wake(layout.read_word(0))
        assert slot.result(5.0) == 5
    assert words[layout.waiting_word(0)] == 0


def test_a_post_that_comes_just_before_a_rank_blocks_is_seen_at_once(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine, work), lane = started(two.groups[0]), two.lane(0)
    missing_post = lane._missing_post

    def the_other_posts_first(op: object) -> Any:
        monkeypatch.setattr(lane, "_missing_post", missing_post)
        started(two.groups[1])
        return missing_post(op)

    monkeypatch.setattr(lane, "_missing_post", the_other_posts_first)
    monkeypatch.setattr(two.connections[0], "wait_until", lambda *_: pytest.fail("it blocks"))
    work.wait(5.0)
    assert mine[0] == 2.0


def test_calls_that_differ_ask_the_agent_once(two: Ranks) -> None:
    (mine, work), _ = started(two.groups[0], size=4), started(two.groups[1], size=5)
    for _ in range(3):
        assert not work.settle_within(0.05)
    asked = [body for kind, body in two.connections[0].told if kind is Message.LOOK]
    assert asked == [{"number": 1, "seq": 0}]
    assert (mine == 1.0).all()
    outcome = Outcome(Message.FAILED, 1, 0, 0, 0, {})
    two.groups[0].membership.epochs.settle(outcome, MismatchError("shapes differ"))
    with pytest.raises(MismatchError, match="shapes differ"):
        work.wait(5.0)


def test_the_agent_is_asked_now_and_then_about_an_op_that_takes_long(two: Ranks) -> None:
    _, work = started(two.groups[0])
    assert not work.settle_within(0.4)
    asked = [kind for kind, _ in two.connections[0].told if kind is Message.LOOK]
    assert 2 <= len(asked) <= 4


def test_a_waiting_rank_blocks_and_is_woken_by_the_post(two: Ranks) -> None:
    """The post is seen long before the blocked thread would look by itself; nothing is burnt."""
    delays, cpu = [], []

    def wait(work: Any) -> None:
        began = thread_time()
        work.wait()
        delays.append(monotonic())
        cpu.append(thread_time() - began)

    word = two.page.layout.waiting_word(0)
    for _ in range(20):
        _, work = started(two.groups[0])
        thread = Thread(target=wait, args=(work,))
        thread.start()
        wait_until(lambda: two.page.words[word], "rank 0 blocks")
        began = monotonic()
        _, other = started(two.groups[1])
        thread.join(5.0)
        other.wait()
        delays[-1] -= began
    assert sorted(delays)[10] < 0.005
    assert sorted(cpu)[10] < 0.005


def test_two_threads_of_a_rank_wait_for_different_ops_and_a_third_starts_more(two: Ranks) -> None:
    """Whichever of them blocks on the page, the first op that is done frees its waiter at once."""
    first, second = two.groups
    _, early = started(first)
    _, late = started(first)
    done = [Event(), Event()]

    def wait(work: Any, event: Event) -> None:
        work.wait()
        event.set()

    later = Thread(target=wait, args=(late, done[1]))
    later.start()
    sleep(0.05)  # the waiter for the later op blocks first
    sooner = Thread(target=wait, args=(early, done[0]))
    sooner.start()
    _, third = started(first)
    began = monotonic()
    _, other = started(second)
    other.wait()
    assert done[0].wait(5.0)
    assert monotonic() - began < 1.0
    assert not done[1].is_set()
    for _ in range(2):
        started(second)[1].wait()
    third.wait()
    assert done[1].wait(5.0)


def test_threads_that_start_and_wait_at_once_lose_nothing() -> None:
    """Four threads of a rank call; the op that each call is, is what all ranks call as that one."""

    def program(group: allfold.Group) -> list[float]:
        def call(_: int) -> float:
            return float(started(group)[1].wait()[0])

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(call, range(8)))

    with ranks(3) as made:
        assert made.all_do(program) == [[3.0] * 8] * 3


def test_a_lost_agent_ends_the_wait(two: Ranks) -> None:
    _, work = started(two.groups[0])
    two.connections[0].lost = AgentLost("it is gone")
    with pytest.raises(AgentLost):
        work.wait()


def test_a_program_of_short_ops_alone_looks_at_its_connection(two: Ranks) -> None:
    two.all_do(lambda group: [group.all_reduce(np.ones(2, np.float32)) for _ in range(3)])
    assert len(two.connections[0].glances) >= 3


# With agents that have a part in it


def test_across_nodes_a_rank_waits_for_the_agent_alone_and_copies_its_result() -> None:
    with ranks(2, [[0, 1], [2]]) as made:
        page, layout = made.page, made.page.layout
        tensor, work = started(made.groups[0], 3.0)
        assert not work.settle_within(0.05)
        _post_as_agent(made, 0, np.full(4, 42.0, np.float32))
        work.wait(5.0)
        assert (tensor == 42.0).all()
        # The second op by the prepared path, which blocks until the agent posts.
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(made.groups[0].all_reduce, tensor)
            wait_until(lambda: page.words[layout.post_word(0, 1)] == 2, "it is posted")
            assert not running.done()
            _post_as_agent(made, 1, np.full(4, 43.0, np.float32))
            running.result(5.0)
        assert (tensor == 43.0).all()


def _post_as_agent(made: Ranks, seq: int, result: np.ndarray[Any, Any]) -> None:
    call = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, result.shape, -1, AUTO)
    made.page.publish(seq, call.pack(), result)
