"""What may be open for a token's name: a group counts with its ranks, one too many is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.errors import LimitReached
from allfold_orchestrator.membership.admission import TokenLimit, refusal, share_of
from allfold_orchestrator.membership.group_state import GroupState
from tests.orchestrator.builders import GROUP, join, play
from tests.orchestrator.membership.running_groups import running

NOTHING = GroupState(GROUP)


def of_team(state: GroupState) -> GroupState:
    return replace(state, token="team-a")


def forming() -> GroupState:
    """A group of two ranks, of which one has come."""
    return of_team(play([join(0)])[0])


def limits(**limit: int) -> dict[str, TokenLimit]:
    return {"team-a": TokenLimit("team-a", **limit)}


def test_a_group_counts_with_all_its_ranks_from_the_first_one_on() -> None:
    assert share_of(forming()) == ("team-a", 2)
    assert share_of(of_team(running())) == ("team-a", 2)
    assert share_of(play([join(0)])[0]) is None, "its token has no name"
    assert share_of(of_team(NOTHING)) is None, "it is not open"


@pytest.mark.parametrize(
    ("limit", "kind"),
    [({"groups": 1, "open_groups": 1}, "groups"), ({"ranks": 5, "open_ranks": 4}, "ranks")],
)
def test_a_group_above_a_limit_is_refused_and_says_what_is_open(
    limit: dict[str, int], kind: str
) -> None:
    error = refusal(NOTHING, forming(), limits(**limit))
    assert isinstance(error, LimitReached)
    most = limit[kind]
    asked = limit[f"open_{kind}"] + (2 if kind == "ranks" else 1)
    assert f"token team-a would have {asked} {kind} open, and may have {most}" in error.message
    assert error.details["limit"] == most


def test_a_group_within_its_limits_or_without_any_opens() -> None:
    assert (
        refusal(NOTHING, forming(), limits(groups=2, open_groups=1, ranks=6, open_ranks=4)) is None
    )
    assert refusal(NOTHING, forming(), {}) is None
    assert refusal(NOTHING, play([join(0)])[0], limits(groups=0)) is None


def test_a_change_that_takes_no_more_than_before_is_never_refused() -> None:
    """A limit that was lowered ends nothing that is open."""
    assert refusal(forming(), of_team(running()), limits(groups=0, ranks=0)) is None
    other = replace(running(), token="team-b")
    assert refusal(other, of_team(running()), limits(groups=0)) is not None
