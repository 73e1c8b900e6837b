"""Ops of the short lane between nodes that are longer than a slot, as their ranks do them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import allfold
from allfold._channel import CallChannel
from allfold._lane.short_lane import RankLane
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.protocol.rank_messages import Message, Outcome, Region
from allfold_core.short_lane.page import FIRST, NEVER, read_ends
from tests.support.fakes.page_ranks import Ranks, ranks

NUMEL = 2000
PLACE_BYTES = 1 << 16
LONG = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (NUMEL,), -1, AUTO).pack()
SHORT = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (4,), -1, AUTO).pack()


@pytest.fixture
def made() -> Iterator[Ranks]:
    """One rank here and one on another node; the test is the agent of this one."""
    with ranks(1, [[0], [1]], PLACE_BYTES) as made:
        # What a test does not ask for does not land by itself.
        made.groups[0]._channel._ops.watch = lambda: None  # type: ignore[method-assign]
        yield made


def started(made: Ranks, value: float = 1.0, numel: int = NUMEL) -> tuple[Any, Any]:
    tensor = np.full(numel, value, np.float32)
    return tensor, made.groups[0].all_reduce(tensor, async_op=True)


def publish(made: Ranks, seq: int, value: float, place: int = 0) -> None:
    made.page.publish(seq, LONG, np.full(NUMEL, value, np.float32), place)


def publish_short(made: Ranks, seq: int, value: float) -> None:
    made.page.publish(seq, SHORT, np.full(4, value, np.float32))


def is_posted(made: Ranks, seq: int) -> bool:
    layout = made.page.layout
    return made.page.words[layout.post_word(0, seq % layout.slots)] == seq + 1


def finished(made: Ranks) -> int:
    """Return the number below which the rank needs no result of an op."""
    return made.page.words[made.page.layout.finished_word(0)]


def ends(made: Ranks, seq: int) -> tuple[Region, Region]:
    layout = made.page.layout
    return read_ends(memoryview(made.page.memory), layout.post_word(0, seq % layout.slots))


def in_arena(made: Ranks, region: Region, nbytes: int = 4 * NUMEL) -> Any:
    """Return what the agent finds in the arena, as an array that can be written to."""
    segment = made.arenas[0]._segments[region.segment].memory
    assert segment.bytes is not None
    return segment.bytes[region.offset : region.offset + nbytes].view(np.float32)


def used(made: Ranks) -> int:
    """Return the bytes of the arena that are in use."""
    arena = made.arenas[0]
    arena._take_back()
    segments = arena._segments.values()
    return sum(each.memory.size - sum(size for _, size in each._free) for each in segments)


def outcome(made: Ranks, seq: int, kind: Message, error: AllfoldError | None = None) -> None:
    """Have the agent give the outcome of an op that it has taken over."""
    assert made.groups[0].membership.epochs.settle(Outcome(kind, 1, seq, 0, 2, {}), error)


# What a rank posts


def test_the_agent_is_told_where_the_input_lies(made: Ranks) -> None:
    tensor, _ = started(made, 3.0)
    tensor[:] = 0.0  # the program must not do that: what was posted is a copy
    assert is_posted(made, 0)
    source, target = ends(made, 0)
    assert (in_arena(made, source) == 3.0).all()
    assert target == source, "it is done in place"
    assert not made.connections[0].told


def test_a_tensor_that_lies_in_the_arena_is_read_there(made: Ranks) -> None:
    array = made.arenas[0].array(4 * NUMEL).view(np.float32)
    array[:] = 5.0
    before = used(made)
    work = made.groups[0].all_reduce(array, async_op=True)
    assert used(made) == before
    array[:] = 6.0
    assert (in_arena(made, ends(made, 0)[0]) == 6.0).all()
    publish(made, 0, 7.0)
    work.wait(5.0)
    assert (array == 7.0).all()


def test_short_ops_go_through_their_slots(made: Ranks) -> None:
    tensor, work = started(made, 2.0, 4)
    layout, memory = made.page.layout, made.page.memory
    start = layout.input_offset(0, 0)
    assert np.frombuffer(memory, np.float32, 4, start).tolist() == [2.0] * 4
    publish_short(made, 0, 3.0)
    work.wait(5.0)
    assert tensor.tolist() == [3.0] * 4
    assert used(made) == 0


def test_calls_that_are_alike_are_posted_one_after_the_other(made: Ranks) -> None:
    group = made.groups[0]
    tensor = np.zeros(NUMEL, np.float32)
    for seq in range(20):
        publish(made, seq, seq + 1.0, seq % 8)  # it needs no input of this rank
        assert group.all_reduce(tensor) is tensor
        assert (tensor == seq + 1.0).all()
        assert is_posted(made, seq)
        assert finished(made) == seq + 1
    assert used(made) == 0


def test_an_op_that_cannot_be_posted_is_a_message(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    def send(_self: object, _view: object, _call: object, packed: bytes, _timeout: float) -> Any:
        sent.append(packed)
        assert used(made) == 0, "the memory of the post is free again"
        raise PeerLost("enough")

    monkeypatch.setattr(CallChannel, "_send", send)
    made.page.words[FIRST] = NEVER
    with pytest.raises(PeerLost):
        started(made)
    assert sent == [LONG]
    assert not is_posted(made, 0)


# What it finds


def test_the_result_is_copied_out_of_its_place(made: Ranks) -> None:
    (first, one), (second, other) = started(made), started(made)
    publish(made, 0, 42.0, place=5)
    publish(made, 1, 43.0, place=2)
    other.wait(5.0)
    one.wait(5.0)
    assert (first == 42.0).all()
    assert (second == 43.0).all()
    assert used(made) == 0


def test_blocks_of_ranks_in_another_order_than_that_of_the_nodes_come_in_theirs() -> None:
    """The agent has them node by node."""
    with ranks(2, [[0, 2], [1]], PLACE_BYTES) as made:
        call = Fingerprint(Kind.ALL_GATHER, None, DType.FLOAT32, (NUMEL,), -1, AUTO)
        by_node = np.repeat(np.array([0, 2, 1], np.float32), NUMEL)
        made.page.publish(0, call.pack(), by_node, 0)
        gathered = made.groups[0].all_gather(np.zeros(NUMEL, np.float32))
        assert np.array_equal(np.asarray(gathered).reshape(-1), np.sort(by_node))


def test_a_place_is_in_use_until_the_result_was_copied_out(made: Ranks) -> None:
    tensor, work = started(made)
    publish(made, 0, 42.0)
    assert work._pending.poll()
    assert finished(made) == 0
    work.wait(5.0)
    assert (tensor == 42.0).all()
    assert finished(made) == 1


def test_a_short_op_behind_it_that_is_done_first_does_not_free_the_place(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one is finished as others are, or at once."""
    _, long = started(made)
    _, short = started(made, numel=4)
    publish(made, 0, 42.0)
    publish_short(made, 1, 2.0)
    assert short.is_completed()
    assert finished(made) == 0
    publish_short(made, 2, 3.0)
    monkeypatch.setattr(made.groups[0]._channel._ops, "settle_before", lambda _: None)
    made.groups[0].all_reduce(np.zeros(4, np.float32))
    assert finished(made) == 0
    long.wait(5.0)
    assert finished(made) == 3


