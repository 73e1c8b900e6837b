"""Wanted names of groups: ranks ask for them, and have not got them yet."""

from __future__ import annotations

import pytest

from allfold_orchestrator.membership.group_state import GroupState
from allfold_orchestrator.membership.nodes import ASKS_AGAIN_SECONDS, WantedNames
from tests.orchestrator.builders import GROUP, join, leave, play

FREE = GroupState(GROUP)


@pytest.fixture
def names() -> WantedNames:
    return WantedNames()


def test_a_name_is_wanted_as_long_as_a_refused_rank_may_ask_again(names: WantedNames) -> None:
    assert not names.has(FREE, 0.0)
    names.refused(GROUP, 10.0)
    assert [*names] == [GROUP]
    assert names.has(FREE, 10.0 + ASKS_AGAIN_SECONDS)
    assert not names.has(FREE, 10.1 + ASKS_AGAIN_SECONDS)


def test_a_rank_that_has_a_seat_wants_the_name_once_all_seats_are_taken(names: WantedNames) -> None:
    names.waits(GROUP)
    assert not names.has(play([join(0)])[0], 0.0)
    before = play([join(0), join(1), leave(1)])[0]
    complete = play([join(0, session="n0"), join(1, session="n1")], before)[0]
    assert complete.forming is not None
    assert names.has(complete, 0.0)


def test_a_name_is_forgotten_when_nobody_waits_for_it(names: WantedNames) -> None:
    names.waits(GROUP)
    names.forget_if_unwanted(play([join(0)])[0], 0.0)
    assert [*names] == [GROUP], "a rank has a seat"
    names.refused(GROUP, 1.0)
    names.forget_if_unwanted(FREE, 1.0 + ASKS_AGAIN_SECONDS)
    assert [*names] == [GROUP], "a rank may ask again"
    names.forget_if_unwanted(FREE, 1.1 + ASKS_AGAIN_SECONDS)
    assert [*names] == []
