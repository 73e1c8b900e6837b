"""The nodes of a group, and their lives in it."""

from __future__ import annotations

from allfold_agent.edges.members import GroupNodes, lives_of
from allfold_core.survival.records import Term
from allfold_core.topology import Member


def member(node: str, incarnation: str = "x") -> Member:
    return Member(node, "", f"{node}:1", (), incarnation=incarnation)


FIRST = Term(1, 1, ("a", "b"), (1, 1))


def members() -> GroupNodes:
    return GroupNodes((member("a"), member("b"), member("gone")), FIRST)


def test_a_node_has_a_life_if_the_term_has_it() -> None:
    found = members()
    assert found.life_of("a") == ("a", 1)
    assert found.name_of_life("a") == "x.1"
    assert found.life_of("gone") is None
    assert found.name_of_life("gone") == ""
    assert [*found] == ["a", "b", "gone"]
    assert len(found) == 3


def test_a_node_that_comes_back_has_another_life_where_it_listens_now() -> None:
    found = members()
    again = member("b", "y")
    term = Term(3, 1, ("a", "b"), (1, 3), newcomers=(again,))
    assert lives_of(term) == {("a", 1), ("b", 3)}
    found.welcome([again], term)
    assert found["b"] is again
    assert found.life_of("b") == ("b", 3)
    assert found.name_of_life("b") == "y.3"


def test_the_end_of_an_earlier_life_does_not_end_the_present_one() -> None:
    found = members()
    found.welcome([member("b", "y")], Term(3, 1, ("a", "b"), (1, 3)))
    found.dismiss([("b", 1)])
    assert found.life_of("b") == ("b", 3)
    found.dismiss([("b", 3)])
    assert found.life_of("b") is None
    assert found["b"].incarnation == "y", "its address stays known"
