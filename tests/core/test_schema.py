"""The rule by which messages and records of other versions are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.schema import MESSAGE, Schema, UnknownSchema, unchanged
from allfold_core.topology import LinkModel, Member


def renamed(data: dict[str, Any]) -> dict[str, Any]:
    return {"new": data["old"]}


SCHEMA = Schema("record", 3, {1: renamed, 2: unchanged})
PLAN = Plan(
    "g", 1, 1, (Member("a", "http://a:1", "a:2", (0,)),), (0,), LinkModel(), GroupOptions(30.0)
)


def test_data_of_the_present_schema_is_read_as_it_is() -> None:
    assert SCHEMA.read(SCHEMA.stamp({"new": 1})) == {"new": 1}


def test_data_of_an_older_schema_is_upgraded_step_by_step() -> None:
    assert SCHEMA.read({"schema": 1, "old": 1}) == {"new": 1}
    assert SCHEMA.read({"schema": 2, "new": 1}) == {"new": 1}


@pytest.mark.parametrize("number", [0, 4, -1, "3", True, 3.0, None])
def test_data_of_any_other_schema_is_refused_with_both_numbers(number: object) -> None:
    with pytest.raises(UnknownSchema, match="up to schema 3") as caught:
        SCHEMA.read({"schema": number})
    assert f"schema {number!r}" in str(caught.value)


def test_data_without_a_number_is_of_schema_0() -> None:
    assert MESSAGE.read({"a": 1}) == {"a": 1}
    with pytest.raises(UnknownSchema, match="schema 0"):
        SCHEMA.read({"new": 1})


def test_a_plan_carries_its_schema_and_one_of_a_newer_schema_is_refused() -> None:
    written = PLAN.to_dict()
    assert written["schema"] == 4
    assert Plan.from_dict(written) == PLAN == replace(PLAN)
    with pytest.raises(UnknownSchema, match="this plan has schema 5"):
        Plan.from_dict({**written, "schema": 5})
