"""Ranks for which an op waits on one node, looked at in turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from allfold_agent.groups.deadlines import WaitingOp
from allfold_agent.observation import wait_observer
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.samples import GroupSampler
from allfold_agent.observation.wait_observer import WaitObserver
from allfold_core.diagnosis.processes import ProcessLook, Stacks
from allfold_core.incident import Incident
from tests.node_agent.observation.groups import as_group, observed_group

LATE = (1, 2, 3)
STACK_SECONDS = 0.4
WAIT = WaitingOp(7, "barrier()", "ring", LATE, (), since=100.0)


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that runs while stacks are read, and an op that waits for three ranks."""
    clock = Clock()

    def slow(pid: int) -> Stacks:
        del pid
        clock.time += STACK_SECONDS
        return ()

    def look(pid: int) -> ProcessLook:
        del pid
        return ProcessLook(clock.time, "S")

    monkeypatch.setattr(wait_observer, "monotonic", clock)
    monkeypatch.setattr(wait_observer, "stacks_of", slow)
    monkeypatch.setattr(wait_observer, "look_at", look)
    monkeypatch.setattr(wait_observer, "waiting_ops", lambda _: [WAIT])
    return clock


def culprits(told: Sequence[Incident]) -> list[int | None]:
    return [each.culprit.rank for each in told]


def test_the_stacks_of_many_late_ranks_hold_up_nothing_else_on_their_node(clock: Clock) -> None:
    told: list[Incident] = []
    group = observed_group(dict.fromkeys(range(4), "a"))
    group.lanes.records.last_called = lambda: dict.fromkeys(range(4), 6)
    sampler = GroupSampler(as_group(group), clock.time)
    waits = WaitObserver(as_group(group), Incidents("a", told.append), sampler)
    pids = {f"session {rank}": 1000 + rank for rank in LATE}

    clock.time = 101.5
    waits.look(clock.time, clock.time, pids)  # its first look at them
    waits.look(clock.time, clock.time, pids)
    assert culprits(told) == [1, 2]
    waits.look(clock.time, clock.time, pids)
    assert culprits(told) == [1, 2, 3]
