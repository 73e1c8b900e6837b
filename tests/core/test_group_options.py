"""The table of a group's options: how a rank is given them, and how they are written down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allfold_core.errors import InvalidArgument
from allfold_core.group_options import BY_ARGUMENT, NAMES, OPTIONS, Given, GroupOptions, checked

VARIABLES = {
    "ALLFOLD_TIMEOUT": "7",
    "ALLFOLD_INIT_TIMEOUT": "8.5",
    "ALLFOLD_STRATEGY": "all_reduce=tree",
    "ALLFOLD_WIRE": "int8",
    "ALLFOLD_ON_LOSS": "shrink",
    "ALLFOLD_MIN_WORLD": "2",
    "ALLFOLD_MAX_WORLD": "4",
    "ALLFOLD_TRAFFIC": "background",
    "ALLFOLD_GROUP_KEY": "hush",
}
FROM_VARIABLES = GroupOptions(
    7.0, {"all_reduce": "tree(2)"}, "shrink", 2, 4, "any", 8.5, "hush", "background"
)


def options(
    given: dict[str, Any], environment: dict[str, str] | None = None, *, fixed: bool = False
) -> GroupOptions:
    return GroupOptions.from_dict(checked(given, environment or {}, 3, fixed=fixed))


def test_what_neither_arguments_nor_variables_give_has_its_default() -> None:
    assert options({}).to_dict() == {**GroupOptions(300.0).to_dict(), "join_timeout": 60.0}
    assert options({}, dict.fromkeys(VARIABLES, "")) == options({})


def test_every_variable_is_read_and_an_argument_wins() -> None:
    assert set(VARIABLES) == {each.variable for each in OPTIONS} - {""}
    assert options({}, VARIABLES).to_dict() == FROM_VARIABLES.to_dict()
    given = {
        "timeout": 1,
        "init_timeout": 2,
        "strategies": {"barrier": "direct"},
        "on_loss": "raise",
        "min_world": 1,
        "max_world": 3,
        "joins": "commit",
        "traffic": "high",
        "group_key": "",
    }
    won = GroupOptions(1.0, {"barrier": "direct"}, "raise", 1, 3, "commit", 2.0, "", "high")
    assert options(given, VARIABLES).to_dict() == won.to_dict()


def test_a_group_whose_ranks_never_change_has_no_options_about_changes() -> None:
    told = options({}, VARIABLES, fixed=True)
    assert (told.on_loss, told.min_world, told.max_world) == ("raise", 1, None)
    assert (told.timeout, told.key) == (7.0, "hush")


SECONDS = "is a positive number of seconds, at most 2592000 (30 days), got"


def refusal(given: dict[str, Any], environment: dict[str, str]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        options(given, environment)
    return caught.value.message


@pytest.mark.parametrize(
    ("argument", "value", "why"),
    [
        ("timeout", "0", f"{SECONDS} '0'"),
        ("init_timeout", "x", f"{SECONDS} 'x'"),
        ("on_loss", "cry", "is one of raise, shrink, got 'cry'"),
        ("min_world", "4", "is a number of ranks from 1 to 3, the world size; got 4"),
        ("max_world", "none", "is a number of ranks from 1 on; got none"),
        ("traffic", "low", "is one of background, normal, high, got 'low'"),
        ("group_key", "k" * 1025, "has more than 1024 bytes, the longest that a key has"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_source(
    argument: str, value: str, why: str
) -> None:
    variable = BY_ARGUMENT[argument].variable
    assert refusal({argument: value}, {}) == f"{argument} {why}"
    assert refusal({}, {variable: value}) == f"{variable} {why}"


@pytest.mark.parametrize(
    ("argument", "value", "why"),
    [
        ("strategies", "ring", "'ring' in 'ring' is not of the form kind=strategy"),
        (
            "wire",
            "int3",
            "unknown wire format 'int3'; there are native, float32, bfloat16, float16, int8, int4, "
            "int2, sign, topk",
        ),
        (
            "wire",
            "topk",
            "wire='topk' cannot be that of a group: calls ask for it, with feedback='name'",
        ),
    ],
)
def test_a_name_that_is_none_is_shown_with_the_variable_that_has_it(
    argument: str, value: str, why: str
) -> None:
    variable = BY_ARGUMENT[argument].variable
    assert refusal({argument: value}, {}) == why
    assert refusal({}, {variable: value}) == f"{variable}: {why}"


def test_the_limits_of_a_group_fit_each_other() -> None:
    with pytest.raises(InvalidArgument, match="max_world is 2, and 3 ranks are to open the group"):
        options({"max_world": 2})
    assert options({"min_world": 4, "max_world": 4}).min_world == 4
    with pytest.raises(InvalidArgument, match="min_world is a number of ranks from 1 to 4, max_w"):
        options({"min_world": 5, "max_world": 4})
    with pytest.raises(InvalidArgument, match="joins is one of any, commit, got 'now'"):
        options({"joins": "now"})


def test_every_default_passes_its_own_check_as_a_variable() -> None:
    written = {each.variable: each.default for each in OPTIONS if each.variable}
    assert options({}, written) == options({})


def test_options_survive_json_and_one_that_is_not_written_has_its_default() -> None:
    written = json.loads(json.dumps({**FROM_VARIABLES.to_dict(), "of": "another release"}))
    assert GroupOptions.from_dict(written).to_dict() == FROM_VARIABLES.to_dict()
    assert GroupOptions.from_dict({"timeout": 7.0}) == GroupOptions(7.0)


def test_how_long_ranks_wait_for_others_they_need_not_agree_on() -> None:
    assert GroupOptions(1.0, join_timeout=2.0) == GroupOptions(1.0)


def test_a_key_is_not_shown() -> None:
    assert "hush" not in repr(FROM_VARIABLES)


def test_every_option_has_a_row_and_an_argument() -> None:
    assert {each.name for each in OPTIONS} == {*NAMES, "wire"}
    assert {*BY_ARGUMENT} == {*Given.__annotations__}


def test_without_a_known_world_size_a_least_number_of_ranks_has_no_upper_bound() -> None:
    check = BY_ARGUMENT["min_world"].check
    assert check("min_world", "500", {}) == 500
    with pytest.raises(InvalidArgument, match="min_world is a number of ranks from 1 on; got 0"):
        check("min_world", "0", {})