def test_an_op_that_is_dropped_lands_and_frees_its_place() -> None:
    with ranks(1, [[0], [1]], PLACE_BYTES) as made:
        tensor = started(made)[0]
        publish(made, 0, 42.0)
        assert made.groups[0].quiesce(5.0)
        assert (tensor == 42.0).all()
        assert finished(made) == 1


# Ops that the agent takes over


def test_the_result_of_an_op_that_was_taken_over_comes_from_the_arena(made: Ranks) -> None:
    tensor, work = started(made)
    made.page.words[FIRST] = NEVER
    in_arena(made, ends(made, 0)[1])[:] = 44.0
    outcome(made, 0, Message.DONE)
    work.wait(5.0)
    assert (tensor == 44.0).all()
    assert used(made) == 0


def test_an_op_that_fails_once_it_was_taken_over_leaves_the_tensor_alone(made: Ranks) -> None:
    tensor, work = started(made)
    made.page.words[FIRST] = NEVER
    in_arena(made, ends(made, 0)[1])[:] = 44.0
    outcome(made, 0, Message.FAILED, PeerLost("rank 1 is lost"))
    with pytest.raises(PeerLost):
        work.wait(5.0)
    assert (tensor == 1.0).all()
    assert used(made) == 0


# Interrupted calls


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def call(group: allfold.Group) -> Any:
    """Call an op that is interrupted; returns its tensor."""
    tensor = np.ones(NUMEL, np.float32)
    with pytest.raises(KeyboardInterrupt):
        group.all_reduce(tensor)
    return tensor


def test_a_call_that_is_interrupted_before_it_is_posted_gives_its_memory_back(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("allfold._lane.short_lane.write_ends", interrupt)
        call(made.groups[0])
    assert used(made) == 0
    assert not is_posted(made, 0)
    assert made.groups[0].next_op == 0
    publish(made, 0, 42.0)
    tensor = np.ones(NUMEL, np.float32)
    assert (made.groups[0].all_reduce(tensor) == 42.0).all()


def test_a_call_that_is_interrupted_as_it_looks_for_a_slot_gives_its_memory_back(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankLane, "slot_for", interrupt)
    call(made.groups[0])
    assert used(made) == 0
    assert not is_posted(made, 0)


def test_a_call_that_is_interrupted_once_it_is_posted_keeps_its_memory_until_it_is_done(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = made.groups
    with monkeypatch.context() as patched:
        patched.setattr(RankLane, "_wake_agent", interrupt)
        tensor = call(group)
    assert is_posted(made, 0)
    assert group.next_op == 1
    assert (in_arena(made, ends(made, 0)[0]) == 1.0).all()
    assert used(made) > 0
    publish(made, 0, 42.0)
    assert group.quiesce(5.0)
    assert (tensor == 42.0).all()
    assert used(made) == 0
    assert finished(made) == 1


def test_a_call_that_is_interrupted_before_it_has_a_handle_has_its_result_all_the_same(
    made: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = made.groups
    posted = CallChannel._posted

    def once(*given: Any) -> Any:
        monkeypatch.setattr(CallChannel, "_posted", posted)
        interrupt()

    monkeypatch.setattr(CallChannel, "_posted", once)
    tensor = call(group)
    assert used(made) > 0
    publish(made, 0, 42.0)
    assert group.quiesce(5.0)
    assert (tensor == 42.0).all()
    assert used(made) == 0
