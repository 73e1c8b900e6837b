"""What the orchestrator says of a node's groups reaches those that it is meant for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from allfold_agent.membership.group_terms import GroupTerms


class Noted:
    """A group that notes whether it was evicted."""

    def __init__(self, opening: int) -> None:
        self.name, self.opening = "train", opening
        self.record, self.evicted = {"epoch": opening}, None
        self.errors: list[Exception] = []

    def registered(self, generation: int) -> None:
        pass

    def evict(self, error: Exception) -> None:
        self.errors.append(error)


def test_only_the_opening_of_a_group_that_a_registration_spoke_of_goes_on_without_the_node() -> (
    None
):
    groups = [Noted(3)]
    registry: Any = SimpleNamespace(all=lambda: groups)
    reactor: Any = SimpleNamespace(call=lambda task: task())
    notices: Any = None
    terms = GroupTerms("node0", registry, notices, reactor)
    terms.held()
    groups.append(Noted(4))
    terms.registered(1, ["train"])
    assert [len(each.errors) for each in groups] == [1, 0]
