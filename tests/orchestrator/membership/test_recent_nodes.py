"""A node that registers hears of some others, to measure its links to them."""

from __future__ import annotations

from allfold_orchestrator.membership.nodes import RecentNodes


def test_a_node_hears_of_the_two_that_registered_last() -> None:
    recent = RecentNodes()
    assert recent.add("a", "a:1") == []
    assert recent.add("b", "b:1") == ["a:1"]
    assert recent.add("c", "c:1") == ["a:1", "b:1"]
    assert recent.add("d", "d:1") == ["b:1", "c:1"]


def test_a_node_that_registers_again_is_the_newest_and_no_other_to_itself() -> None:
    recent = RecentNodes()
    for name in "abc":
        recent.add(name, f"{name}:1")
    assert recent.add("a", "a:2") == ["b:1", "c:1"]
    assert recent.add("d", "d:1") == ["c:1", "a:2"]
    assert recent.add("d at its address", "d:1") == ["c:1", "a:2"]


def test_a_node_whose_life_is_over_is_forgotten() -> None:
    recent = RecentNodes()
    recent.add("a", "a:1")
    recent.remove("a")
    recent.remove("a")
    assert recent.add("b", "b:1") == []


def test_the_oldest_are_forgotten_where_many_register() -> None:
    recent = RecentNodes()
    for number in range(17):
        recent.add(str(number), f"{number}:1")
    assert len(recent._addresses) == 16
    assert "0" not in recent._addresses
