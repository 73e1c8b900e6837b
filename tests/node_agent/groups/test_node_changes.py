"""Links and edges follow the nodes that come into a group and go."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from allfold_agent.groups.neighbours import NodeChanges
from allfold_core.survival.records import Term
from allfold_core.topology import Member

FIRST = Term(1, 1, ("a", "b"), (1, 1))
NEWCOMER = Member("c", "", "c:1", (), incarnation="x")
WITH_C = Term(2, 1, ("a", "b", "c"), (1, 1, 2), newcomers=(NEWCOMER,))
WITHOUT_B = Term(3, 1, ("a", "c"), (1, 2), (("b", "dead"),), newcomers=(NEWCOMER,))
AGAIN = Member("b", "", "b:1", (), incarnation="y")
B_AGAIN = Term(4, 1, ("a", "c", "b"), (1, 2, 4), newcomers=(NEWCOMER, AGAIN))


class Changes:
    """A log of the changes of links and edges."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []
        self._changes = NodeChanges(self._note("link"), self._note("unlink"), self._note("drop"))

    def _note(self, what: str) -> Any:
        def note(nodes: Collection[Any]) -> None:
            self.done.append((what, [*nodes]))

        return note

    def between(self, before: Term, now: Term, *, frozen: bool = False) -> list[tuple[str, Any]]:
        self.done.clear()
        for action in self._changes.actions_between(before, now, frozen=frozen):
            action()
        return [*self.done]


def test_a_node_that_comes_gets_a_link_and_one_that_goes_loses_it() -> None:
    changes = Changes()
    assert changes.between(FIRST, WITH_C) == [("link", [NEWCOMER])]
    assert changes.between(WITH_C, WITH_C) == []
    assert changes.between(WITH_C, WITHOUT_B) == [("unlink", ["b"]), ("drop", [("b", 1)])]


def test_the_edges_of_a_node_stay_until_the_round_is_over() -> None:
    changes = Changes()
    assert changes.between(WITH_C, WITHOUT_B, frozen=True) == [("unlink", ["b"])]
    assert changes.between(WITHOUT_B, WITHOUT_B, frozen=True) == []
    assert changes.between(WITHOUT_B, WITHOUT_B) == [("drop", [("b", 1)])]
    assert changes.between(WITHOUT_B, WITHOUT_B) == []


def test_a_node_that_left_and_came_back_gets_another_link_and_loses_its_earlier_edges() -> None:
    told = Changes().between(WITH_C, B_AGAIN)
    assert told == [("unlink", ["b"]), ("link", [AGAIN]), ("drop", [("b", 1)])]
