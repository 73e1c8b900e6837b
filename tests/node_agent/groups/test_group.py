"""The groups of several nodes with each other: exact over breaking connections, and what fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

import numpy as np
import pytest

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.execution.op import Op
from allfold_agent.groups.deadlines import DEADLINE_RETRY_SECONDS
from allfold_agent.groups.group import NodeGroup
from allfold_core.errors import InvalidArgument, PeerLost, PeerMissing
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.instructions import Instruction
from allfold_core.survival.reports import Doubt, Reason
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import SECONDS, no_outcome
from tests.support.waiting import wait_until

STRATEGIES = (
    "ring",
    "direct",
    "direct2",
    "halving_doubling",
    "double_tree",
    "centralized",
    "tree(2)",
    "chain",
)
SIZES = (1, 2, 5, 100, 3_000, 20_000)
LARGE = 200_000  # computed by the workers
OPS = 60


def values(seq: int, numel: int, rank: int) -> np.ndarray:
    return ((np.arange(numel) * 7 + rank * 13 + seq) % 17 - 8).astype(np.float32)


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_ops_of_all_strategies_are_exact_however_often_connections_break(
    nodes: int, seed: int
) -> None:
    """Frames are sent again from memory that later steps of the same op would overwrite."""
    with local_groups([[rank] for rank in range(nodes)], random.Random(seed)) as local:
        sizes = [SIZES[seq % len(SIZES)] for seq in range(OPS)]
        for seq, numel in enumerate(sizes):
            given = [values(seq, numel, rank) for rank in range(nodes)]
            local.call_all(seq, given, strategy=STRATEGIES[seq % len(STRATEGIES)])
        for rank in local.ranks:
            outcomes = dict(rank.outcome() for _ in range(OPS))
            assert outcomes == dict.fromkeys(range(OPS))
        for seq, numel in enumerate(sizes):
            right = sum(values(seq, numel, rank) for rank in range(nodes))
            for rank in local.ranks:
                assert np.array_equal(rank.result(seq), right), (seq, rank.rank)
        assert local.connections > 2 * nodes, "they should have broken"
        assert local.rounds == 0


@pytest.mark.parametrize("seed", range(12))
def test_who_leaves_first_still_owes_the_others_their_results(seed: int) -> None:
    """Also where the connection breaks at this very moment, and is opened again."""
    with local_groups([[0], [1]], random.Random(seed)) as local:
        for seq in range(10):
            local.call_all(seq, [np.ones(20_000)] * 2, strategy="centralized")
        first, second = local.ranks
        assert dict(first.outcome() for _ in range(10)) == dict.fromkeys(range(10))
        local.groups[0].close(SECONDS)
        assert dict(second.outcome() for _ in range(10)) == dict.fromkeys(range(10))
        assert local.rounds == 0


def test_a_second_call_of_an_op_by_one_rank_is_no_call_of_another() -> None:
    with local_groups([[0, 1]]) as local:
        first, second = local.ranks
        first.call(0, [1.0])
        first.call(0, [5.0])
        seq, error = first.outcome()
        assert seq == 0
        assert isinstance(error, InvalidArgument)
        assert "called op 0 of group 'test' before" in error.message
        assert no_outcome(second, 0.05)
        second.call(0, [2.0])
        assert first.outcome() == second.outcome() == (0, None)
        assert second.result(0) == [3.0]
        first.call(0, [1.0])
        assert isinstance(first.outcome()[1], InvalidArgument), "nor is one that comes later"


def test_an_op_of_a_node_that_dies_fails_while_a_frame_of_it_waits_for_local_ranks() -> None:
    with local_groups([[0], [1]]) as local:
        local.call_all(0, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        local.ranks[1].call(1, [2.0])
        local.lose_node(1)
        local.ranks[0].call(1, [1.0])
        assert isinstance(local.ranks[0].outcome()[1], PeerLost)


def missing(*ranks: int) -> PeerMissing:
    return PeerMissing("too late", missing_ranks=list(ranks))


# Deadlines


def waiting(local: LocalGroups, count: int, timeout: float) -> None:
    """Node 0 has called ops that node 1 has not."""
    for seq in range(count):
        local.ranks[0].call(seq, [1.0], timeout=timeout)


def overdue(group: NodeGroup, now: float) -> list[int]:
    """The ops that need a verdict as their deadline has passed."""
    return [op.seq for op in group.deadlines._overdue(now)]


def test_ops_past_their_deadline_are_looked_into_a_few_at_a_time_and_again_later() -> None:
    """Else the questions about them would keep the nodes from doing others."""
    with local_groups([[0], [1]]) as local:
        waiting(local, 300, 0.5)
        group, now = local.groups[0], monotonic()
        first = overdue(group, now + 1.0)
        assert first == list(range(len(first)))
        assert 1 <= len(first) <= 16
        assert overdue(group, now + 1.0) == [len(first) + each for each in first]
        assert overdue(group, now + 1.0 + DEADLINE_RETRY_SECONDS) == first


def test_the_deadline_of_an_op_counts_from_the_call_and_not_from_its_data() -> None:
    """A call whose data were late by 60 s of its 100 has 40 left."""
    with local_groups([[0, 1], [2]]) as local:
        now = monotonic()
        local.ranks[0].call(0, [1.0], timeout=100.0, called=now - 60.0)
        group = local.groups[0]
        assert overdue(group, now + 39.9) == []
        assert overdue(group, now + 40.0) == [0]


# Verdicts


def judge_deadline(local: LocalGroups, seq: int) -> None:
    """Have the nodes judge an op as if its deadline had just passed on the first node."""
    local.groups[0].runs.doubt([Doubt(seq, Reason.DEADLINE, SECONDS)])


def test_a_verdict_about_missing_ranks_names_them_and_holds_for_their_late_calls() -> None:
    with local_groups([[0], [1, 2]]) as local:
        first, second, third = local.ranks
        for rank in (first, second):
            rank.call(0, [1.0])
        judge_deadline(local, 0)
        said = [rank.outcome() for rank in (first, second)]
        third.call(0, [1.0])
        said.append(third.outcome())
        for seq, error in said:
            assert seq == 0
            assert isinstance(error, PeerMissing)
            assert error.details["missing_ranks"] == [2]
            assert str(error) == str(said[0][1])
        local.call_all(1, [[1.0]] * 3)
        for rank in local.ranks:
            assert rank.outcome() == (1, None), "every call has one outcome, and the next op works"


def test_a_verdict_on_an_op_that_is_done_changes_nothing() -> None:
    with local_groups([[0], [1]]) as local:
        local.call_all(0, [[1.0], [2.0]])
        for rank in local.ranks:
            assert rank.outcome() == (0, None)
        judge_deadline(local, 0)
        wait_until(lambda: local.rounds == 1 and not local.undecided, "it is judged")
        assert [group.failure(0) for group in local.groups] == [None, None]
        local.call_all(1, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(1, None)] * 2


def test_what_becomes_complete_during_a_round_is_handed_out_after_it() -> None:
    with local_groups([[0], [1]]) as local:
        first, second = local.ranks
        first.call(0, [1.0])
        local.links.hold(LinkMessageType.INSTALL)
        local.groups[1].runs.doubt([Doubt(99, Reason.MISMATCH)])
        wait_until(lambda: local.links.count(LinkMessageType.INSTALL), "the leader has decided")
        for seq in (0, 1):
            second.call(seq, [2.0])
        first.call(1, [1.0])
        assert no_outcome(second, 0.02), "its node has reported that it has none"
        local.links.release()
        for rank in local.ranks:
            assert [rank.outcome(), rank.outcome()] == [(0, None), (1, None)]
            assert rank.result(0) == rank.result(1) == [3.0]


def test_an_op_that_fails_before_it_starts_gives_its_memory_back_once() -> None:
    """Twice, and two later ops would work in the same memory."""
    with local_groups([[0], [1]]) as local:
        group = local.groups[0]
        started = group.current.runner.start

        def fail_first(op: Op) -> Callable[[], None]:
            start = started(op)

            def fail_and_start() -> None:
                local.fail(0, missing(1))
                start()

            return fail_and_start

        group.current.runner.start = fail_first  # type: ignore[method-assign]
        local.ranks[0].call(0, [1.0])
        assert local.ranks[0].outcome()[1] is not None
        pool = local.buffers
        first, second = pool.take(100), pool.take(100)
        assert first is not second


# What fails on a node, and what an op that has failed leaves behind


class Paused:
    """Arithmetic that waits in the middle of a fold of two operands."""

    def __init__(self) -> None:
        self.inside, self.go_on = Event(), Event()
        self._fold = Arithmetic.fold

    def __call__(self, arithmetic: Arithmetic, out: Array, operands: list[Array]) -> None:
        if len(operands) > 1:
            self.inside.set()
            assert self.go_on.wait(SECONDS)
        self._fold(arithmetic, out, operands)


def test_a_fold_that_a_verdict_overtakes_writes_into_nobody_elses_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused = Paused()
    monkeypatch.setattr(Arithmetic, "fold", lambda *arguments: paused(*arguments))
    with local_groups([[0], [1]]) as local:
        # A thread: who calls sends, and may be the one that folds what has come meanwhile.
        values = [np.ones(LARGE)] * 2
        caller = Thread(target=lambda: local.call_all(0, values, strategy="direct"))
        caller.start()
        assert paused.inside.wait(SECONDS)
        local.fail(0, missing(1))
        taken = [local.buffers.take(LARGE) for _ in range(8)]
        for buffer in taken:
            buffer.view[:] = bytes([7]) * len(buffer.view)
        paused.go_on.set()
        caller.join(SECONDS)
        local.call_all(1, [[1.0], [2.0]], strategy="direct")
        for rank in local.ranks:
            assert [rank.outcome()[0] for _ in range(2)] == [0, 1]
            assert rank.result(1) == [3.0]
        assert all(set(buffer.view) == {7} for buffer in taken)


def test_the_ops_behind_one_that_fails_go_on_at_once() -> None:
    with local_groups([[0], [1]]) as local:
        local.call_all(0, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        local.ranks[0].call(1, [1.0], strategy="centralized")  # sends when it has heard of rank 1
        for rank in local.ranks:
            rank.call(2, [3.0])
        assert no_outcome(local.ranks[1], 0.1), "op 2 is sent behind op 1"
        local.fail(1, missing(1))
        assert local.ranks[1].outcome(2.0) == (2, None), "before the edge looks by itself"
        assert local.ranks[1].result(2) == [6.0]


def test_what_is_taken_over_from_the_short_lane_begins_before_a_later_op_that_came_as_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lane may be closed while a decision is carried out: what the taken over calls lead to is
    carried out behind it, and the ops have to be in order on the edges all the same.
    """
    with local_groups([[0], [1]]) as local:
        group, rank, other = local.groups[0], *local.ranks
        carry_out = group.decisions.carry_out
        posted = list(range(3))

        def close_the_lane_first(instruction: Instruction) -> None:
            while posted:
                rank.call(posted.pop(0), [1.0, 4.0], strategy="ring", posted=True)
            carry_out(instruction)

        monkeypatch.setattr(group.decisions, "carry_out", close_the_lane_first)
        rank.call(3, [1.0, 4.0], strategy="ring")
        for seq in range(4):
            other.call(seq, [2.0, 5.0], strategy="ring")
        for each in local.ranks:
            assert sorted(each.outcome(5.0) for _ in range(4)) == [(seq, None) for seq in range(4)]
            assert all(list(each.result(seq)) == [3.0, 9.0] for seq in range(4))


def test_thousands_of_small_frames_are_let_go_of_when_they_have_come() -> None:
    with local_groups([[0], [1]]) as local:
        for seq in range(2000):
            local.call_all(seq, [[1.0], [2.0]], strategy="tree(2)")
            assert [rank.outcome() for rank in local.ranks] == [(seq, None)] * 2
        for group, other in ((0, 1), (1, 0)):
            assert len(local.groups[group].edges.out(f"node{other}")._frames.unacked) < 200
