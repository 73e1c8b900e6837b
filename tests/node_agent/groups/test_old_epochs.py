"""A group that loses rank after rank does not remember all it ever was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from allfold_agent.groups.epoch import CHANGES_KEPT
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.rounds import ClosingSignals
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.instructions import Installed
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.fakes.local_rank import LocalRank, no_outcome
from tests.support.policies import policy_with
from tests.support.waiting import wait_until

WORLD = 8


def work(local: LocalGroups, seq: int, ranks: list[LocalRank]) -> None:
    """Have those who are left do an op, and all nodes know that it is done."""
    for rank in ranks:
        rank.call(seq, np.ones(3))
    for rank in ranks:
        assert rank.outcome() == (seq, None)
    wait_until(lambda: not any(group.table.in_flight for group in local.groups), "it is over")
    local.links.ping()
    local.links.ping()


@contextmanager
def shrinking(ranks: list[list[int]]) -> Iterator[LocalGroups]:
    with local_groups(ranks, plan=make_plan(ranks, on_loss="shrink")) as local:
        yield local


def ordinals(group: NodeGroup) -> list[int]:
    return list(group.epochs)


@pytest.mark.parametrize("last", [[1], [1, 2]], ids=str)
def test_epochs_that_nobody_can_name_are_forgotten(last: list[int]) -> None:
    with shrinking([[0], [*range(1, WORLD)]]) as local:
        left = list(local.ranks)
        for seq in range(WORLD - 1 - len(last)):
            work(local, seq, left)
            local.lose(left.pop().rank)
        newest = local.groups[0].current.ordinal
        assert newest == WORLD - 1 - len(last)
        for group in local.groups:
            assert ordinals(group) == [0, newest - 2, newest - 1, newest], "as known at a call"
            assert len(group.epoch_table.changes) == newest
        work(local, newest, left)


def test_a_rank_that_waits_for_no_outcome_may_still_name_the_epoch_that_it_knows() -> None:
    with shrinking([[*range(7)]]) as local:
        group, lazy = local.groups[0], local.ranks[0]
        for seq, lost in enumerate(range(6, 2, -1)):
            local.lose(lost)
            work(local, seq, local.ranks[:lost])
            lazy.view = min(lazy.view, 1)
        assert ordinals(group) == [0, 1, 2, 3, 4]
        work(local, 4, local.ranks[:3])
        work(local, 5, local.ranks[:3])
        local.lose(2)
        assert ordinals(group) == [0, 4, 5]


def test_an_op_in_flight_keeps_the_epochs_of_its_calls() -> None:
    with shrinking([[0, 1, 2, 3, 4]]) as local:
        local.ranks[4].call(0, [1.0])
        local.ranks[0].call(0, [1.0])
        for lost in (4, 3):
            local.lose(lost)
        assert no_outcome(local.ranks[0], 0.02)
        for rank in local.ranks[1:3]:
            rank.call(0, [1.0])
        for rank in local.ranks[:3]:
            assert rank.outcome() == (0, None)


def test_the_latest_losses_are_remembered_for_people() -> None:
    with shrinking([[*range(CHANGES_KEPT + 3)]]) as local:
        for rank in range(CHANGES_KEPT + 2, 0, -1):
            local.lose(rank)
        losses = local.groups[0].epoch_table.changes
        assert len(losses) == CHANGES_KEPT
        assert "has lost rank 1 on" in losses[-1]


def test_what_a_dead_rank_had_deferred_is_forgotten() -> None:
    with local_groups([[0, 1]]) as local:
        group = local.groups[0]
        group.deferred |= {(local.ranks[0].session, 3), (local.ranks[1].session, 4)}
        local.ranks[1].end()
        assert dict(group.decisions.deferred_calls()) == {local.ranks[0].session: 3}


def test_a_node_that_has_joined_does_without_epochs_of_nodes_it_never_knew() -> None:
    with local_groups([[0, 1]]) as local:
        group = local.groups[0]
        known = group.current.record
        before = Epoch(Stamp(0, 0, -1), -1, (Seat("x", "lost", 0), Seat("y", group.node, 1)))
        later = replace(known, stamp=Stamp(known.stamp.term, 1, 0), ordinal=known.ordinal + 1)
        with group.table.changed:
            group.decisions.carry_out(Installed(later, (before, known)))
        assert ordinals(group) == [0, 1]
        assert group.current.record == later


def test_an_op_that_a_decision_has_ended_on_all_nodes_needs_no_closing_signal() -> None:
    seats = (Seat("x", "a", 0), Seat("y", "b", 1))
    epoch = Epoch(Stamp(0, 0, 0), 0, seats)
    machine = AgentMachine(
        "a", policy_with(on_loss="shrink"), Term(0, 0, ("a", "b"), (0, 0)), epoch
    )
    sent: list[str] = []
    signals = ClosingSignals(machine, lambda node, *_: sent.append(node), lambda _: None)
    signals.announce(0)
    assert sent == []
