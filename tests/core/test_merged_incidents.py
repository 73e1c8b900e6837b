"""Incidents that several agents tell, put together."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_core.incident import Cause, Effect, Incident, merged, rank_culprit

NOW = 1_000_000.0


def incident(
    name: str, began: float, ended: float | None = None, sentence: str = "rank 3 on node b sleeps"
) -> Incident:
    return Incident(
        name, Cause.LATE_RANK, Effect.HANG, rank_culprit(3, "b"), sentence, "dp", 1, 7, began,
        began, ended, "b",
    )  # fmt: skip


def ids(told: list[Any]) -> list[str]:
    return [each.id for each in merged(told)]


def test_open_ones_come_first_and_the_oldest_of_them_then_the_latest_that_ended() -> None:
    told = [
        incident("young", NOW - 1),
        incident("over", NOW - 99, NOW - 60),
        incident("old", NOW - 9),
        incident("just over", NOW - 99, NOW - 5),
    ]
    assert ids([each.to_dict() for each in told]) == ["old", "young", "just over", "over"]


@pytest.mark.parametrize("turn", [1, -1])
def test_one_that_somebody_knows_to_be_over_is_over(turn: int) -> None:
    told = [incident("x", NOW - 9).to_dict(), incident("x", NOW - 9, NOW - 1).to_dict()]
    (found,) = merged(told[::turn])
    assert found.ended == NOW - 1


def test_what_is_no_incident_of_this_version_is_left_out() -> None:
    later = incident("x", NOW).to_dict() | {"cause": "sun_spots"}
    assert ids([later, {}, incident("y", NOW).to_dict()]) == ["y"]
