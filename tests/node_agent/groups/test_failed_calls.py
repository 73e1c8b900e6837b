"""Calls that are refused, and nodes that cannot compute: who hears of it, and what goes on."""

from __future__ import annotations

import numpy as np
import pytest

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.groups.op_runs import OpRuns
from allfold_core.errors import Evicted, InvalidArgument, PeerLost, PeerRefused, ServiceError
from allfold_core.protocol.rank_messages import MAX_OPEN_OPS
from allfold_core.survival.instructions import Refuse
from tests.support.fakes.local_groups import local_groups


def test_a_tensor_that_is_not_aligned_is_refused() -> None:
    with local_groups([[0]]) as local:
        local.ranks[0].call(0, [1.0], shift=2)
        seq, error = local.ranks[0].outcome()
        assert seq == 0
        assert isinstance(error, InvalidArgument)
        assert "cannot lie at byte 2" in error.message


@pytest.mark.parametrize("numel", [1, 1_000_000])
def test_a_rank_is_told_when_its_node_cannot_compute(
    monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    with local_groups([[0]]) as local:
        with monkeypatch.context() as patch:
            patch.setattr(Arithmetic, "fold", fail)
            local.ranks[0].call(0, np.ones(numel))
            seq, error = local.ranks[0].outcome()
        assert seq == 0
        assert isinstance(error, ServiceError)
        assert "no such kernel" in error.message
        local.ranks[0].call(1, [1.0])
        assert local.ranks[0].outcome() == (1, None)


def test_a_rank_is_told_when_its_call_cannot_even_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not among those that have called, so no verdict on the op would reach it."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    with local_groups([[0, 1]]) as local:
        first, second = local.ranks
        with monkeypatch.context() as patch:
            patch.setattr("allfold_agent.compilation.op_spec.choose", fail)
            first.call(0, [1.0])
            seq, error = first.outcome()
        assert seq == 0
        assert isinstance(error, ServiceError)
        assert "op 0 of group 'test' failed: node node0: ZeroDivisionError" in error.message
        second.call(0, [1.0])
        assert str(second.outcome()[1]) == str(error)
        local.call_all(1, [[1.0], [2.0]])
        assert first.outcome() == second.outcome() == (1, None)
        assert first.result(1) == [3.0]


def test_what_an_event_has_led_to_is_done_even_if_the_event_fails() -> None:
    with local_groups([[0], [1]]) as local:
        group = local.groups[0]

        def fail_at_last() -> None:
            group.evict(Evicted("it goes on without this node"))
            raise ZeroDivisionError("a mistake of ours")

        local.ranks[0].call(0, [1.0])
        with pytest.raises(ZeroDivisionError):
            group.event(fail_at_last)
        assert isinstance(local.ranks[0].outcome()[1], Evicted)


def test_the_other_ops_of_a_decision_go_on_when_one_cannot_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse = OpRuns.refuse

    def fail_for_one(self: OpRuns, each: Refuse) -> None:
        if each.seq == 0:
            raise ZeroDivisionError("a mistake of ours")
        refuse(self, each)

    monkeypatch.setattr(OpRuns, "refuse", fail_for_one)
    with local_groups([[0], [1]]) as local:
        for seq in range(3):
            local.ranks[0].call(seq, [1.0])
        local.lose(1)
        outcomes = [local.ranks[0].outcome() for _ in range(2)]
        assert [(seq, type(error)) for seq, error in outcomes] == [(1, PeerLost), (2, PeerLost)]


@pytest.mark.parametrize("numel", [1, 300_000])
@pytest.mark.parametrize("broken", ["fold", "__init__"])
def test_all_ranks_are_told_when_a_node_cannot_compute(
    monkeypatch: pytest.MonkeyPatch, broken: str, numel: int
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    with local_groups([[0], [1]]) as local:
        monkeypatch.setattr(Arithmetic, broken, fail)
        local.call_all(0, [np.ones(numel)] * 2)
        said = [rank.outcome() for rank in local.ranks]
        for seq, error in said:
            assert seq == 0
            assert isinstance(error, ServiceError)
            assert "failed: node node" in error.message
            assert "no such kernel" in error.message
            assert str(error) == str(said[0][1]), "the same for all"


def test_a_rank_that_never_waits_for_its_ops_is_refused_one_too_many() -> None:
    with local_groups([[0, 1]]) as local:
        first, second = local.ranks
        for seq in range(MAX_OPEN_OPS + 1):
            first.call(seq, [1.0])
        seq, error = first.outcome()
        assert seq == MAX_OPEN_OPS
        assert isinstance(error, InvalidArgument)
        assert f"while {MAX_OPEN_OPS} ops are in flight" in error.message
        for seq in range(MAX_OPEN_OPS):
            second.call(seq, [2.0])
        outcomes = dict(second.outcome() for _ in range(MAX_OPEN_OPS))
        assert outcomes == dict.fromkeys(range(MAX_OPEN_OPS)), "nothing is lost"


@pytest.mark.parametrize(
    ("most", "shift", "frames_come_first"),
    [(4, 0, False), (MAX_OPEN_OPS, 2, False), (MAX_OPEN_OPS, 2, True)],
    ids=["one too many", "misaligned", "misaligned, frames come first"],
)
def test_an_op_of_which_a_call_is_refused_fails_on_all_nodes_and_later_ones_are_done(
    monkeypatch: pytest.MonkeyPatch, most: int, shift: int, frames_come_first: bool
) -> None:
    """The frames of the other nodes, which no call takes, must not stay in the way."""
    monkeypatch.setattr("allfold_agent.groups.local_ranks.MAX_OPEN_OPS", most)
    with local_groups([[0], [1]]) as local:
        one, other = local.ranks

        def call_from_the_other() -> None:
            for seq in range(4):
                other.call(seq, [2.0])
            for rank in local.ranks:
                # Ops in flight end in any order.
                assert dict(rank.outcome() for _ in range(4)) == dict.fromkeys(range(4))
            other.call(4, [2.0])

        for seq in range(4):
            one.call(seq, [1.0])
        if frames_come_first:
            call_from_the_other()
        one.call(4, [1.0], shift=shift)
        seq, error = one.outcome()
        assert seq == 4
        assert isinstance(error, InvalidArgument)
        if not frames_come_first:
            call_from_the_other()
        for rank in local.ranks:
            rank.call(5, [3.0], shift=shift if rank is one else 0)
        assert one.outcome() == (5, None)
        outcomes = dict(other.outcome() for _ in range(2))
        assert {seq for seq, failure in outcomes.items() if failure} == {4}
        assert isinstance(outcomes[4], PeerRefused)
        assert one.result(5) == other.result(5) == [6.0]


@pytest.mark.parametrize("ranks", [[[0, 1, 2]], [[0], [1, 2]]], ids=["one node", "two nodes"])
def test_an_op_that_a_rank_cannot_call_fails_for_the_others_with_its_reason(
    ranks: list[list[int]],
) -> None:
    """Also for those that call it later."""
    with local_groups(ranks) as local:
        odd, late, early = local.ranks
        early.call(0, [1.0])
        odd.group.calls.abandon(
            odd.session, 0, InvalidArgument("it is read-only."), call="broadcast"
        )
        seq, error = early.outcome()
        assert seq == 0
        assert isinstance(error, PeerRefused)
        assert error.message == (
            "op 0 of group 'test' cannot be done: rank 0 (node node0) could not call broadcast: it "
            "is read-only. No input was changed and the group is usable; look at the arguments of "
            "rank 0."
        )
        late.call(0, [1.0])
        assert str(late.outcome()[1]) == str(error)
        local.call_all(1, [[1.0]] * 3)
        assert [rank.outcome() for rank in local.ranks] == [(1, None)] * 3


def test_ops_that_no_rank_can_call_are_forgotten() -> None:
    with local_groups([[0, 1]]) as local:
        for seq in range(20):
            for rank in local.ranks:
                rank.group.calls.abandon(rank.session, seq, InvalidArgument("it cannot be"))
        assert local.groups[0].agreement.machine.remembered == 0
        local.call_all(20, [[1.0]] * 2)
        assert [rank.outcome() for rank in local.ranks] == [(20, None)] * 2


def test_calls_that_are_refused_without_end_do_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes remember each of the ops, for the ranks that have yet to call it."""
    monkeypatch.setattr("allfold_agent.groups.local_ranks.MAX_OPEN_OPS", 4)
    with local_groups([[0], [1]]) as local:
        odd, other = local.ranks
        for seq in range(100):
            odd.group.calls.abandon(odd.session, seq, InvalidArgument("it cannot be"))
        other.call(0, [1.0])
        assert isinstance(other.outcome()[1], PeerRefused)
        assert max(each.agreement.machine.remembered for each in local.groups) <= 2 * 16


def test_a_call_that_is_refused_because_it_came_twice_fails_nothing() -> None:
    with local_groups([[0], [1]]) as local:
        one, other = local.ranks
        one.call(0, [1.0])
        one.call(0, [1.0], shift=2)
        assert isinstance(one.outcome()[1], InvalidArgument)
        other.call(0, [2.0])
        assert one.outcome() == other.outcome() == (0, None)
        assert local.rounds == 0
