"""The ranks of a node that join its group, wait at a boundary, and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allfold_agent.groups.local_ranks import LocalRanks


class Of:
    """As much of an epoch as is asked for: who is in it."""

    def __init__(self, *sessions: str) -> None:
        self.has: Callable[[str], bool] = sessions.__contains__


class Ranks(LocalRanks):
    """Ranks of which a test knows what they have heard."""

    def __init__(self, *sessions: str) -> None:
        self.due: list[Callable[[], None]] = []
        self.heard: list[tuple[str, Any]] = []
        super().__init__(sessions, self.due.append)

    def asks(self, session: str) -> None:
        self.joins(session, lambda epoch: self.heard.append((session, epoch)))

    def stops(self, session: str) -> None:
        self.waits_at_boundary(session, lambda epoch: self.heard.append((session, epoch)))

    def settles(self, epoch: Any, *, is_over: bool = False) -> list[str]:
        return self.settle_joins(epoch, is_over=is_over)

    def do_what_is_due(self) -> list[tuple[str, Any]]:
        for each in self.due:
            each()
        self.due.clear()
        heard, self.heard = self.heard, []
        return heard


def test_who_joins_hears_of_its_first_epoch_once_and_others_go_on_waiting() -> None:
    ranks, epoch = Ranks("s0"), Of("s0", "s1")
    ranks.asks("s1")
    ranks.asks("s2")
    assert ranks.settles(epoch) == ["s1"]
    assert ranks.heard == [], "not while the lock is held"
    assert ranks.do_what_is_due() == [("s1", epoch)]
    assert ranks.settles(epoch) == []
    assert ranks.present == {"s0", "s1", "s2"}


def test_who_has_ended_is_let_in_nowhere() -> None:
    ranks = Ranks("s0")
    ranks.asks("s1")
    ranks.asks("s2")
    ranks.ended("s1")
    assert ranks.settles(Of("s0")) == []
    assert ranks.do_what_is_due() == [("s1", None)]
    assert ranks.present == {"s0", "s2"}


def test_those_who_wait_when_the_group_is_over_hear_so_and_hold_it_up_no_more() -> None:
    ranks = Ranks()
    ranks.asks("s1")
    assert not ranks.have_ended
    assert ranks.settles(Of(), is_over=True) == []
    assert ranks.do_what_is_due() == [("s1", None)]
    assert ranks.have_ended


def test_ranks_at_a_boundary_go_on_when_they_are_named_or_all_are_meant() -> None:
    ranks = Ranks("s0", "s1", "s2")
    for session in ("s0", "s1", "s2"):
        ranks.stops(session)
    epoch: Any = Of("s0", "s1")
    later: Any = Of("s0")
    ranks.leave_boundary(epoch, ["s1", "of another node"])
    assert ranks.do_what_is_due() == [("s1", epoch)]
    ranks.leave_boundary(later)
    assert ranks.do_what_is_due() == [("s0", later), ("s2", later)]
    ranks.leave_boundary(later)
    assert ranks.do_what_is_due() == []
