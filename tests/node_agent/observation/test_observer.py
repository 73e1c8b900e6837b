"""The observer of all groups: one that cannot be looked at does not hide the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from allfold_agent.groups.group import NodeGroup
from allfold_agent.observation import observer as module
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.observer import Observer


@dataclass(eq=False)
class Named:
    """A group of which only the name is looked at."""

    name: str
    opening: int = 1
    is_broken: bool = False
    looks: list[float] = field(default_factory=list)
    is_closed: bool = False


class Looking:
    """The observer of one such group."""

    def __init__(self, group: Named, *_: object) -> None:
        self._group = group
        self.samples: list[dict[str, Any]] = []

    def look(self, now: float, wall: float, _: object) -> None:
        if self._group.is_broken:
            raise RuntimeError("cannot be read")
        self._group.looks.append(now)
        self.samples.append({"at": wall})

    def close(self, wall: float) -> None:
        self._group.is_closed = True


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Named]:
    monkeypatch.setattr(module, "GroupObserver", Looking)
    return [Named("broken", is_broken=True), Named("whole")]


@pytest.fixture
def observer(groups: list[Named]) -> Observer:
    incidents = Incidents("b", lambda _: None)
    return Observer(lambda: [cast(NodeGroup, each) for each in groups], dict, incidents)


def test_a_group_that_cannot_be_looked_at_hides_no_other_and_does_not_fill_the_log(
    groups: list[Named], observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for now in (1.0, 2.0, 3.0):
            observer.look(now, 100.0 + now)
    assert groups[1].looks == [1.0, 2.0, 3.0]
    assert caplog.messages == ["the observer cannot look at group 'broken'; it goes on"]


def test_it_is_said_once_when_a_group_can_be_looked_at_again(
    groups: list[Named], observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        observer.look(1.0, 101.0)
        groups[0].is_broken = False
        for now in (3.5, 4.5):
            observer.look(now, 100.0 + now)
    assert caplog.messages[1:] == ["the observer can look at group 'broken' again, after 2.5 s"]


def test_a_group_that_is_over_is_closed_and_has_no_history_any_more(
    groups: list[Named], observer: Observer
) -> None:
    whole = groups.pop()
    groups[:] = [whole]
    observer.look(1.0, 101.0)
    observer.look(2.0, 102.0)
    assert observer.history(101.5) == [{"name": "whole", "opening": 1, "samples": [{"at": 102.0}]}]
    groups.clear()
    observer.look(3.0, 103.0)
    assert whole.is_closed
    assert observer.history(0.0) == []


def test_a_group_that_is_over_before_the_next_look_is_looked_at_once_and_closed(
    groups: list[Named], observer: Observer
) -> None:
    whole = groups.pop()
    groups.clear()
    observer.opened(cast(NodeGroup, whole))
    for now in (1.0, 2.0):
        observer.look(now, 100.0 + now)
    assert whole.looks == [1.0]
    assert whole.is_closed
